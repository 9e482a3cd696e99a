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


SAID = {"en": "by hand is faster here", "ja": "手動のほうが速"}
"""Words with which a section says that a plan is slower than checkpoints by hand."""


@pytest.mark.parametrize("language", articles.PAGES)
def test_a_section_says_where_checkpointing_by_hand_is_faster(language: str) -> None:
    page = articles.PAGES[language].read_text(encoding="utf-8")
    slower = set()
    for name, (_, *runs) in articles.read().runs.items():
        by_hand = [each.step_ms for each in runs if not each.within and each.same is not None and each.step_ms]
        within = [each.step_ms for each in runs if each.within in ("hand", "smallest") and each.step_ms]
        if by_hand and within and min(by_hand) < min(within):
            slower.add("sqrt_depth" if name.startswith("sqrt_depth") else name)
    sections = {name: page.split(f"<!-- {name} -->")[0].rpartition("\n## ")[2] for name in slower}
    assert slower
    assert {name for name, section in sections.items() if SAID[language] in " ".join(section.split())} == slower


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
