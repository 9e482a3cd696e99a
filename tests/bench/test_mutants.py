"""The table of `bench/mutants.py` names files and lines that exist: what was moved or edited is drawn as ever."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TABLE: dict[str, Any] = tomllib.loads((ROOT / "bench" / "mutants.toml").read_text(encoding="utf-8"))
PACKAGE = ROOT / TABLE["package"]


@pytest.mark.parametrize("rule", TABLE["nearest"], ids=lambda rule: rule["sources"][0])
def test_sources_and_their_nearest_tests_exist(rule: dict[str, list[str]]) -> None:
    assert [pattern for pattern in rule["sources"] if not any(PACKAGE.glob(pattern))] == []
    assert [test for test in rule["tests"] if not (ROOT / test).is_file()] == []


@pytest.mark.parametrize("known", TABLE["equivalent"], ids=lambda known: known["source"])
def test_equivalent_mutants_are_of_lines_that_the_source_has(known: dict[str, str]) -> None:
    lines = (PACKAGE / known["source"]).read_text(encoding="utf-8").splitlines()
    assert known["before"] in {line.strip() for line in lines}
