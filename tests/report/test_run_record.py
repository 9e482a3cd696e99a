"""The record of a run: unchanged by JSON, and refused in one line where it is damaged, old or something else."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lowtide import cli
from lowtide.errors import LowtideError
from lowtide.report.run_files import read_run
from lowtide.report.run_record import RunRecord
from report.runs import FINDINGS, PLAN, PROFILE, run

RUN = run()


def test_a_round_trip_changes_nothing(tmp_path: Path) -> None:
    RUN.to_json(tmp_path / "run.json")
    assert read_run(tmp_path / "run.json") == RUN
    assert RunRecord.from_json(RUN.to_json()) == RUN


def test_its_numbers_are_those_of_its_parts() -> None:
    assert RUN.budget_bytes == PLAN.budget_bytes
    assert RUN.peak_bytes == PLAN.predicted.peak_bytes - 5  # measured
    assert RUN.plain_peak_bytes == PLAN.plain.peak_bytes
    assert RUN.before is not None
    assert RUN.after is not None
    assert (RUN.before.peak_bytes, RUN.after.peak_bytes) == (PLAN.plain.peak_bytes, PLAN.predicted.peak_bytes)
    assert RUN.extra == PLAN.predicted.extra_ms / PLAN.step_ms


@pytest.mark.parametrize("kind", ["profile", "plan", "watch"])
def test_files_of_other_commands_are_read_too(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    if kind == "watch":
        path.write_text(json.dumps({"steps": 7, "findings": msgspec.to_builtins(FINDINGS)}), encoding="utf-8")
        assert read_run(path).findings == FINDINGS
        return
    (PROFILE if kind == "profile" else PLAN).to_json(path)
    found = read_run(path)
    assert (found.profile, found.plan) == ((PROFILE, None) if kind == "profile" else (None, PLAN))


def damaged() -> dict[str, str]:
    whole: dict[str, Any] = json.loads(RUN.to_json())
    short = json.loads(RUN.to_json())
    short["before"]["bytes"]["parameters"].pop()
    beyond = json.loads(RUN.to_json())
    beyond["after"]["tensors"][0]["stop"] = 10**6
    backwards = json.loads(RUN.to_json())
    backwards["frontier"]["points"][1]["extra_ms"] = -1
    without_recipe = json.loads(RUN.to_json())
    for value in without_recipe["profile"]["values"]:
        value["refused"] = "x"
    return {
        "cut off": RUN.to_json()[:1000],
        "empty": "",
        "no JSON": "train.py: loss 3.4",
        "another record": '{"points": []}',
        "another format": json.dumps({**whole, "format": 1}),
        "columns of different lengths": json.dumps(short),
        "a tensor beyond the step": json.dumps(beyond),
        "a time below zero": json.dumps(backwards),
        "a plan that is not of its profile": json.dumps(without_recipe),
        "a number that is too large": json.dumps({**whole, "n_steps": 10**30}),
        "a list": "[]",
    }


@pytest.mark.parametrize("what", damaged())
def test_other_files_are_refused_in_a_line(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    path.write_text(damaged()[what], encoding="utf-8")
    assert cli.main(["report", str(path), "-o", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr().err
    assert str(path) in said
    assert "Traceback" not in said
    assert len(said.splitlines()) <= 2  # the error, and the command that writes such a file
    assert not (tmp_path / "page.html").exists()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LowtideError, match=r"nowhere\.json can't be read"):
        read_run(tmp_path / "nowhere.json")
