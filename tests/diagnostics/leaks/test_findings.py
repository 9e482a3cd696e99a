"""Every code on a script with its fault and on one without, and ordinary loops, as real processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from findings_page import page
from lowtide.diagnostics.leaks.rules import RULES

pytestmark = pytest.mark.xdist_group("watched scripts")  # in one worker, for `reports`

HERE = Path(__file__).parent
BAD, GOOD, CLEAN = (sorted(HERE.glob(p)) for p in ("scripts/*_bad.py", "scripts/*_good.py", "clean/*.py"))
REPORTED_BAD, REPORTED_GOOD = (sorted(HERE.glob(f"reported/*_{kind}.py")) for kind in ("bad", "good"))


def line_marked(script: Path, mark: str) -> int | None:
    lines = enumerate(script.read_text(encoding="utf-8").splitlines(), 1)
    return next((number for number, line in lines if line.endswith(f"# {mark}")), None)


def test_every_code_has_its_two_scripts() -> None:
    assert [path.stem.removesuffix("_bad") for path in BAD] == sorted(RULES)
    assert [path.stem.removesuffix("_good") for path in GOOD] == sorted(RULES)


@pytest.mark.parametrize("script", [*BAD, *REPORTED_BAD], ids=lambda path: path.stem)
def test_a_bad_script_has_exactly_its_finding(script: Path, reports: dict[str, Any]) -> None:
    report = reports[script.stem]
    expected = dict(re.findall(r"^(code|holder|bytes|fix) (.*)$", report["printed"], re.MULTILINE))
    assert report["exit"] == 1, report["said"]
    (finding,) = report["findings"]
    assert finding["code"] == expected.get("code", script.stem.removesuffix("_bad"))
    assert expected["holder"] in finding["holder"]
    assert expected.get("fix", "") in finding["fix"]
    if "bytes" in expected:
        assert finding["held_bytes"] == pytest.approx(int(expected["bytes"]), rel=0.01)
    if (made := line_marked(script, "made")) is not None:
        assert finding["made_at"].endswith(f"{script.name}:{made}")
    if (holder := line_marked(script, "holder")) is not None:
        assert f"{script.name}:{holder}" in finding["holder"]
    assert finding["code"] in report["said"]


@pytest.mark.parametrize("script", [*GOOD, *REPORTED_GOOD], ids=lambda path: path.stem)
def test_a_good_script_has_none(script: Path, reports: dict[str, Any]) -> None:
    check_clean(reports[script.stem])


@pytest.mark.slow
@pytest.mark.parametrize("script", CLEAN, ids=lambda path: path.stem)
def test_an_ordinary_loop_has_none(script: Path, reports: dict[str, Any]) -> None:
    check_clean(reports[script.stem])


def check_clean(report: dict[str, Any]) -> None:
    assert report["findings"] == []
    assert (report["exit"], "nothing found in" in report["said"]) == (0, True)
    assert report["steps"] >= 4


def test_the_page_of_findings_is_up_to_date() -> None:
    assert (HERE.parents[2] / "docs" / "findings.md").read_text(encoding="utf-8") == page()
