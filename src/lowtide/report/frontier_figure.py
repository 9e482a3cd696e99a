"""Plot the frontier with matplotlib. Import this module only if a picture is drawn, because matplotlib loads slowly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import MaxNLocator
from textalloc import allocate

from lowtide.planner.budget_frontier import Frontier, Point
from lowtide.units import format_bytes
from lowtide.utils.amounts import parse_bytes

INCHES = 8.5, 5.4
DARK, GREY, PALE, BLUE = "#24292f", "#6e7781", "#e6e8eb", "#0072b2"
KINDS = (("#c25000", "D"), ("#6a1f5e", "s"), ("#00806a", "^"), ("#000000", "X"))
"""Colours and markers for points of other methods; points whose names begin with the same word share them. The colours,
and BLUE, follow Okabe and Ito (https://jfly.uni-koeln.de/color/), whose set suits all kinds of colour vision; they are
dark enough for text on a light background.
"""
ORDERS = 12
"""Number of orders in which the labels are placed; the one with the shortest leader lines is drawn."""
BESIDE = 16
"""Largest distance in pixels of a label that needs no leader line to its point."""
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": PALE,
    "axes.grid": True,
    "axes.labelcolor": DARK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "font.size": 9,
    "grid.color": PALE,
    "lines.markersize": 6,
    "savefig.dpi": 200,
    "svg.fonttype": "none",  # keep text as text: small files that can be searched
    "svg.hashsalt": "lowtide",  # otherwise names inside the file are random
    "text.color": DARK,
    "text.parse_math": False,
    "xtick.color": PALE,
    "xtick.labelcolor": DARK,
    "ytick.color": PALE,
    "ytick.labelcolor": DARK,
}


def draw(
    frontier: Frontier, others: Sequence[Point] = (), *, step_flops: int = 0, about: str = "", note: str = ""
) -> Figure:
    """Draw the frontier as a figure: the extra time of the best plan for each memory budget, as a step line.

    `others` are drawn as points with their names. Points without a name are plans that are not on the line. The y axis
    is extra time, in percent of the step without a plan if that was timed. If a point has no time, the y axis is extra
    FLOPs, in percent of `step_flops` if given. `about` replaces the frontier's own subtitle. `note` is printed in the
    lower right corner.
    """
    scale = _Scale.of(frontier, others, step_flops)
    with _style():
        figure = Figure(INCHES, facecolor="none")
        FigureCanvasAgg(figure)  # needed to measure texts
        # White paper, because the colours are made for light pages: a dark page shows only at the rounded corners.
        paper = FancyBboxPatch((0, 0), *INCHES, boxstyle="round,pad=0,rounding_size=0.1", fc="white", ec="none")
        figure.add_artist(paper).set(transform=figure.dpi_scale_trans, zorder=-1)
        figure.text(0.97, 0.025, note, ha="right", color=GREY)
        axes = figure.add_axes((0.085, 0.11, 0.885, 0.745))
        axes.set_title(
            f"What a memory budget costs: {frontier.fingerprint.model.partition(' ')[0]}", loc="left", pad=24
        )
        axes.text(0, 1.025, about or _describe_setting(frontier), transform=axes.transAxes, color=GREY)
        _set_up_axes(axes, scale)
        _draw_points(axes, scale, frontier, others)
        _draw_line(axes, scale, frontier)
        if any(p.name for p in others):
            _draw_labels(axes, scale, frontier, others)
    return figure


def save(figure: Figure, path: str | Path) -> None:
    """Write the figure in the format of the file's extension. The same figure gives the same bytes."""
    dates: dict[str, dict[str, str | None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with _style():
        figure.savefig(path, metadata=dates.get(Path(path).suffix.lower()))


@contextmanager
def _style() -> Iterator[None]:
    """Use matplotlib's defaults and STYLE in this block, not the user's settings.

    matplotlib reads some settings while drawing and others while saving.
    """
    with matplotlib.style.context(["default", STYLE]):
        yield


def _describe_setting(frontier: Frontier) -> str:
    made_for = frontier.fingerprint
    return f"batch {made_for.batch}, on {made_for.device}, torch {made_for.torch}; predicted from one rehearsal"


@dataclass(frozen=True, slots=True)
class _Scale:
    """Units of both axes, and functions that map a point of the frontier to coordinates."""

    unit: str
    """Unit of the x axis: `MiB`."""
    heading: str
    """Heading of the y axis."""
    per_ms: float | None
    """Scale of extra time on the y axis; None if the axis shows FLOPs."""
    per_flop: float = 0.0

    @classmethod
    def of(cls, frontier: Frontier, others: Sequence[Point], step_flops: int) -> _Scale:
        points = (*frontier.points, *others)
        unit = format_bytes(max(p.peak_bytes for p in points)).split()[1]
        if all(p.extra_ms is not None for p in points):
            if frontier.step_ms:
                return cls(unit, "extra time, % of the plain step", 100 / frontier.step_ms)
            return cls(unit, "extra time, ms a step", 1.0)
        if step_flops:
            return cls(unit, "extra FLOPs, % of the plain step", None, 100 / step_flops)
        return cls(unit, "extra GFLOP a step", None, 1e-9)

    def x(self, n_bytes: int) -> float:
        return n_bytes / parse_bytes(f"1{self.unit}")

    def y(self, point: Point) -> float:
        if self.per_ms is None or point.extra_ms is None:
            return point.extra_flops * self.per_flop
        return point.extra_ms * self.per_ms

    def xy(self, points: Sequence[Point]) -> tuple[list[float], list[float]]:
        return [self.x(p.peak_bytes) for p in points], [self.y(p) for p in points]


def _set_up_axes(axes: Axes, scale: _Scale) -> None:
    axes.set_xlabel(f"peak memory of the step, {scale.unit}")
    axes.set_ylabel(scale.heading)
    axes.xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.margins(0.06, 0.1)
    axes.axhline(0, color=GREY, lw=0.8, zorder=1)


def _draw_points(axes: Axes, scale: _Scale, frontier: Frontier, others: Sequence[Point]) -> None:
    more = [p for p in others if not p.name]
    axes.plot(*scale.xy(more), "o", color=BLUE, mec="white", mew=0.5, alpha=0.4, gid="more")
    axes.plot(*scale.xy(frontier.points), "o", color=BLUE, mec="white", mew=0.5, gid="ours", zorder=2.2)
    for kind, (colour, mark) in _assign_styles(others).items():
        named = [p for p in others if p.name and _read_kind(p) == kind]
        axes.plot(*scale.xy(named), mark, color=colour, mec="white", mew=0.5, gid=kind, zorder=2.3)
    axes.plot(scale.x(frontier.plain_bytes), 0, "o", ms=7, mfc="white", mec=GREY, mew=1.5, gid="plain", zorder=2.4)


def _draw_line(axes: Axes, scale: _Scale, frontier: Frontier) -> None:
    """Draw the frontier as a step line, and shade the area above the line, which plans can reach.

    The height at a budget is the cost of the plan with the largest peak within the budget.
    """
    right, top = axes.get_xlim()[1], axes.get_ylim()[1]
    xs, ys = scale.xy(frontier.points)
    axes.step([*xs, scale.x(frontier.plain_bytes)], [*ys, ys[-1]], where="post", color=BLUE, lw=1.8, gid="line")
    axes.fill_between([*xs, right], [*ys, ys[-1]], top, step="post", color=BLUE, alpha=0.07, lw=0, gid="reached")
    axes.set(xlim=(axes.get_xlim()[0], right), ylim=(axes.get_ylim()[0], top))


def _draw_labels(axes: Axes, scale: _Scale, frontier: Frontier, others: Sequence[Point]) -> None:
    """Label the points without covering points, lines or other labels.

    A leader line connects a label to a distant point. If there is no room for a label otherwise, leader lines may pass
    behind other labels.
    """
    named = [p for p in others if p.name]
    plain_x = scale.x(frontier.plain_bytes)
    line_x, line_y = scale.xy(frontier.points)
    other_x, other_y = scale.xy(others)
    named_x, named_y = scale.xy(named)
    kinds = _assign_styles(others)
    colours = [BLUE, GREY, *(kinds[_read_kind(p)][0] for p in named)]
    settings: dict[str, Any] = dict(
        x=[line_x[0], plain_x, *named_x],
        y=[line_y[0], 0.0, *named_y],
        text_list=["Lowtide", "the plain step", *(p.name for p in named)],
        x_scatter=[plain_x, *line_x, *other_x],
        y_scatter=[0.0, *line_y, *other_y],
        scatter_sizes=[3.0] * (1 + len(line_x) + len(others)),
        # The step line has two corners per point.
        x_lines=[[line_x[0], *(x for x in [*line_x[1:], plain_x] for _ in range(2))], axes.get_xlim()],
        y_lines=[[*(y for y in line_y for _ in range(2)), line_y[-1]], (0.0, 0.0)],
        textsize=8.5,
        textcolor=colours,
        fontweight=["bold", *["normal"] * (1 + len(named))],
        va="bottom",
        linecolor=colours,
        linewidth=0.6,
        # Margins are shares of the width.
        margin=0.003,
        min_distance=0.008,
        max_distance=0.25,
        nbr_candidates=1000,
    )

    def measure_leader_lines(options: dict[str, Any]) -> tuple[int, float]:
        """Place labels with `options`. Return two penalties: the number of unplaced labels, and pixels of lines."""
        _, _, texts, leaders = allocate(axes, **settings, **options, draw_all=False)
        lines = [_measure_length(axes, leader) for leader in leaders if isinstance(leader, Line2D)]
        for artist in (*texts, *leaders):
            if isinstance(artist, Artist):
                artist.remove()
        return len(leaders) - len(lines), sum(lines)

    def best(apart: bool) -> tuple[tuple[int, float], dict[str, Any]]:
        candidates = [dict(priority_strategy=order, avoid_label_lines_overlap=apart) for order in range(ORDERS)]
        return min(((measure_leader_lines(options), options) for options in candidates), key=itemgetter(0))

    (missing, _), options = best(apart=True)
    if missing:
        _, options = best(apart=False)
    _, _, _, leaders = allocate(axes, **settings, **options)
    for leader in leaders:
        if isinstance(leader, Line2D) and _measure_length(axes, leader) < BESIDE:
            leader.remove()


def _measure_length(axes: Axes, leader: Line2D) -> float:
    return math.dist(*axes.transData.transform(leader.get_xydata()))


def _assign_styles(others: Sequence[Point]) -> dict[str, tuple[str, str]]:
    """Assign a colour and a marker to the first word of each point's name."""
    kinds = dict.fromkeys(_read_kind(p) for p in others if p.name)
    return {kind: KINDS[n % len(KINDS)] for n, kind in enumerate(kinds)}


def _read_kind(point: Point) -> str:
    return point.name.split()[0].rstrip(",:")
