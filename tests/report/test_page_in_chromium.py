"""The page in a real browser: what it shows under the pointer, in both themes, on a phone, to a screen reader."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from browsers import needs_axe, needs_browser, requested_urls, running_browser, show, violations
from lowtide.memory.events import PHASE, Allocate, EventStream, Free, Mark
from lowtide.memory.memory_timeline import Timeline
from lowtide.report.page import render_run_page
from lowtide.report.run_comparison import RunComparison
from lowtide.report.run_record import RunRecord
from lowtide.report.step_memory import StepMemory, read_recorded_memory
from lowtide.units import format_bytes
from report.runs import FINDINGS, run

pytestmark = [needs_browser, pytest.mark.xdist_group("chromium")]

RUN = replace(run(), findings=FINDINGS, n_steps=3)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running_browser() as driver:
        yield driver


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Any:
    """Open the page, 1100 pixels wide and light."""
    path = tmp_path / "report.html"
    path.write_text(render_run_page(RUN), encoding="utf-8")
    show(browser, width=1100)
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(path.as_uri())
    return browser


def shown(page: Any) -> tuple[int, dict[str, int], list[str], str]:
    """Return what the reading says: all bytes, bytes by category, names of tensors, and its sentence."""
    total, parts, names, said = page.execute_script(
        """
        const read = (row) => Number(row.querySelector(".lt-bytes").dataset.bytes);
        const rows = [...document.querySelectorAll(".lt-legend tbody tr[data-category]")];
        return [
          read(document.querySelector(".lt-total")),
          Object.fromEntries(rows.map((row) => [row.dataset.category, read(row)])),
          [...document.querySelectorAll(".lt-tensors code")].map((name) => name.textContent),
          document.querySelector(".lt-reading").textContent,
        ];
        """
    )
    return total, {name: n for name, n in parts.items() if n}, names, said


def point_at(page: Any, memory: StepMemory, moment: int) -> None:
    """Move the pointer over the middle of a moment."""
    stop = memory.at[moment + 1] if moment + 1 < len(memory.at) else memory.n_events
    share = (memory.at[moment] + stop) / 2 / memory.n_events
    box = page.execute_script(
        "const p = document.querySelector('.lt-plot'); p.scrollIntoView({block: 'center'});"
        "const b = p.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]"
    )
    place = {"x": box[0] + share * box[2], "y": box[1] + box[3] / 2}
    page.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", **place})


def expected(memory: StepMemory, moment: int) -> tuple[int, dict[str, int], list[str]]:
    return memory.totals[moment], memory.parts_at(moment), [tensor.name for tensor in memory.tensors_at(moment)]


def steps() -> tuple[StepMemory, StepMemory]:
    assert RUN.before is not None
    assert RUN.after is not None
    return RUN.before, RUN.after


def test_the_reading_under_the_pointer_is_the_records(page: Any) -> None:
    _, after = steps()
    for moment in (3, after.peak_moment, len(after.at) - 2):
        point_at(page, after, moment)
        total, parts, names, said = shown(page)
        assert (total, parts, names) == expected(after, moment)
        assert said.endswith(format_bytes(total))
    point_at(page, after, after.peak_moment)
    assert shown(page)[3].startswith("At the peak")


def test_before_and_after_switch(page: Any) -> None:
    before, after = steps()
    assert shown(page)[0] == after.peak_bytes
    page.execute_script("document.querySelector('input[value=before]').click()")
    assert shown(page)[:3] == expected(before, before.peak_moment)
    visible = page.execute_script(
        "return [...document.querySelectorAll('.lt-peak-sentence')].filter((p) => !p.hidden).map((p) => p.textContent)"
    )
    assert len(visible) == 1
    assert format_bytes(before.peak_bytes) in visible[0]
    point_at(page, before, 5)
    assert shown(page)[:3] == expected(before, 5)


def test_the_keyboard_reads_every_moment(page: Any) -> None:
    _, after = steps()
    page.execute_script("document.querySelector('.lt-moment').focus()")
    for key in ("Home", "ArrowRight", "ArrowRight"):
        code = {"Home": 36, "ArrowRight": 39}[key]
        for kind in ("rawKeyDown", "keyUp"):
            page.execute_cdp_cmd(
                "Input.dispatchKeyEvent", {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
            )
    assert shown(page)[:3] == expected(after, 2)
    text = page.execute_script("return document.querySelector('.lt-moment').getAttribute('aria-valuetext')")
    assert text == shown(page)[3]


def test_dark_mode_follows_the_system_and_the_button(page: Any) -> None:
    def paper() -> str:
        found = page.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert isinstance(found, str)
        return found

    light = paper()
    show(page, width=1100, dark=True)
    dark = paper()
    assert dark != light
    page.execute_script("document.getElementById('lt-theme').click()")
    assert paper() == light
    page.execute_script("document.getElementById('lt-theme').click()")
    assert paper() == dark


def open_kind(page: Any, kind: str, folder: Path) -> None:
    """Open the page of a run that was only watched, or that of two runs with long names; that of RUN is open."""
    if kind == "run":
        return
    path = folder / f"{kind}.html"
    if kind == "watched":
        watched = RunRecord(command="lowtide watch", versions={"lowtide": "1"}, findings=FINDINGS, n_steps=3)
        path.write_text(render_run_page(watched), encoding="utf-8")
    else:
        names = (f"first/{'long' * 20}.json", f"second/{'long' * 20}.json")
        RunComparison(RUN, run("90%"), names).to_html(path)
    page.get(path.as_uri())


@pytest.mark.parametrize(("width", "kind"), [(360, "run"), (1100, "run"), (360, "compared")])
def test_nothing_scrolls_sideways(page: Any, tmp_path: Path, width: int, kind: str) -> None:
    open_kind(page, kind, tmp_path)
    show(page, width=width)
    for details in (False, True):
        if details:
            page.execute_script("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert page.execute_script("return document.documentElement.scrollWidth") <= width


def test_the_changes_of_a_comparison_are_in_view_on_a_phone(page: Any, tmp_path: Path) -> None:
    open_kind(page, "compared", tmp_path)
    show(page, width=360)
    changes = "[...document.querySelectorAll('.lt-table td:last-child span')]"
    texts, rights = page.execute_script(
        f"const c = {changes}; return [c.map((e) => e.textContent), c.map((e) => e.getBoundingClientRect().right)]"
    )
    assert "-" in "".join(texts)
    assert max(rights) <= 360


def test_no_name_of_a_phase_is_cut_off(page: Any, tmp_path: Path) -> None:
    names = ("forward", "backward", "optimizer")
    events = [event for name in names for event in (Mark(PHASE, name), *[Allocate(0, 9, 0, ""), Free(0, 9)] * 20)]
    short = read_recorded_memory(Timeline(EventStream((*events[: 41 + 41 + 13],))), "measured")
    path = tmp_path / "phases.html"
    path.write_text(render_run_page(RunRecord(command="", versions={}, before=short)), encoding="utf-8")
    page.get(path.as_uri())
    for width, shown_names in ((1100, names), (360, names[:2])):
        show(page, width=width)
        labels = page.execute_script(
            "const names = [...document.querySelectorAll('.lt-phase-name')].filter((e) => e.checkVisibility());"
            "return names.map((e) => [e.textContent, e.scrollWidth <= e.clientWidth])"
        )
        assert labels == [[name, True] for name in shown_names]


@pytest.mark.parametrize("width", [360, 1100])
def test_the_label_of_the_plan_covers_no_other_plan(page: Any, tmp_path: Path, width: int) -> None:
    show(page, width=width)
    for share in ("45%", "55%", "65%", "80%", "95%"):
        path = tmp_path / "budget.html"
        path.write_text(render_run_page(run(share)), encoding="utf-8")
        page.get(path.as_uri())
        label, dots, plot = page.execute_script(
            "const box = (e) => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };"
            "const one = (name) => document.querySelector(name);"
            "return [box(one('[class^=lt-chosen] b')), [...document.querySelectorAll('.lt-point')].map(box),"
            "  box(one('.lt-short'))]"
        )
        covered = [d for d in dots if label[0] < d[2] and d[0] < label[2] and label[1] < d[3] and d[1] < label[3]]
        assert not covered, share
        assert plot[0] <= label[0], share
        assert label[2] <= max(plot[2], width), share


def test_no_error_and_no_request(page: Any) -> None:
    assert page.get_log("browser") == []
    urls = requested_urls(page)
    assert urls
    assert all(url.startswith(("file:", "data:")) for url in urls)


@needs_axe
@pytest.mark.parametrize("kind", ["run", "watched", "compared"])
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing(page: Any, tmp_path: Path, kind: str, dark: bool) -> None:
    open_kind(page, kind, tmp_path)
    show(page, width=1100, dark=dark)
    assert violations(page) == []
