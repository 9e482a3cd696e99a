"""The frontier as a picture: every point and name is there once, over nothing else, and a file says what is asked."""

import json
import xml.etree.ElementTree as ET
from collections import Counter
from itertools import combinations
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from conftest import RunPython
from lowtide import cli
from lowtide.planner.budget_frontier import Frontier, Point, frontier, read_points
from lowtide.planner.records import Fingerprint
from lowtide.report.frontier_figure import draw, save
from planner.profiles import chain

SVG = "{http://www.w3.org/2000/svg}"
DOCS = Path(__file__).parents[2] / "docs"
PROFILE = chain(6)
FOUND = frontier(PROFILE, n_budgets=5)
MIB = 2**20


def point(name: str, share: float, extra_ms: float | None = 1.0) -> Point:
    peak = round(FOUND.plain_bytes * share)
    return Point(name=name, peak_bytes=peak, extra_ms=extra_ms, extra_flops=25, share=share)


def measured(*peaks: int, step_ms: float = 100.0) -> Frontier:
    """A frontier whose points cost 30 ms, 20 ms, ..., and nothing at the last."""
    costs = range(10 * (len(peaks) - 1), -1, -10)
    return Frontier(
        fingerprint=Fingerprint(torch="2.13.0", model="gpt2", batch="8 rows", device="cpu"),
        plain_bytes=peaks[-1],
        step_ms=step_ms,
        points=tuple(
            Point(peak_bytes=peak, extra_ms=cost, extra_flops=cost * 10**9, share=peak / peaks[-1])
            for peak, cost in zip(peaks, costs, strict=True)
        ),
    )


def marks(figure: Figure) -> dict[str, list[tuple[float, float]]]:
    """Positions of the points of each kind, in the units of the axes."""
    lines = {str(line.get_gid()): line for line in figure.axes[0].lines if line.get_marker() != "None"}
    return {name: [(x, y) for x, y in line.get_xydata().tolist()] for name, line in lines.items()}


def texts(path: Path) -> Counter[str]:
    return Counter(text.text or "" for text in ET.parse(path).iter(f"{SVG}text"))


def names(figure: Figure, others: tuple[Point, ...]) -> list[Bbox]:
    wanted = {"Lowtide", "the plain step", *(p.name for p in others)}
    return [text.get_window_extent() for text in figure.axes[0].texts if text.get_text() in wanted]


def test_points_are_where_they_belong() -> None:
    figure = draw(measured(200 * MIB, 300 * MIB, 500 * MIB), (point("", 0.9), point("remat x", 0.8, 7.0)))
    found = marks(figure)
    assert found["ours"] == [(200.0, 20.0), (300.0, 10.0), (500.0, 0.0)]
    assert [y for _, y in found["remat"]] == [7.0]
    assert len(found["more"]) == 1
    assert found["plain"] == [(500.0, 0.0)]
    axes = figure.axes[0]
    (line,) = (line for line in axes.lines if line.get_gid() == "line")
    assert line.get_drawstyle() == "steps-post"
    assert line.get_xydata().tolist() == [[200, 20], [300, 10], [500, 0], [500, 0]]
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    assert all(left < x < right and bottom < y < top for name in ("ours", "plain", "remat") for x, y in found[name])


@pytest.mark.parametrize(
    ("found", "extra_ms", "step_flops", "up"),
    [
        (measured(10, 20), 1.0, 0, "extra time, % of the plain step"),
        (measured(10, 20, step_ms=0.0), 1.0, 0, "extra time, ms a step"),
        (measured(10, 20), None, 1000, "extra FLOPs, % of the plain step"),
        (measured(10, 20), None, 0, "extra GFLOP a step"),
    ],
)
def test_time_goes_up_and_flops_where_a_time_is_missing(
    found: Frontier, extra_ms: float | None, step_flops: int, up: str
) -> None:
    assert draw(found, [point("remat", 0.7, extra_ms)], step_flops=step_flops).axes[0].get_ylabel() == up


