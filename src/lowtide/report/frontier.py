"""The frontier as a table, and as a picture: one SVG file, drawn here, that any browser shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from rich import box
from rich.table import Table

from lowtide.planner.frontier import Frontier, Point
from lowtide.units import format_bytes, format_ratio, format_time


def table(frontier: Frontier, others: Sequence[Point] = ()) -> Table:
    """One row a point, from the smallest peak to the plain step; `others` by their names, where their peaks belong."""
    rows = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in ("peak", "of plain", "extra time", "extra FLOPs"):
        rows.add_column(heading, justify="right", no_wrap=True)
    rows.add_column("", no_wrap=True)
    for point in sorted([*frontier.points, *others], key=lambda p: p.peak_bytes):
        rows.add_row(
            format_bytes(point.peak_bytes),
            format_ratio(point.share),
            _time(point.extra_ms, frontier.step_ms),
            f"{point.extra_flops:.3g}",
            point.name,
        )
    return rows


def _time(extra_ms: float | None, step_ms: float) -> str:
    if extra_ms is None:
        return ""
    return format_ratio(extra_ms / step_ms, signed=True) if step_ms else f"+{format_time(extra_ms)}"


WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 56, 56
"""Margins around the plotted area."""


def picture(frontier: Frontier, others: Sequence[Point] = ()) -> str:
    """The frontier as SVG: what a budget costs, as a step line. `others` stand beside it, each with its name.

    Extra time goes up, in percent of the plain step where that was timed; extra FLOPs if one of `others` has no time.
    """
    points = [*frontier.points, *others]
    up = _upward(frontier, points)
    across = _axis(min(p.peak_bytes for p in points), max(p.peak_bytes for p in points), _byte_step)
    plot = _Plot(across, up)
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
            'font-size="12" fill="#333">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
            f'<text x="{LEFT}" y="24" font-size="15">What a memory budget costs: {escape(_name(frontier))}</text>',
            f'<text x="{LEFT}" y="42" fill="#777">{escape(_about(frontier))}</text>',
            *_grid(plot),
            *_line(plot, frontier.points),
            *(_mark(plot, p, frontier.step_ms) for p in frontier.points),
            *(part for p in others for part in _other(plot, p, frontier.step_ms)),
            "</svg>\n",
        )
    )


def _name(frontier: Frontier) -> str:
    return frontier.fingerprint.model.partition(" ")[0]


def _about(frontier: Frontier) -> str:
    made_for = frontier.fingerprint
    return f"batch {made_for.batch}, on {made_for.device}, torch {made_for.torch}; predicted from one rehearsal"


@dataclass(frozen=True, slots=True)
class _Axis:
    """From `low` to `high`, both ticks, with one each `step`."""

    low: float
    high: float
    step: float

    def ticks(self) -> Iterator[float]:
        return (self.low + i * self.step for i in range(round((self.high - self.low) / self.step) + 1))

    def at(self, value: float) -> float:
        """Where a value stands, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True)
class _Upward:
    """What goes up: its axis, the heading, and how a point and a tick are read."""

    axis: _Axis
    heading: str
    per_ms: float | None
    """Of the axis' unit; None where FLOPs go up."""

    def of(self, point: Point) -> float:
        if self.per_ms is None or point.extra_ms is None:
            return float(point.extra_flops)
        return point.extra_ms * self.per_ms


@dataclass(frozen=True, slots=True)
class _Plot:
    across: _Axis
    up: _Upward

    def x(self, n_bytes: float) -> float:
        return round(LEFT + self.across.at(n_bytes) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - self.up.axis.at(value) * (HEIGHT - TOP - BOTTOM), 1)


def _upward(frontier: Frontier, points: Sequence[Point]) -> _Upward:
    if any(p.extra_ms is None for p in points):
        heading, per_ms = "extra FLOPs a step", None
    elif frontier.step_ms:
        heading, per_ms = "extra time, % of the plain step", 100 / frontier.step_ms
    else:
        heading, per_ms = "extra time, ms a step", 1.0
    scale = _Upward(_Axis(0, 1, 1), heading, per_ms)
    return _Upward(_axis(0, max(map(scale.of, points)), _round_step), heading, per_ms)


def _axis(low: float, high: float, step_for: Callable[[float], float]) -> _Axis:
    """Some five ticks over the whole of a range."""
    step = step_for(max((high - low) / 5, high / 1000, 1e-9))
    return _Axis(math.floor(low / step) * step, max(math.ceil(high / step), math.floor(low / step) + 1) * step, step)


def _round_step(least: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... that is not below `least`."""
    tens = 10.0 ** math.floor(math.log10(least))
    return next(tens * digit for digit in (1, 2, 5, 10) if tens * digit >= least * (1 - 1e-9))


def _byte_step(least: float) -> float:
    """A round number of the largest binary unit below `least`."""
    unit = 1024.0 ** max(0, math.floor(math.log(least, 1024)))
    return _round_step(least / unit) * unit


def _grid(plot: _Plot) -> Iterator[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for value in plot.up.axis.ticks():
        y = plot.y(value)
        yield f'<path d="M{LEFT} {y}H{right}" stroke="#e5e5e5"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{value:.4g}</text>'
    for value in plot.across.ticks():
        x = plot.x(value)
        yield f'<path d="M{x} {TOP}V{bottom}" stroke="#e5e5e5"/>'
        yield f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{format_bytes(round(value))}</text>'
    middle = (LEFT + right) / 2
    yield f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">peak memory of the step</text>'
    at = f"18 {(TOP + bottom) / 2}"
    yield f'<text transform="translate({at}) rotate(-90)" text-anchor="middle">{escape(plot.up.heading)}</text>'


def _line(plot: _Plot, points: Sequence[Point]) -> Iterator[str]:
    """A budget costs what the largest peak within it costs."""
    first, *rest = points
    steps = "".join(f"H{plot.x(p.peak_bytes)}V{plot.y(plot.up.of(p))}" for p in rest)
    start = f"M{plot.x(first.peak_bytes)} {plot.y(plot.up.of(first))}"
    yield f'<path d="{start}{steps}" fill="none" stroke="#0b6fb8" stroke-width="2"/>'


def _mark(plot: _Plot, point: Point, step_ms: float) -> str:
    x, y = plot.x(point.peak_bytes), plot.y(plot.up.of(point))
    return f'<circle cx="{x}" cy="{y}" r="3.5" fill="#0b6fb8">{_title(point, step_ms)}</circle>'


def _other(plot: _Plot, point: Point, step_ms: float) -> Iterator[str]:
    x, y = plot.x(point.peak_bytes), plot.y(plot.up.of(point))
    yield f'<path d="M{x} {y - 5}l5 5-5 5-5-5z" fill="#c4501b">{_title(point, step_ms)}</path>'
    end = x > WIDTH * 0.7  # a long name would leave the picture
    anchor = f'x="{x - 9}" text-anchor="end"' if end else f'x="{x + 9}"'
    yield f'<text {anchor} y="{y + 4}" fill="#c4501b">{escape(point.name)}</text>'


def _title(point: Point, step_ms: float) -> str:
    parts = [point.name, format_bytes(point.peak_bytes), _time(point.extra_ms, step_ms)]
    parts.append(f"+{point.extra_flops:.3g} FLOPs")
    return f"<title>{escape(', '.join(filter(None, parts)))}</title>"
