"""Runs scripts under `lowtide watch` and prints a line of JSON for each.

They run in forks of this process, which has loaded torch and run nothing of it, several scripts in each: a fork costs
as much as a script. What a script leaves alive is frozen, and so hidden from the watches of those after it.
"""

import gc
import io
import json
import os
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch._dynamo  # noqa: F401  which optimizers import late

import lowtide.diagnostics.leaks.watcher
import lowtide.script.runner  # noqa: F401
from lowtide.cli import main

IN_ONE_PROCESS = 8
"""Number of scripts that one process runs."""

PUTS_INTO_IMPORTED_MODULES = ("LT016_bad", "last_exception_of_a_prompt")
"""Scripts that put tensors into modules that are imported here: results of interactive lines, the last exception.

They see all that is frozen, so each runs in a process of its own.
"""


def run(script: str) -> dict[str, object]:
    printed, said = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(printed), redirect_stderr(said):
        found = Path(folder, "found.json")
        code = main(["watch", "--json", str(found), script])
        record = json.loads(found.read_text(encoding="utf-8")) if found.exists() else {}
    return {**record, "script": script, "exit": code, "printed": printed.getvalue(), "said": said.getvalue()}


def sees_all(script: str) -> bool:
    return Path(script).stem.startswith(PUTS_INTO_IMPORTED_MODULES)


def groups_of(scripts: list[str]) -> list[list[str]]:
    """Return the scripts in groups, one for each process."""
    others = [script for script in scripts if not sees_all(script)]
    together = [others[first : first + IN_ONE_PROCESS] for first in range(0, len(others), IN_ONE_PROCESS)]
    return [*together, *([script] for script in scripts if sees_all(script))]


def run_all(scripts: list[str], report: Path) -> None:
    with report.open("w", encoding="utf-8") as file:
        for script in scripts:
            if sees_all(script):
                gc.unfreeze()
            print(json.dumps(run(script)), file=file, flush=True)
            gc.enable()
            gc.collect()
            gc.freeze()


gc.collect()
gc.freeze()  # no script holds a tensor in what is imported, but for those named above
with tempfile.TemporaryDirectory() as folder:
    for number, scripts in enumerate(groups_of(sys.argv[1:])):
        report = Path(folder, f"{number}.json")
        child = os.fork()
        if child == 0:
            try:
                run_all(scripts, report)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        sys.stdout.write(report.read_text(encoding="utf-8"))
        sys.stdout.flush()