@pytest.mark.parametrize(
    ("largest", "unit", "ticks"),
    [(750 * MIB, "MiB", {100, 200, 300, 700}), (40 << 30, "GiB", {5, 10, 20, 40}), (2000, "KiB", {0.5, 1})],
)
def test_memory_goes_across_in_round_steps_of_the_unit_that_suits_it(
    largest: int, unit: str, ticks: set[float]
) -> None:
    axes = draw(measured(largest // 10, largest)).axes[0]
    assert axes.get_xlabel() == f"peak memory of the step, {unit}"
    assert ticks <= {round(tick, 6) for tick in axes.get_xticks()}


def test_names_that_begin_alike_have_the_same_colour_and_mark() -> None:
    others = [point("AOT, 0.5", 0.5), point("AOT, 0.1", 0.6), point("remat", 0.7)]
    axes = draw(FOUND, others).axes[0]
    colours = {text.get_text(): text.get_color() for text in axes.texts}
    assert colours["AOT, 0.5"] == colours["AOT, 0.1"] != colours["remat"]
    looks = {line.get_gid(): (line.get_color(), line.get_marker()) for line in axes.lines}
    assert looks["AOT"][0] == colours["AOT, 0.5"]
    for i, what in enumerate(("colour", "mark")):
        assert len({looks[kind][i] for kind in ("AOT", "remat", "ours")}) == 3, what


def test_without_other_points_no_names_are_drawn(tmp_path: Path) -> None:
    save(draw(FOUND), tmp_path / "f.svg")
    assert not {"Lowtide", "the plain step"} & texts(tmp_path / "f.svg").keys()


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    "others",
    [
        *(pytest.param(read_points(DOCS / f"frontier-{model}.json"), id=model) for model in ("bert", "gpt2", "resnet")),
        pytest.param(
            (
                point("checkpoint the first half", 0.872, 269),
                *(point(f"checkpoint every block: {n}", 0.92 + n / 800, 15 + 9 * n) for n in range(5)),
                *(point(f"AOT, memory budget 0.{n}", 0.929 + n / 900, 24 + 10 * n) for n in range(5)),
            ),
            id="crowded",
        ),
    ],
)
def test_no_name_covers_a_point_or_another_name(others: tuple[Point, ...]) -> None:
    """With the points that the benchmark measured, some of which are at the same place, and more that are close."""
    figure = draw(measured(150 * MIB, 200 * MIB, 300 * MIB, 450 * MIB, step_ms=600), others)
    boxes = names(figure, others)
    assert len(boxes) == len(others) + 2
    assert not [1 for one, other in combinations(boxes, 2) if one.overlaps(other)]
    data = figure.axes[0].transData
    points = [data.transform(at) for all_at in marks(figure).values() for at in all_at]
    assert not [1 for box in boxes for at in points if box.contains(*at)]
    inside = figure.axes[0].bbox
    assert all(inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1) for box in boxes)


def test_an_svg_has_all_texts_once_and_is_the_same_twice(tmp_path: Path) -> None:
    """Whatever the user's own settings of matplotlib are."""
    others = (point("every <block> $x$", 0.5), point("AOT & 0.1", 0.6))
    for name, settings in (("one.svg", {}), ("two.svg", {"svg.fonttype": "path", "font.size": 20, "axes.grid": False})):
        with matplotlib.rc_context(settings):
            save(draw(FOUND, others, about="8 rows", note="* a note"), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    found = texts(tmp_path / "one.svg")
    for text in ("every <block> $x$", "AOT & 0.1", "Lowtide", "the plain step", "8 rows", "* a note"):
        assert found[text] == 1
    assert (tmp_path / "one.svg").stat().st_size < 60_000


def test_the_ending_says_in_which_format(tmp_path: Path) -> None:
    PROFILE.to_json(tmp_path / "profile.json")
    for ending, start in ((".svg", b"<?xml"), (".png", b"\x89PNG\r\n\x1a\n"), (".PDF", b"%PDF")):
        path = tmp_path / f"frontier{ending}"
        assert cli.main(["frontier", "--budgets", "3", "--picture", str(path), str(tmp_path / "profile.json")]) == 0
        assert path.read_bytes().startswith(start)


def test_another_ending_is_refused_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["frontier", "--picture", str(tmp_path / "f.txt"), "not there.json"]) == 2
    assert "f.txt does not end in .svg, .png or .pdf" in capsys.readouterr().err


def test_matplotlib_is_loaded_for_pictures_only_and_missed_with_advice(tmp_path: Path, run_python: RunPython) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('none here')", encoding="utf-8")
    PROFILE.to_json(tmp_path / "profile.json")
    profile = ["--budgets", "3", str(tmp_path / "profile.json")]
    calls = json.dumps([["frontier", *profile], ["frontier", "--picture", str(tmp_path / "f.svg"), *profile]])
    done = run_python("-c", f"from lowtide import cli; print([cli.main(args) for args in {calls}])", path=tmp_path)
    assert done.stdout.endswith("[0, 2]\n")
    assert done.stderr.startswith(
        "lowtide.PackageMissing: lowtide frontier --picture needs the package matplotlib.\n  Found: none here (in "
    )
    assert done.stderr.endswith('Install it: pip install "lowtide[pictures]"\n')
    assert not (tmp_path / "f.svg").exists()
