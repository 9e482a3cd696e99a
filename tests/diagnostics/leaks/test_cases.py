"""The most reported mistakes: each has exactly its finding, and none once it is mended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from diagnostics.leaks import cases, cases_of_growth, cases_of_holders, cases_of_loops, cases_of_reports
from diagnostics.leaks.cases import Case  # type: ignore[import-not-found]

pytestmark = pytest.mark.xdist_group("watched scripts")  # in one worker, for `reports`


@dataclass(frozen=True)
class Script:
    """The script of a case, with the mistake or mended."""

    case: Case
    is_mended: bool

    @property
    def name(self) -> str:
        return f"{self.case.name}_{'mended' if self.is_mended else 'broken'}"

    @property
    def text(self) -> str:
        return str(self.case.text(self.case.mended if self.is_mended else self.case.broken))


CASES = [*cases.CASES, *cases_of_holders.CASES, *cases_of_growth.CASES, *cases_of_loops.CASES, *cases_of_reports.CASES]
BROKEN, MENDED = ([Script(case, is_mended) for case in CASES] for is_mended in (False, True))
MOST_MENDED = 8
"""Most cases of one code that are run mended by default; the others are slow."""


def mended_params() -> Iterator[Any]:
    """Yield all mended cases: those of a code beyond the first ones are slow."""
    counts: Counter[str] = Counter()
    for script in MENDED:
        counts[script.case.code] += 1
        yield pytest.param(script, marks=pytest.mark.slow if counts[script.case.code] > MOST_MENDED else [])


@pytest.mark.parametrize("script", BROKEN, ids=lambda script: script.case.name)
def test_a_mistake_has_exactly_its_finding(script: Script, reports: dict[str, Any]) -> None:
    report, case = reports[script.name], script.case
    if not case.code:
        assert report["findings"] == []
        return
    (finding,) = report["findings"]
    assert finding["code"] == case.code
    assert case.holder in finding["holder"]
    assert case.fix in finding["fix"]
    if case.made:
        assert finding["made_at"].endswith(f"{script.name}.py:{case.made_at}")
    if case.held_bytes is not None:
        assert finding["held_bytes"] == pytest.approx(case.held_bytes, rel=0.01)


@pytest.mark.parametrize("script", mended_params(), ids=lambda script: script.case.name)
def test_a_mended_mistake_has_none(script: Script, reports: dict[str, Any]) -> None:
    report = reports[script.name]
    assert report["findings"] == []
    assert (report["exit"], "nothing found in" in report["said"]) == (0, True), report["said"]
