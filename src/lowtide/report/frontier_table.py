"""Render the frontier (the best plan for each memory budget) as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lowtide.planner.budget_frontier import Frontier, Point
from lowtide.report.text_table import format_untimed_lines
from lowtide.units import format_bytes, format_ratio, format_time
from lowtide.utils.tables import Styled, Table


def table(points: Iterable[tuple[str | Styled, Point]], step_ms: float) -> Table:
    """Build a table with a row for each named point: its peak, extra time and extra FLOPs."""
    rows = [
        (
            name,
            format_bytes(point.peak_bytes, round_up=True),
            format_ratio(point.share),
            format_extra_time(point.extra_ms, step_ms),
            f"{point.extra_flops:.3g}",
        )
        for name, point in points
    ]
    return Table(headings=("plan", "peak", "of plain", "extra time", "extra FLOPs"), rows=rows)


def show(frontier: Frontier, others: Sequence[Point] = ()) -> str:
    """Format a frontier and the points `others` as a table, sorted by peak."""
    points = sorted([*frontier.points, *others], key=lambda point: point.peak_bytes)
    whole = table(((point.name, point) for point in points), frontier.step_ms)
    if not any(point.name for point in points):
        whole = Table(headings=whole.headings[1:], rows=[row[1:] for row in whole.rows], left=frozenset())
    return "\n".join([*whole.lines(), *format_untimed_lines(frontier.step_ms)])


def format_extra_time(extra_ms: float | None, step_ms: float) -> str:
    if extra_ms is None:
        return ""
    return format_ratio(extra_ms / step_ms, signed=True) if step_ms else f"+{format_time(extra_ms)}"
