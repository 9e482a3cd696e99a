"""The frontier as a picture: one SVG file, drawn here, that any browser shows, on light pages and on dark ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from lowtide.planner.frontier import Frontier, Point
from lowtide.report.axes import Axis, byte_step, byte_unit, round_step
from lowtide.report.frontier import extra_time
from lowtide.report.labels import Box, placed
from lowtide.units import format_bytes

WIDTH, HEIGHT = 800, 500
LEFT, RIGHT, TOP, BOTTOM = 72, 28, 64, 56
"""Margins around the plotted area."""
BELOW = 22
"""In it, room for names below what costs nothing."""
SMALL = 11.5
"""Font size of names."""
KINDS = 5
"""Colours for points of others; those whose names begin with the same word have the same."""

STYLE = """\
<style>
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #424a53; }
.title { font-size: 15px; font-weight: 600; fill: #1f2328; } .about { fill: #6e7781; }
.name { font-size: 11.5px; } .own { font-weight: 600; }
.paper { fill: #ffffff; } .grid { stroke: #e6e8eb; } .zero { stroke: #afb8c1; }
.leader { stroke: #afb8c1; stroke-width: 0.8; } .plain { fill: #ffffff; stroke: #6e7781; stroke-width: 1.5; }
.line { fill: none; stroke: #0969da; stroke-width: 2; stroke-linejoin: round; }
.reached { fill: #0969da; opacity: 0.07; } .ours { fill: #0969da; } .more { fill: #0969da; opacity: 0.4; }
.k0 { fill: #bc4c00; } .k1 { fill: #7a3fd0; } .k2 { fill: #1a7f37; } .k3 { fill: #b3256f; } .k4 { fill: #6b6420; }
@media (prefers-color-scheme: dark) {
text { fill: #b7bfc8; } .title { fill: #f0f6fc; } .about { fill: #8b949e; }
.paper { fill: #0d1117; } .grid { stroke: #23292f; } .zero { stroke: #57606a; }
.leader { stroke: #6e7781; } .plain { fill: #0d1117; stroke: #8b949e; }
.line { stroke: #58a6ff; } .reached { fill: #58a6ff; opacity: 0.1; } .ours, .more { fill: #58a6ff; }
.k0 { fill: #f0883e; } .k1 { fill: #bc8cff; } .k2 { fill: #56d364; } .k3 { fill: #f778ba; } .k4 { fill: #d4c95a; }
}
</style>"""


def picture(frontier: Frontier, others: Sequence[Point] = (), *, about: str = "", note: str = "") -> str:
    """The frontier as SVG: what a budget costs, as a step line.

    `others` stand beside it, each with its name; those without one are plans, too, that are not on the line. Extra time
    goes up, in percent of the plain step where that was timed; extra FLOPs if a point has no time. `about` stands below
    the title, in place of what the frontier itself knows, and `note` in the lower right corner.
    """
    plot = _Plot.of(frontier, [*frontier.points, *others])
    named = [p for p in others if p.name]
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            f"<title>{escape(_title(frontier))}</title>",
            STYLE,
            f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
            f'<text class="title" x="{LEFT}" y="26">{escape(_title(frontier))}</text>',
            f'<text class="about" x="{LEFT}" y="46">{escape(about or _about(frontier))}</text>',
            f'<text class="about" x="{WIDTH - RIGHT}" y="{HEIGHT - 12}" text-anchor="end">{escape(note)}</text>',
            *_grid(plot),
            *_line(plot, frontier),
            *(_circle(plot, p, "more", 2.5) for p in others if not p.name),
            *(_circle(plot, p, "ours", 3.5) for p in frontier.points),
            *(_named(plot, frontier, others) if named else ()),
            "</svg>\n",
        )
    )


def _title(frontier: Frontier) -> str:
    return f"What a memory budget costs: {frontier.fingerprint.model.partition(' ')[0]}"


def _about(frontier: Frontier) -> str:
    made_for = frontier.fingerprint
    return f"batch {made_for.batch}, on {made_for.device}, torch {made_for.torch}; predicted from one rehearsal"


@dataclass(frozen=True, slots=True)
class _Plot:
    """What goes across, what goes up, and where on the paper a point is."""

    across: Axis
    up: Axis
    heading: str
    per_ms: float | None
    """Of the unit that goes up; None where FLOPs do."""
    per_flop: float
    step_ms: float

    @classmethod
    def of(cls, frontier: Frontier, points: Sequence[Point]) -> _Plot:
        per_ms: float | None = None
        per_flop = 1.0
        if all(p.extra_ms is not None for p in points):
            heading, per_ms = "extra time, ms a step", 1.0
            if frontier.step_ms:
                heading, per_ms = "extra time, % of the plain step", 100 / frontier.step_ms
        elif frontier.step_flops:
            heading, per_flop = "extra FLOPs, % of the plain step", 100 / frontier.step_flops
        else:
            heading, per_flop = "extra GFLOP a step", 1e-9
        peaks = [p.peak_bytes for p in points]
        across = Axis.over(min(peaks), max(peaks), byte_step, parts=8)
        unscaled = cls(across, Axis(0, 1, 1), heading, per_ms, per_flop, frontier.step_ms)
        heights = [unscaled.height(p) for p in points]
        up = Axis.over(min(0.0, *heights), max(heights), round_step)
        return cls(across, up, heading, per_ms, per_flop, frontier.step_ms)

    def height(self, point: Point) -> float:
        if self.per_ms is None or point.extra_ms is None:
            return point.extra_flops * self.per_flop
        return point.extra_ms * self.per_ms

    def x(self, n_bytes: float) -> float:
        return round(LEFT + self.across.at(n_bytes) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - BELOW - self.up.at(value) * (HEIGHT - TOP - BOTTOM - BELOW), 1)

    def xy(self, point: Point) -> tuple[float, float]:
        return self.x(point.peak_bytes), self.y(self.height(point))


def _grid(plot: _Plot) -> Iterator[str]:
    right, bottom, unit = WIDTH - RIGHT, HEIGHT - BOTTOM, byte_unit(plot.across.step)
    yield f'<path class="grid" d="M{LEFT} {bottom}H{right}"/>'
    for value in plot.up.ticks():
        y = plot.y(value)
        yield f'<path class="{"grid" if value else "zero"}" d="M{LEFT} {y}H{right}"/>'
        yield f'<text x="{LEFT - 10}" y="{y + 4}" text-anchor="end">{value:.4g}</text>'
    for value in plot.across.ticks():
        x = plot.x(value)
        yield f'<path class="grid" d="M{x} {TOP}V{bottom}"/>'
        yield f'<text x="{x}" y="{bottom + 20}" text-anchor="middle">{value / unit:.4g}</text>'
    heading = f"peak memory of the step, {format_bytes(unit).split()[1]}"
    yield f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{heading}</text>'
    at = f"20 {(TOP + bottom) / 2}"
    yield f'<text transform="translate({at}) rotate(-90)" text-anchor="middle">{escape(plot.heading)}</text>'


def _line(plot: _Plot, frontier: Frontier) -> Iterator[str]:
    """A budget costs what the largest peak within it costs; all that is above that can be had."""
    first, *rest = map(plot.xy, frontier.points)
    steps = "".join(f"H{x}V{y}" for x, y in rest)
    start = f"M{first[0]} {first[1]}"
    yield f'<path class="reached" d="{start}{steps}H{WIDTH - RIGHT}V{TOP}H{first[0]}z"/>'
    yield f'<path class="line" d="{start}{steps}H{plot.x(frontier.plain_bytes)}"/>'


def _circle(plot: _Plot, point: Point, kind: str, radius: float) -> str:
    x, y = plot.xy(point)
    return f'<circle class="{kind}" cx="{x}" cy="{y}" r="{radius}">{_hint(plot, point)}</circle>'


def _named(plot: _Plot, frontier: Frontier, others: Sequence[Point]) -> Iterator[str]:
    """The points of others, and who is who."""
    named = [p for p in others if p.name]
    plain = plot.x(frontier.plain_bytes), plot.y(0)
    kinds = list(dict.fromkeys(map(_kind, named)))
    names = [("Lowtide", *plot.xy(frontier.points[0])), ("the plain step", *plain)]
    names += [(p.name, *plot.xy(p)) for p in named]
    classes = ("ours own", "about", *(f"k{kinds.index(_kind(p)) % KINDS}" for p in named))
    corners = [*map(plot.xy, frontier.points), (plain[0], plot.xy(frontier.points[-1])[1])]
    taken = [Box(x - 7, y - 7, x + 7, y + 7) for x, y in (plain, *map(plot.xy, (*frontier.points, *others)))]
    taken.append(Box(LEFT, plain[1] - 1, WIDTH - RIGHT, plain[1] + 1))
    for (x1, y1), (x2, y2) in pairwise(corners):
        taken += [Box(x1, y1 - 3, x2, y1 + 3), Box(x2 - 3, min(y1, y2), x2 + 3, max(y1, y2))]
    within = Box(LEFT + 2, TOP, WIDTH - 4, HEIGHT - BOTTOM - 2)
    places = placed(names, size=SMALL, within=within, taken=taken)
    for place in places:
        if place.leader is not None:
            x1, y1, x2, y2 = place.leader
            yield f'<path class="leader" d="M{x1} {y1}L{x2:.1f} {y2:.1f}"/>'
    yield f'<path class="plain" d="M{plain[0] - 4} {plain[1]}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z"/>'
    for point, kind in zip(named, classes[2:], strict=True):
        x, y = plot.xy(point)
        yield f'<path class="{kind}" d="M{x} {y - 5}l5 5-5 5-5-5z">{_hint(plot, point)}</path>'
    for (name, _, _), place, kind in zip(names, places, classes, strict=True):
        x = {"start": place.box.left, "end": place.box.right}.get(place.anchor, (place.box.left + place.box.right) / 2)
        at = f'x="{x:.1f}" y="{place.box.bottom - 0.25 * SMALL:.1f}" text-anchor="{place.anchor}"'
        yield f'<text class="name {kind}" {at}>{escape(name)}</text>'


def _kind(point: Point) -> str:
    return point.name.split()[0].rstrip(",:")


def _hint(plot: _Plot, point: Point) -> str:
    parts = [point.name, format_bytes(point.peak_bytes), extra_time(point.extra_ms, plot.step_ms)]
    parts.append(f"+{point.extra_flops:.3g} FLOPs")
    return f"<title>{escape(', '.join(filter(None, parts)))}</title>"
