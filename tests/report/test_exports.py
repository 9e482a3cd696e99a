"""Exports of a run: CSV, Perfetto's trace, SARIF and GitHub annotations."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from lowtide.errors import LowtideError
from lowtide.report.exports import format_csv, format_github_annotations, format_perfetto_trace, sarif
from report.runs import FINDINGS, run

RUN = run()
WATCHED = replace(RUN, findings=FINDINGS)


def test_csv_has_every_moment_and_its_parts() -> None:
    assert RUN.before is not None
    assert RUN.after is not None
    rows = [*csv.DictReader(format_csv(RUN).splitlines())]
    assert len(rows) == len(RUN.before.at) + len(RUN.after.at)
    for name, memory in (("before", RUN.before), ("after", RUN.after)):
        peak = max((row for row in rows if row["step"] == name), key=lambda row: int(row["total"]))
        assert int(peak["total"]) == memory.peak_bytes
        parts = memory.parts_at(memory.peak_moment)
        assert {category: int(peak[category]) for category in parts} == parts


def test_a_trace_has_memory_as_counters_and_the_peak_as_a_mark() -> None:
    assert RUN.after is not None
    events = json.loads(format_perfetto_trace(RUN))["traceEvents"]
    counters = [e for e in events if e["ph"] == "C" and e["pid"] == 2]
    assert max(sum(e["args"].values()) for e in counters) == RUN.after.peak_bytes
    assert {e["name"] for e in events if e["ph"] == "X"} == {span.name for span in RUN.after.phases}
    marks = [e["name"] for e in events if e["ph"] == "i"]
    assert any(name.startswith("peak ") for name in marks)
    assert any(name.startswith("budget ") for name in marks)


def test_findings_are_results_of_sarif() -> None:
    log = json.loads(sarif(WATCHED))
    assert log["version"] == "2.1.0"
    (result,) = log["runs"][0]["results"]
    assert result["ruleId"] == "LT003"
    assert result["locations"][0]["physicalLocation"] == {
        "artifactLocation": {"uri": "train.py"},
        "region": {"startLine": 30},
    }
    assert log["runs"][0]["tool"]["driver"]["rules"] == [
        {"id": "LT003", "shortDescription": {"text": "graph retained"}}
    ]


def test_sarif_names_a_file_by_its_uri() -> None:
    absolute = Path("a b.py").absolute()
    for path, uri in (
        ("a b/50%#1.py", "a%20b/50%25%231.py"),
        (str(Path("a", "b.py")), "a/b.py"),
        (str(absolute), absolute.as_uri()),
    ):
        run = replace(WATCHED, findings=(replace(FINDINGS[0], made_at=f"{path}:30"),))
        (result,) = json.loads(sarif(run))["runs"][0]["results"]
        assert result["locations"][0]["physicalLocation"]["artifactLocation"] == {"uri": uri}


def test_findings_are_annotations_of_their_line() -> None:
    assert format_github_annotations(WATCHED) == (
        "::warning file=train.py,line=30,title=LT003 graph retained::118 MiB since step 2, held by variable <loss> of "
        "train(). Fix: drop it: del loss"
    )


def test_a_run_that_was_not_watched_has_no_findings_to_export() -> None:
    with pytest.raises(LowtideError, match="was not watched"):
        sarif(RUN)
