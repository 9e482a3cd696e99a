"""Draw memory over a step and the frontier, as HTML with SVG of any width, for pages and notebooks.

Shapes are SVG stretched to the available width; labels are HTML positioned in percent, so they stay readable on a
phone. Colours are variables in `page.css`, which defines them for light and dark mode.
"""

from __future__ import annotations

import html
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from lowtide.planner.budget_frontier import Frontier
from lowtide.planner.records import Plan
from lowtide.report.frontier_table import format_extra_time
from lowtide.report.step_memory import CATEGORIES, StepMemory, map_moments_by_phase
from lowtide.units import format_bytes

WIDTH, HEIGHT = 1000, 400
"""Width and height of the SVG's coordinate system, before it is stretched."""
HEADROOM = 1.12
"""Height of the axis as a multiple of the largest level, so that there is room for a label."""
_TICKS = 6
NARROW = 6
"""A phase whose width is a smaller percentage of the plot has no room for its name."""
NARROW_ON_PHONES = 20
"""A phase whose width is a smaller percentage of the plot has no room for its name on a phone."""


def escape(text: object) -> str:
    """Return text escaped for HTML."""
    return html.escape(str(text))


def slug(category: str) -> str:
    """Return the CSS class of a category: `optimizer state` -> `optimizer-state`."""
    return category.replace(" ", "-")


@dataclass(frozen=True, slots=True)
class Axes:
    """Scales of the axes in a plot of memory over one or two steps."""

    span: float
    """Length of the horizontal axis, in events of the first step."""
    low: int
    high: int

    def x(self, place: float) -> float:
        return round(WIDTH * place / self.span, 1) if self.span else 0.0

    def y(self, level: float) -> float:
        return round(HEIGHT * (1 - (level - self.low) / (self.high - self.low)), 1)

    def top(self, level: float) -> str:
        """Convert a level in bytes to a CSS distance from the top of the picture."""
        return f"{100 * self.y(level) / HEIGHT:.2f}%"

    def left(self, place: float) -> str:
        """Convert a position in the step, counted in events, to a CSS distance from the left edge."""
        return f"{100 * self.x(place) / WIDTH:.2f}%"


def choose_axes(memories: Sequence[StepMemory], budget_bytes: int | None = None) -> Axes:
    """Choose axes that show the memory of all steps, and the budget unless it is far above the memory."""
    high = max(1, *(memory.peak_bytes for memory in memories))
    if budget_bytes is not None and budget_bytes < 1.5 * high:
        high = max(high, budget_bytes)
    low = min(0, *(memory.floor_bytes for memory in memories))
    return Axes(float(memories[0].n_events), low, low + math.ceil((high - low) * HEADROOM))


def places(memory: StepMemory, base: StepMemory) -> tuple[float, ...]:
    """Map a step's moments to positions on the axis of the step `base`, phase by phase."""
    if memory is base:
        return tuple(map(float, memory.at))
    edges = {span.name: _find_ends(base, span.first, span.stop) for span in base.phases}
    places = map_moments_by_phase(memory, edges)
    return places if edges else tuple(at * base.n_events / memory.n_events for at in memory.at)


def _find_ends(memory: StepMemory, first: int, stop: int) -> tuple[int, int]:
    return memory.at[first], memory.at[stop] if stop < len(memory.at) else memory.n_events


def draw_memory_plot(tracks: Sequence[tuple[str, StepMemory]], *, budget_bytes: int | None = None) -> str:
    """Draw the memory of one or two steps, stacked by category, as HTML with SVG. The last step is shown at first.

    Args:
        tracks: Name -> memory, such as `before` and `after`.
        budget_bytes: Level to mark.
    """
    memories = [memory for _, memory in tracks]
    base, axes = memories[0], choose_axes(memories, budget_bytes)
    shown = tracks[-1][0]
    layers = []
    for name, memory in tracks:
        at = places(memory, base)
        hidden = "" if name == shown else " is-outline"
        layers.append(f'<g class="lt-track{hidden}" data-track="{name}">{"".join(_draw_areas(memory, at, axes))}</g>')
    lines = [
        f'<line class="lt-grid" x1="0" x2="{WIDTH}" y1="{axes.y(t)}" y2="{axes.y(t)}"/>' for t in _list_ticks(axes)
    ]
    bounds = [axes.x(_find_ends(base, span.first, span.stop)[0]) for span in base.phases]
    lines += [f'<line class="lt-phase" x1="{x}" x2="{x}" y1="0" y2="{HEIGHT}"/>' for x in bounds if x]
    marks = "".join(_draw_memory_marks(tracks, axes, base, budget_bytes))
    if budget_bytes is not None and budget_bytes <= axes.high:
        y = axes.y(budget_bytes)
        lines.append(f'<line class="lt-budget" x1="0" x2="{WIDTH}" y1="{y}" y2="{y}"/>')
    return (
        f'<div class="lt-plot" aria-hidden="true"><svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">'
        f"{''.join(layers)}{''.join(lines)}</svg>{marks}</div>"
    )


