"""Pictures of each model's frontier: Lowtide's measured points as a line, the peers as named points. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from contest.claims import is_equal
from contest.records import Cell, Contest
from lowtide.planner.budget_frontier import Frontier, Point
from lowtide.planner.records import Fingerprint

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write(contest: Contest, folder: Path) -> None:
    """Write the pictures of a model's contest to `folder`, and the peers' points for `lowtide frontier --beside`."""
    from lowtide.report.frontier_figure import save  # here: processes that measure need no matplotlib

    for name, figure in pictures(contest).items():
        save(figure, folder / name)
    points = msgspec.json.format(msgspec.json.encode(peers(contest)), indent=1)
    (folder / f"frontier-{contest.model}.json").write_bytes(points + b"\n")


def names(contest: Contest) -> Iterator[tuple[str, str]]:
    """Yield, for each picture of a model, the quantity on its y axis and the picture's file name."""
    if any(cell.seconds for cell in contest.cells):
        yield "time", f"frontier-{contest.model}.svg"
    yield "FLOPs", f"frontier-{contest.model}-flops.svg"


def pictures(contest: Contest) -> dict[str, Figure]:
    """Draw the pictures of a model's contest; return them by file name."""
    ours = [_point(contest, cell) for cell in contest.cells if cell.kind != "peer" and _ran(cell)]
    theirs = peers(contest)
    found = {}
    for up, name in names(contest):
        if up == "time":
            some = ([p for p in points if p.extra_ms is not None] for points in (ours, theirs))
        else:
            some = ([replace(p, extra_ms=None) for p in points] for points in (ours, theirs))
        found[name] = _picture(contest, *some)
    return found


def peers(contest: Contest) -> tuple[Point, ...]:
    """Return the peers' points. A star marks a peer whose loss, gradients or buffers have other bits than the plain
    step's.
    """
    cells = [cell for cell in contest.of("peer") if _ran(cell)]
    return tuple(replace(_point(contest, c), name=c.name + " *" * (not is_equal(c))) for c in cells)


def _picture(contest: Contest, ours: Sequence[Point], theirs: Sequence[Point]) -> Figure:
    """Draw one picture. The line has Lowtide's points that no smaller peak reaches for less; other points are drawn
    beside it.
    """
    from lowtide.report.frontier_figure import draw

    line: list[Point] = []
    for point in sorted(ours, key=lambda p: (p.peak_bytes, _cost(p))):
        if not line or _cost(point) < _cost(line[-1]):
            line.append(point)
    plain = contest.plain
    assert plain.peak_bytes is not None
    assert plain.flops is not None
    frontier = Frontier(
        fingerprint=Fingerprint(
            torch=contest.versions["torch"], model=contest.model, batch=contest.batch, device="cpu"
        ),
        plain_bytes=plain.peak_bytes,
        step_ms=_step_ms(contest),
        points=tuple(line),
    )
    note = "* other bits than the plain step" if any(p.name.endswith("*") for p in theirs) else ""
    more = [point for point in ours if point not in line]
    return draw(frontier, [*more, *theirs], step_flops=plain.flops, about=contest.description, note=note)


def _ran(cell: Cell) -> bool:
    return cell.peak_bytes is not None and cell.refusal is None


def _cost(point: Point) -> float:
    return point.extra_flops if point.extra_ms is None else point.extra_ms


def _step_ms(contest: Contest) -> float:
    """Return the milliseconds of the fastest plain step; 0 if none was timed."""
    return 1000 * min((cell.plain_seconds for cell in contest.cells if cell.plain_seconds), default=0.0)


def _point(contest: Contest, cell: Cell) -> Point:
    """Convert a cell to a point of the frontier.

    Its extra time is computed from the ratio to the plain steps that took turns with it, in units of the fastest plain
    step.
    """
    ratio = 1.0 if cell.kind == "plain" else cell.time_ratio
    assert cell.peak_bytes is not None
    assert cell.flops is not None
    assert contest.plain.peak_bytes is not None
    assert contest.plain.flops is not None
    return Point(
        peak_bytes=cell.peak_bytes,
        extra_ms=None if ratio is None else (ratio - 1) * _step_ms(contest),
        extra_flops=cell.flops - contest.plain.flops,
        share=cell.peak_bytes / contest.plain.peak_bytes,
    )
