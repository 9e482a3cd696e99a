"""Runs scripts under `lowtide watch`, each in a process of its own, and prints a line of JSON for each.

The processes are forks of this one, which has loaded torch and run nothing of it: each starts in no time.
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


def run(script: str, report: Path) -> None:
    printed, said = io.StringIO(), io.StringIO()
    found = report.with_suffix(".found")
    with redirect_stdout(printed), redirect_stderr(said):
        code = main(["watch", "--json", str(found), script])
    record = json.loads(found.read_text(encoding="utf-8")) if found.exists() else {}
    report.write_text(json.dumps({**record, "exit": code, "printed": printed.getvalue(), "said": said.getvalue()}))


gc.collect()
gc.freeze()  # no script holds a tensor in what is imported, but for the one whose name is below
with tempfile.TemporaryDirectory() as folder:
    for number, script in enumerate(sys.argv[1:]):
        report = Path(folder, f"{number}.json")
        child = os.fork()
        if child == 0:
            if Path(script).stem == "LT016_bad":
                gc.unfreeze()  # the result of an interactive line is in `builtins`
            try:
                run(script, report)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        print(json.dumps({"script": script, **json.loads(report.read_text())}), flush=True)  # noqa: T201