def _draw_areas(memory: StepMemory, at: Sequence[float], axes: Axes) -> Iterator[str]:
    """Yield an area for each category, from the bottom up, and the outline of their sum."""
    xs = [axes.x(place) for place in at]
    ends = [*xs[1:], float(WIDTH)]
    below = [memory.floor_bytes] * len(at)
    for category in (name for name in CATEGORIES if name in memory.bytes):
        above = [low + part for low, part in zip(below, memory.bytes[category], strict=True)]
        upper = _find_corners(xs, ends, [axes.y(level) for level in above])
        lower = _find_corners(xs, ends, [axes.y(level) for level in below])
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in [*upper, *reversed(lower)]) + "Z"
        yield f'<path class="lt-area lt-{slug(category)}" d="{path}"/>'
        below = above
    outline = _find_corners(xs, ends, [axes.y(level) for level in below])
    yield f'<path class="lt-outline" d="M{"L".join(f"{x:g} {y:g}" for x, y in outline)}"/>'


def _find_corners(xs: Sequence[float], ends: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Return the corners of a step line that has the heights `ys` from `xs` to `ends`."""
    corners: list[tuple[float, float]] = []
    for x, end, y in zip(xs, ends, ys, strict=True):
        if corners and corners[-1][1] == y:
            corners[-1] = (end, y)
        else:
            corners += [(x, y), (end, y)]
    return corners


def _list_ticks(axes: Axes) -> list[int]:
    """Return tick levels for the axis, in bytes: multiples of a power of two, which are short in every unit."""
    step = 1 << max(0, math.ceil(math.log2((axes.high - axes.low) / _TICKS)))
    return list(range(-(-axes.low // step) * step, axes.high, step))


def _draw_memory_marks(
    tracks: Sequence[tuple[str, StepMemory]], axes: Axes, base: StepMemory, budget_bytes: int | None
) -> Iterator[str]:
    """Yield HTML for the texts and points on the plot: levels, phases, peaks, budget, cursor."""
    for level in _list_ticks(axes):
        yield f'<span class="lt-tick" style="top:{axes.top(level)}">{format_bytes(level)}</span>'
    for span in base.phases:
        first, stop = _find_ends(base, span.first, span.stop)
        width = 100 * (axes.x(stop) - axes.x(first)) / WIDTH
        if width < NARROW:
            continue
        narrow = " is-narrow" if width < NARROW_ON_PHONES else ""
        style = f"left:{axes.left(first)};width:{width:.2f}%"
        yield f'<span class="lt-phase-name{narrow}" style="{style}">{escape(span.name)}</span>'
    peaks = [(name, memory, places(memory, base)[memory.peak_moment]) for name, memory in tracks]
    if budget_bytes is not None and budget_bytes <= axes.high:
        text = f"budget {format_bytes(budget_bytes)}"
        is_early = axes.x(peaks[-1][2]) < WIDTH / 2  # the peak of the plan, whose label is next to the budget's
        side = " is-right" if is_early else ""
        yield f'<span class="lt-budget-name{side}" style="top:{axes.top(budget_bytes)}">{text}</span>'
    for name, memory, place in peaks:
        side = " is-left" if axes.x(place) > 0.7 * WIDTH else ""
        yield (
            f'<span class="lt-peak{side}" data-track="{name}" style="left:{axes.left(place)};'
            f'top:{axes.top(memory.peak_bytes)}"><b>{format_bytes(memory.peak_bytes)}</b></span>'
        )
    yield '<span class="lt-cursor" hidden></span>'


def legend(memory: StepMemory, moment: int, names: Collection[str]) -> str:
    """Render a step's memory at a moment as an HTML table: bytes and share of each category in `names`."""
    total = memory.totals[moment]
    parts = total - memory.floor_bytes
    rows = []
    for name in (category for category in reversed(CATEGORIES) if category in names):
        n = memory.bytes[name][moment] if name in memory.bytes else 0
        rows.append(
            f'<tr data-category="{escape(name)}"><th scope="row"><i class="lt-swatch lt-{slug(name)}"></i>'
            f'{escape(name)}</th><td class="lt-bytes" data-bytes="{n}">{format_bytes(n)}</td>'
            f'<td class="lt-bar"><i class="lt-{slug(name)}" style="width:{_format_percent(n, parts)}"></i></td></tr>'
        )
    if memory.floor_bytes:
        rows.append(
            f'<tr data-floor><th scope="row">less: at entry</th><td class="lt-bytes" data-bytes="{memory.floor_bytes}">'
            f"{format_bytes(memory.floor_bytes)}</td><td></td></tr>"
        )
    rows.append(
        f'<tr class="lt-total"><th scope="row">all together</th><td class="lt-bytes" data-bytes="{total}">'
        f"{format_bytes(total)}</td><td></td></tr>"
    )
    return (
        '<table class="lt-legend"><caption class="lt-hidden">Memory by category at this moment</caption>'
        '<thead class="lt-hidden"><tr><th scope="col">category</th><th scope="col">bytes</th>'
        f'<th scope="col">share</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def _format_percent(part: int, whole: int) -> str:
    return f"{max(0.0, 100 * part / whole) if whole > 0 else 0.0:.1f}%"


def draw_frontier_plot(frontier: Frontier, plan: Plan | None = None, budget_bytes: int | None = None) -> str:
    """Draw the frontier as HTML with SVG: extra time against peak memory, one point per plan.

    Args:
        frontier: Plans to draw.
        plan: A plan to mark, with its budget and the lower bound of its extra time.
        budget_bytes: The budget to mark if `plan` is None.
    """
    if plan is not None:
        budget_bytes = plan.budget_bytes
    unit = frontier.step_ms or 1.0  # extra time as a share of the plain step, or in ms if that was not timed
    points = [(point.peak_bytes, (point.extra_ms or 0.0) / unit) for point in frontier.points]
    chosen = None if plan is None else (plan.predicted.peak_bytes, plan.predicted.extra_ms / unit)
    everyone = points if chosen is None else [*points, chosen]
    low, high = min(everyone)[0], max(everyone)[0]
    pad = max((high - low) // 12, 1)
    left = max(0, (low if plan is not None or budget_bytes is None else min(low, budget_bytes)) - pad)
    right = high + pad
    top = max(max(cost for _, cost in everyone) * 1.15, 1e-9)

    def x(n: float) -> float:
        return min(max(WIDTH * (n - left) / (right - left), 0), WIDTH)

    def y(cost: float) -> float:  # square-root scale: the smallest peaks cost a lot, most plans little
        return HEIGHT * (0.97 - 0.94 * math.sqrt(cost / top))

    corners: list[tuple[float, float]] = []
    for peak, cost in points:
        if corners:
            corners.append((x(peak), corners[-1][1]))
        corners.append((x(peak), y(cost)))
    line = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in [*corners, (WIDTH, corners[-1][1])])
    shapes = [f'<line class="lt-grid" x1="0" x2="{WIDTH}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>' for t in _cost_ticks(top)]
    levels = [(t, format_extra_time(t * unit, frontier.step_ms) if t else "0") for t in _cost_ticks(top)]
    marks = [f'<span class="lt-tick" style="top:{100 * y(t) / HEIGHT:.2f}%">{name}</span>' for t, name in levels]
    shapes.append(f'<path class="lt-frontier" d="{line}"/>')
    if budget_bytes is not None and left <= budget_bytes <= right:
        at = x(budget_bytes)
        shapes.append(f'<line class="lt-budget" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{HEIGHT}"/>')
        side = " is-left" if at > WIDTH / 2 else ""
        marks.append(
            f'<span class="lt-budget-at{side}" style="left:{at / WIDTH * 100:.2f}%">'
            f"budget {format_bytes(budget_bytes)}</span>"
        )
    marks += [_draw_dot("lt-point", x(peak), y(cost), "") for peak, cost in points]
    if plan is not None and chosen is not None:
        if plan.bound_ms:
            marks.append(_draw_dot("lt-bound", x(chosen[0]), y(plan.bound_ms / unit), ""))
        text = f"<b>{format_bytes(chosen[0])}, {format_extra_time(plan.predicted.extra_ms, frontier.step_ms)}</b>"
        # The line falls to the right: nothing is drawn above it on the right, or below it on the left.
        side = " is-left is-low" if x(chosen[0]) > 0.6 * WIDTH else " is-low" if y(chosen[1]) < 0.2 * HEIGHT else ""
        marks.append(_draw_dot(f"lt-chosen{side}", x(chosen[0]), y(chosen[1]), text))
    marks += [
        f'<span class="lt-tick-x" style="left:{x(n) / WIDTH * 100:.2f}%">{format_bytes(n)}</span>'
        for n in (low, (low + high) // 2, high)
    ]
    return (
        f'<div class="lt-plot lt-short" aria-hidden="true"><svg viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'preserveAspectRatio="none">{"".join(shapes)}</svg>{"".join(marks)}</div>'
    )


def _cost_ticks(top: float) -> list[float]:
    """Return tick values from 0 to `top` that are round and far enough apart on a square-root axis."""
    fractions = [0.0]
    scale = 10 ** (math.floor(math.log10(top)) - 2)
    for number in (m * scale * 10**e for e in range(4) for m in (1, 2, 5)):
        if number <= top and math.sqrt(number / top) - math.sqrt(fractions[-1] / top) > 0.15:
            fractions.append(number)
    return fractions


def _draw_dot(kind: str, x: float, y: float, text: str) -> str:
    return f'<span class="{kind}" style="left:{100 * x / WIDTH:.2f}%;top:{100 * y / HEIGHT:.2f}%">{text}</span>'
