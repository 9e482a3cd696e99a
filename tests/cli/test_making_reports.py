"""`--report` of commands that run a script, and `lowtide report` on what they write."""

import json
import re
import shlex
from pathlib import Path

import pytest

from lowtide import cli
from lowtide.cli import COMMANDS
from lowtide.report.run_record import RunRecord

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
KEEPING
for _ in range(18):
    out = model(torch.rand(512, 64))
    loss = out.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    kept(out)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("KEEPING", "kept = lambda out: None"), encoding="utf-8")
    return path


def test_a_run_within_a_budget_is_a_record_and_a_page(
    script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record, page, written = tmp_path / "run.json", tmp_path / "run.html", tmp_path / "at once.html"
    options = ["--budget", "80%", "--json", str(record), "--report", str(written)]
    assert cli.main(["run", *options, str(script)]) == 0
    found = RunRecord.from_json(record)
    assert found.command == shlex.join(["lowtide", "run", *options, str(script)])
    assert found.plan is not None
    assert found.proof is not None
    assert found.proof.measured_peak_bytes is not None
    assert found.proof.measured_peak_bytes <= found.plan.budget_bytes
    assert found.before is not None
    assert found.after is not None
    assert found.before.peak_bytes == found.plan.plain.peak_bytes
    assert found.after.peak_bytes == found.plan.predicted.peak_bytes
    assert found.proof.planned_ms is not None
    assert found.frontier is not None
    assert cli.main(["report", str(record), "-o", str(page)]) == 0
    for each in (page, written):
        assert f'data-bytes="{found.proof.measured_peak_bytes}"' in each.read_text(encoding="utf-8")


def test_a_budget_that_no_plan_keeps_is_reported_too(
    script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "run.html"
    assert cli.main(["run", "--budget", "100KiB", "--report", str(page), str(script)]) == 1
    text = page.read_text(encoding="utf-8")
    assert "It does not fit: no plan fits 100 KiB." in text
    assert f'data-tile="budget" data-bytes="{100 * 2**10}"' in text
    assert 'data-tile="smallest-peak"' in text


def test_findings_of_a_watch_are_exported(script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script.write_text(SCRIPT.replace("KEEPING", "all_ = []\nkept = all_.append"), encoding="utf-8")
    record = tmp_path / "watch.json"
    assert cli.main(["watch", "--report", str(record), str(script)]) == 1
    found = RunRecord.from_json(record)
    assert found.findings
    assert cli.main(["report", str(record), "-o", str(tmp_path / "found.sarif")]) == 0
    log = json.loads((tmp_path / "found.sarif").read_text(encoding="utf-8"))
    assert [result["ruleId"] for result in log["runs"][0]["results"]] == [each.code for each in found.findings]
    capfd.readouterr()
    assert cli.main(["report", str(record), "--github"]) == 0
    assert capfd.readouterr().out.count("::warning file=") == len(found.findings)


WRITING = {
    "rehearse": ("rehearse", "--json", "FILE", "SCRIPT"),
    "frontier": ("frontier", "--budgets", "3", "--json", "FILE", "SCRIPT"),
    "plan": ("plan", "make", "--budget", "90%", "-o", "FILE", "SCRIPT"),
    "estimate": ("estimate", "--budget", "1GiB", "--json", "FILE", "SCRIPT"),
    "estimate for a GPU": ("estimate", "--device", "T4", "--batch", "8", "--json", "FILE", "SCRIPT"),
    "watch": ("watch", "--json", "FILE", "SCRIPT"),
}
ANSWERS = {
    "rehearse": "A step needs",
    "frontier": r"A step needs .* Plans take it down to",
    "plan": "It fits: the step is predicted to peak at",
    "estimate": "It fits: the step is predicted to peak at .*, within the budget of 1 GiB",
    "estimate for a GPU": "Batch 8 fits on T4",
    "watch": "Nothing outlives its step",
}


@pytest.mark.parametrize("kind", WRITING)
def test_what_a_command_writes_as_json_is_shown_and_made_a_page(
    kind: str, script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    written, page = tmp_path / "written.json", tmp_path / "page.html"
    arguments = [{"FILE": str(written), "SCRIPT": str(script)}.get(each, each) for each in WRITING[kind]]
    assert cli.main(arguments) == 0
    capfd.readouterr()
    assert cli.main(["report", str(written)]) == 0
    assert re.search(ANSWERS[kind], capfd.readouterr().out)
    assert cli.main(["report", str(written), "-o", str(page)]) == 0
    assert re.search(ANSWERS[kind], page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("command", ["run", "rehearse", "estimate", "watch"])
def test_a_report_of_an_unknown_kind_is_refused_before_the_work(
    command: str, script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = {"run": ["--budget", "80%"], "estimate": ["--device", "a100-40"]}.get(command, [])
    assert cli.main([command, *needed, "--report", str(tmp_path / "run.pdf"), str(script)]) == 2
    assert "ends neither in .html nor in .json" in capsys.readouterr().err


@pytest.mark.parametrize("command", [name for name in COMMANDS if len(name) > 3])
def test_a_command_with_a_slip_is_suggested(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([f"{command}x"]) == 2
    assert command in capsys.readouterr().err


def test_runn_suggests_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runn"]) == 2
    assert "Did you mean 'run'?" in capsys.readouterr().err
