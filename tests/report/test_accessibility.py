"""Every kind of page, by the rules of accessibility that its HTML and CSS show without a browser."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from lowtide.report.page import asset, render_run_page
from lowtide.report.run_comparison import RunComparison
from lowtide.report.run_record import RunRecord, Trained
from report.runs import FINDINGS, NEED, run

_VOID = {"meta", "link", "input", "br", "hr", "line", "path", "rect", "circle", "polyline"}


@dataclass
class Element:
    name: str
    attributes: dict[str, str]
    parent: Element | None = None
    children: list[Element] = field(default_factory=list)
    text: str = ""

    def __iter__(self):  # type: ignore[no-untyped-def]
        yield self
        for child in self.children:
            yield from child

    @property
    def words(self) -> str:
        """Text of the element and of all inside of it."""
        return "".join(each.text for each in self).strip()

    def is_inside(self, name: str) -> bool:
        return self.parent is not None and (self.parent.name == name or self.parent.is_inside(name))

    @property
    def is_hidden(self) -> bool:
        hidden = self.attributes.get("aria-hidden") == "true"
        return hidden or (self.parent is not None and self.parent.is_hidden)


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = self.open = Element("", {})

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs}, self.open)
        self.open.children.append(element)
        if tag not in _VOID:
            self.open = element

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.children.append(Element(tag, {name: value or "" for name, value in attrs}, self.open))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.name == tag, f"</{tag}> closes <{self.open.name}>"
        assert self.open.parent is not None
        self.open = self.open.parent

    def handle_data(self, data: str) -> None:
        self.open.text += data


def pages() -> dict[str, RunRecord | RunComparison]:
    planned = run()
    of_watch = RunRecord(command="lowtide watch", versions={"lowtide": "1"}, findings=FINDINGS, n_steps=3)
    of_gpu = replace(of_watch, command="lowtide estimate", findings=None, before=planned.before, needs=(NEED,))
    loops = tuple(Trained(name=name, measured_peak_bytes=2**20, time_ratio=1.1) for name in ("plain", "checkpointed"))
    return {
        "run": replace(planned, findings=FINDINGS),
        "refused": replace(planned, plan=None, proof=None, refusal="no plan fits 6 GiB."),
        "watch": of_watch,
        "estimate": of_gpu,
        "demo": replace(planned, trained=loops),
        "compare": RunComparison(planned, replace(run("90%"), findings=FINDINGS)),
    }


@cache
def elements(kind: str) -> tuple[Element, ...]:
    shown = pages()[kind]
    reader = Reader()
    reader.feed(shown.to_html() if isinstance(shown, RunComparison) else render_run_page(shown))
    assert reader.open is reader.root, f"<{reader.open.name}> is not closed"
    return tuple(reader.root)


KINDS = ["run", "refused", "watch", "estimate", "demo", "compare"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_has_its_landmarks_and_headings_in_order(kind: str) -> None:
    page = elements(kind)
    names = [each.name for each in page]
    assert (names.count("main"), names.count("header"), names.count("nav"), names.count("h1")) == (1, 1, 1, 1)
    assert next(each for each in page if each.name == "html").attributes["lang"] == "en"
    assert next(each for each in page if each.name == "title").words
    levels = [int(name[1]) for name in names if re.fullmatch(r"h[1-6]", name)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels)), levels
    assert all(each.words for each in page if re.fullmatch(r"h[1-6]", each.name))
    outside = {"header", "nav", "main"}
    in_body = [each for each in page if each.parent is not None and each.parent.name == "body"]
    assert {each.name for each in in_body} <= outside | {"script"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_control_and_picture_has_a_name(kind: str) -> None:
    for each in elements(kind):
        if each.name == "input":
            assert "aria-label" in each.attributes or each.is_inside("label"), each
        if each.name in ("button", "a", "summary", "label", "legend", "th", "option"):
            assert each.words or each.attributes.get("aria-label") or each.name == "th", each
        if each.name == "svg":
            assert each.is_hidden or (each.attributes.get("role") == "img" and each.attributes["aria-label"]), each
        if each.name == "fieldset":
            assert each.children[0].name == "legend"
        if each.name == "table":
            assert any(inner.name == "caption" and inner.words for inner in each), each
            assert all("scope" in inner.attributes for inner in each if inner.name == "th")


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_references_are_valid(kind: str) -> None:
    page = elements(kind)
    ids = [each.attributes["id"] for each in page if "id" in each.attributes]
    assert len(ids) == len(set(ids))
    for each in page:
        if "aria-labelledby" in each.attributes:
            assert each.attributes["aria-labelledby"] in ids
        if each.attributes.get("href", "").startswith("#"):
            assert each.attributes["href"][1:] in ids
        if "aria-label" in each.attributes:  # an element without a role can't have a name
            has_role = each.name in ("nav", "input", "button", "section", "a") or "role" in each.attributes
            assert has_role, each.name
        if each.name in ("ul", "ol"):
            assert {child.name for child in each.children} <= {"li"}
        if each.name == "dl":
            groups = [each, *(child for child in each.children if child.name == "div")]
            assert {inner.name for group in groups for inner in group.children} <= {"dt", "dd", "div"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_keyboard_goes_through_a_page_in_its_order(kind: str) -> None:
    for each in elements(kind):
        if "tabindex" in each.attributes:
            assert each.attributes["tabindex"] == "0"
            assert each.attributes["role"], "what takes the focus says what it is"
            assert each.attributes["aria-label"]
        is_control = each.name in ("a", "button", "input", "summary")
        assert not (is_control and each.is_hidden), f"<{each.name}> takes the focus and is hidden from screen readers"


# --- colours

TEXTS = {
    "ink": ("paper", "raised", "good-paper", "bad-paper"),
    "soft": ("paper", "raised"),
    "accent": ("paper", "raised"),
    "good": ("paper",),
    "bad": ("paper",),
    "recomputed": ("paper",),
    "paper": ("accent",),
}
"""Colours of text, and the colours that are behind it."""


def palettes() -> dict[str, dict[str, str]]:
    """Colours of `page.css` by theme; the dark theme stands there twice, for the system and for the button."""
    css = asset("page.css")
    blocks = re.findall(r"([^{}]*)\{([^{}]*--paper:[^{}]*)\}", css)
    colors = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for _, block in blocks]
    light, dark, dark_again = colors
    assert dark == dark_again
    return {"light": light, "dark": dark}


def luminance(color: str) -> float:
    shares = [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_contrast_of_known_colours() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_can_be_read_on_its_paper(theme: str) -> None:
    colors = palettes()[theme]
    ratios = {
        (text, behind): round(contrast(colors[text], colors[behind]), 2)
        for text, papers in TEXTS.items()
        for behind in papers
    }
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}


def test_text_has_no_other_colours() -> None:
    used = set(re.findall(r"(?<![\w-])color: var\(--([\w-]+)\)", asset("page.css")))
    assert used <= set(TEXTS)
