"""docs/articles.md and its Japanese version: tables as bench/articles.py makes them, and numbers that keep promises."""

import re

import articles
import pytest

from lowtide.units import format_bytes


@pytest.mark.parametrize("language", articles.PAGES)
def test_the_tables_are_made_of_the_results(language: str) -> None:
    page = articles.PAGES[language].read_text(encoding="utf-8")
    assert articles.renewed(page, articles.read(), language) == page
    for name in articles.read().runs:
        if not name.startswith("sqrt_depth"):
            assert f"<!-- {name} -->\n\n| " in page


@pytest.mark.parametrize("name", articles.read().runs)
def test_runs_under_lowtide_print_the_plain_numbers_within_the_budget(name: str) -> None:
    within = [each for each in articles.read().runs[name] if each.within]
    assert within
    for each in within:
        assert each.same
        (budget,) = re.findall(r"--budget ([\d.]+)([KMG]iB)", each.command)
        assert each.peak_bytes is not None
        assert each.peak_bytes <= float(budget[0]) * 1024 ** (1 + "KMG".index(budget[1][0])) + 1


def test_a_run_that_ended_early_has_no_numbers() -> None:
    plain = articles.Run(command="python a.py", peak_bytes=2**20, step_ms=10.0)
    failed = articles.Run(command="python a.py --checkpoint", refused="RuntimeError: no")
    within = articles.Run(command="lowtide run a.py", peak_bytes=2**19, step_ms=11.0, same=True, within="share")
    rows = articles.table([plain, failed, within], "en").splitlines()[2:]
    assert rows == [
        f"| `python a.py` | {format_bytes(2**20)} | 100 % | 10 ms |  |",
        "| `python a.py --checkpoint` |  |  |  | ends with an error |",
        f"| `lowtide run a.py` | {format_bytes(2**19)} | 50 % | +10 % | the same |",
    ]
