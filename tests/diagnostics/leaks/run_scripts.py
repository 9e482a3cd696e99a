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
"""Scripts that put tensors into modules that are imported here: results of interactive lines, the last exception."""


def run(script: str) -> dict[str, object]:
    printed, said = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(printed), redirect_stderr(said):
        found = Path(folder, "found.json")
        code = main(["watch", "--json", str(found), script])
        record = json.loads(found.read_text(encoding="utf-8")) if found.exists() else {}
    return {**record, "script": script, "exit": code, "printed": printed.getvalue(), "said": said.getvalue()}


def run_all(scripts: list[str], report: Path) -> None:
    with report.open("w", encoding="utf-8") as file:
        for script in scripts:
            if Path(script).stem.startswith(PUTS_INTO_IMPORTED_MODULES):
                gc.unfreeze()
            print(json.dumps(run(script)), file=file, flush=True)
            gc.enable()
            gc.collect()
            gc.freeze()


gc.collect()
gc.freeze()  # no script holds a tensor in what is imported, but for those named above
with tempfile.TemporaryDirectory() as folder:
    for first in range(1, len(sys.argv), IN_ONE_PROCESS):
        report = Path(folder, f"{first}.json")
        child = os.fork()
        if child == 0:
            try:
                run_all(sys.argv[first : first + IN_ONE_PROCESS], report)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        sys.stdout.write(report.read_text(encoding="utf-8"))
        sys.stdout.flush()
