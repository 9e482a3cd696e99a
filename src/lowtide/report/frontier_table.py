"""Render the frontier as a table."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from lowtide.planner.budget_frontier import Frontier, Point
from lowtide.units import format_bytes, format_ratio, format_time


def table(frontier: Frontier, others: Sequence[Point] = ()) -> Table:
    """Return a table of one row per point, from the smallest peak to the plain step, with `others` sorted in."""
    rows = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in ("peak", "of plain", "extra time", "extra FLOPs"):
        rows.add_column(heading, justify="right", no_wrap=True)
    rows.add_column("", no_wrap=True)
    for point in sorted([*frontier.points, *others], key=lambda p: p.peak_bytes):
        rows.add_row(
            format_bytes(point.peak_bytes, round_up=True),
            format_ratio(point.share),
            extra_time(point.extra_ms, frontier.step_ms),
            f"{point.extra_flops:.3g}",
            point.name,
        )
    return rows


def show(frontier: Frontier) -> str:
    """Return the table as plain text, at its full width."""
    text = io.StringIO()
    # Plain text without escape codes, in any terminal or notebook.
    Console(file=text, width=200, color_system=None, force_terminal=False, force_jupyter=False).print(table(frontier))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def extra_time(extra_ms: float | None, step_ms: float) -> str:
    if extra_ms is None:
        return ""
    return format_ratio(extra_ms / step_ms, signed=True) if step_ms else f"+{format_time(extra_ms)}"
