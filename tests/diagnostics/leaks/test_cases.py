"""The most reported mistakes: each has exactly its finding, and none once it is mended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diagnostics.leaks import cases, cases_of_holders, cases_of_loops
from diagnostics.leaks.cases import Case  # type: ignore[import-not-found]

CASES = [*cases.CASES, *cases_of_holders.CASES, *cases_of_loops.CASES]

pytestmark = pytest.mark.xdist_group("cases")  # in one worker, for `reports`


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Findings of `lowtide watch`, by script. One run serves all tests, so that torch is loaded once."""
    folder = tmp_path_factory.mktemp("cases")
    for case in CASES:
        (folder / f"{case.name}_broken.py").write_text(case.text(case.broken))
        (folder / f"{case.name}_mended.py").write_text(case.text(case.mended))
    scripts = sorted(map(str, folder.glob("*.py")))
    command = [sys.executable, str(Path(__file__).with_name("run_scripts.py")), *scripts]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return {Path(record["script"]).stem: record for record in records}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_mistake_has_exactly_its_finding(case: Case, reports: dict[str, Any]) -> None:
    report = reports[f"{case.name}_broken"]
    if not case.code:
        assert report["findings"] == []
        return
    (finding,) = report["findings"]
    assert finding["code"] == case.code
    assert case.holder in finding["holder"]
    assert case.fix in finding["fix"]
    if case.made:
        assert finding["made_at"].endswith(f"{case.name}_broken.py:{case.made_at}")
    if case.held_bytes is not None:
        assert finding["held_bytes"] == pytest.approx(case.held_bytes, rel=0.01)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_mended_mistake_has_none(case: Case, reports: dict[str, Any]) -> None:
    report = reports[f"{case.name}_mended"]
    assert report["findings"] == []
    assert (report["exit"], "nothing found in" in report["said"]) == (0, True), report["said"]
