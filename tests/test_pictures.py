"""The frontier as a picture: names are where their points are and over nothing else, and colours say who is who."""

import math
import xml.etree.ElementTree as ET
from itertools import combinations
from random import Random

import pytest

from lowtide.planner.frontier import Frontier, Point, frontier
from lowtide.report.axes import Axis, byte_step, round_step
from lowtide.report.labels import Box, placed
from lowtide.report.picture import picture
from planner.profiles import chain

SVG = "{http://www.w3.org/2000/svg}"
PAPER = Box(0, 0, 800, 500)


def names(n: int, seed: int) -> list[tuple[str, float, float]]:
    """So many points with long names, in the middle of the paper."""
    random = Random(seed)
    return [(f"checkpoint every {i}th block", random.uniform(200, 600), random.uniform(150, 350)) for i in range(n)]


@pytest.mark.parametrize("seed", range(5))
def test_a_dozen_names_cover_neither_each_other_nor_what_is_there(seed: int) -> None:
    points = names(12, seed)
    marks = [Box(x - 5, y - 5, x + 5, y + 5) for _, x, y in points]
    places = placed(points, size=11.5, within=PAPER, taken=marks)
    boxes = [place.box for place in places]
    assert not any(one.overlap(other) for one, other in combinations(boxes, 2))
    assert not any(box.overlap(mark) for box in boxes for mark in marks)
    assert all(box.overlap(PAPER) == pytest.approx(box.area) for box in boxes)


def test_a_name_alone_stands_to_the_right_and_needs_no_line() -> None:
    (place,) = placed([("every block", 300, 200)], size=10, within=PAPER, taken=[])
    assert place.leader is None
    assert place.anchor == "start"
    assert place.box.left > 300


def test_a_name_at_the_right_end_stands_to_the_left() -> None:
    (place,) = placed([("every block", 790, 200)], size=10, within=PAPER, taken=[])
    assert place.anchor == "end"
    assert place.box.right < 790


def test_a_name_that_is_far_away_has_a_line_to_its_point() -> None:
    wall = Box(250, 150, 350, 250)
    (place,) = placed([("every block", 300, 200)], size=10, within=PAPER, taken=[wall])
    assert not place.box.overlap(wall)
    assert place.leader is not None
    x, y, _, _ = place.leader
    assert math.dist((x, y), (300, 200)) < 10
    assert Box(place.box.left - 1, place.box.top - 1, place.box.right + 1, place.box.bottom + 1).is_cut(place.leader)


@pytest.mark.parametrize(
    ("line", "is_cut"),
    [
        ((0, 0, 30, 30), True),
        ((0, 15, 30, 15), True),
        ((12, 12, 13, 13), True),
        ((0, 0, 9, 9), False),
        ((0, 25, 30, 25), False),
        ((0, 12, 12, 30), False),
    ],
)
def test_a_line_through_a_box(line: tuple[float, float, float, float], is_cut: bool) -> None:
    assert Box(10, 10, 20, 20).is_cut(line) is is_cut


@pytest.mark.parametrize(("low", "high", "parts"), [(0, 47, 5), (-8, 88, 5), (0, 0, 5), (3, 3.2, 8)])
def test_an_axis_covers_its_range_in_few_round_steps(low: float, high: float, parts: int) -> None:
    axis = Axis.over(low, high, round_step, parts=parts)
    ticks = list(axis.ticks())
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert len(ticks) <= parts + 3
    assert round(axis.step / 10 ** math.floor(math.log10(axis.step) + 1e-9), 6) in (1, 2, 5)


def test_bytes_step_in_binary_units() -> None:
    assert byte_step(90 * 2**20) == 100 * 2**20
    assert byte_step(1.5 * 2**30) == 2 * 2**30
    assert byte_step(3) == 5


FOUND = frontier(chain(6), n_budgets=5)


def point(name: str, share: float, extra_ms: float | None = 1.0) -> Point:
    peak = round(FOUND.plain_bytes * share)
    return Point(name=name, peak_bytes=peak, extra_ms=extra_ms, extra_flops=25, share=share)


def drawn(found: Frontier, *others: Point, about: str = "") -> ET.Element:
    return ET.fromstring(picture(found, others, about=about))


def texts(root: ET.Element) -> dict[str, str]:
    return {text.text or "": text.attrib.get("class", "") for text in root.iter(f"{SVG}text")}


def test_names_that_begin_alike_have_the_same_colour() -> None:
    others = [point("AOT, 0.5", 0.5), point("AOT, 0.1", 0.6), point("remat", 0.7)]
    found = texts(drawn(FOUND, *others))
    assert found["AOT, 0.5"] == found["AOT, 0.1"] != found["remat"]
    assert {"Lowtide", "the plain step"} <= found.keys()


def test_with_nobody_else_there_no_names_are_needed() -> None:
    assert not {"Lowtide", "the plain step"} & texts(drawn(FOUND)).keys()


def test_points_without_a_name_are_plans_beside_the_line() -> None:
    root = drawn(FOUND, point("", 0.9), point("remat", 0.7))
    kinds = [circle.attrib["class"] for circle in root.iter(f"{SVG}circle")]
    assert kinds.count("more") == 1
    assert kinds.count("ours") == len(FOUND.points)


@pytest.mark.parametrize(("step_flops", "heading"), [(0, "GFLOP a step"), (1000, "FLOPs, % of the plain step")])
def test_flops_go_up_where_a_time_is_missing(step_flops: int, heading: str) -> None:
    found = Frontier(
        fingerprint=FOUND.fingerprint, plain_bytes=FOUND.plain_bytes, step_ms=9.0, points=FOUND.points,
        step_flops=step_flops,
    )  # fmt: skip
    assert f"extra {heading}" in texts(drawn(found, point("remat", 0.7, None)))


def test_what_takes_less_than_the_plain_step_is_in_the_picture() -> None:
    """Measured times have noise."""
    root = drawn(FOUND, point("fast", 0.9, -0.5), about="measured")
    (mark,) = [p for p in root.iter(f"{SVG}path") if p.attrib["class"] == "k0"]
    y = float(mark.attrib["d"].split()[1].partition("l")[0])
    assert 0 < y < float(root.attrib["viewBox"].split()[3])
    assert "measured" in texts(root)
