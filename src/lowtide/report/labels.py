"""Where the names of points stand in a picture: beside them and over nothing else, else with a line to them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

Line = tuple[float, float, float, float]
"""From x and y to x and y."""
CHARACTER = 0.56
"""Width of a character on average, of the font size; wide fonts included."""
DIRECTIONS = tuple((math.cos(math.tau * n / 16), math.sin(math.tau * n / 16)) for n in range(16))
"""To the right first, which is where people look for a name."""
DISTANCES = range(9, 140, 11)
"""Of a name from its point, in pixels."""
BESIDE = 12
"""Up to this distance a name needs no line to its point."""
MARK = 8
"""Pixels from a point that its mark takes: there a line to its name begins."""
SWEEPS = 12
"""Rounds in which each name may find a better place, at most."""
CHOICES = 64
"""Places that are tried for each name: those that are best if no other name is there."""
TRIES = 5
"""With how many names as the first to be placed."""
OUTSIDE = 1e4


@dataclass(frozen=True, slots=True)
class Box:
    """Pixels, from the left and from the top."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """The area that both cover."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return across * down if across > 0 and down > 0 else 0.0

    def is_cut(self, line: Line) -> bool:
        """Whether a straight line goes through it (Liang and Barsky 1984, doi 10.1145/357332.357333)."""
        x1, y1, x2, y2 = line
        enter, leave = 0.0, 1.0
        for start, by, low, high in ((x1, x2 - x1, self.left, self.right), (y1, y2 - y1, self.top, self.bottom)):
            if by:
                one, other = (low - start) / by, (high - start) / by
                enter, leave = max(enter, min(one, other)), min(leave, max(one, other))
            elif not low < start < high:
                return False
        return enter < leave

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.bottom - self.top)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a name stands."""

    box: Box
    anchor: str
    """The side of the box that the text is aligned to, as SVG's `text-anchor`."""
    leader: Line | None
    """From its point to it; None where it stands right beside it."""
    cost: float
    """What this place costs if no other name is there."""


def placed(names: Sequence[tuple[str, float, float]], *, size: float, within: Box, taken: Sequence[Box]) -> list[Place]:
    """A place for each name and its point: as little as possible covers `taken` or another name.

    Each name in turn takes the place that is best beside the others, until none moves any more. What comes of that
    depends on who is first, so the best of several tries counts.
    """
    choices = [sorted(_places(*name, size, within, taken), key=lambda place: place.cost)[:CHOICES] for name in names]
    if not names:
        return []
    found = [_settled(choices, first) for first in range(0, len(names), math.ceil(len(names) / TRIES))]
    return min(found, key=_total)


def _settled(choices: Sequence[Sequence[Place]], first: int) -> list[Place]:
    found: dict[int, Place] = {}
    order = [(first + n) % len(choices) for n in range(len(choices))]
    for _ in range(SWEEPS):
        before = dict(found)
        for n in order:
            others = [place for other, place in found.items() if other != n]
            found[n] = min(choices[n], key=lambda place: place.cost + sum(_disturb(place, o) for o in others))
        if found == before:
            break
    return [found[n] for n in range(len(choices))]


def _total(places: Sequence[Place]) -> float:
    return sum(place.cost for place in places) + sum(_disturb(one, other) for one, other in combinations(places, 2))


def _places(name: str, x: float, y: float, size: float, within: Box, taken: Sequence[Box]) -> Iterator[Place]:
    """Places around a point. Being far away from it costs something, and so does being elsewhere than to its right."""
    width, height = CHARACTER * size * len(name) + 4, 1.1 * size
    for distance in DISTANCES:
        for turn, (right, down) in enumerate(DIRECTIONS):
            anchor, share = ("start", 0.0) if right > 0.3 else ("end", 1.0) if right < -0.3 else ("middle", 0.5)
            left = x + distance * right - width * share
            top = y + distance * down - height * (1 - down) / 2
            box = Box(left, top, left + width, top + height)
            leader = None if distance <= BESIDE else _leader(x, y, box)
            covered = [area for other in taken if (area := box.overlap(other))]
            cut = 0 if leader is None else sum(other.is_cut(leader) for other in taken)
            cost = distance + 0.4 * min(turn, 16 - turn) + 15.0 * len(covered) + 2.0 * sum(covered) + 12.0 * cut
            yield Place(box, anchor, leader, cost + OUTSIDE * (box.overlap(within) < box.area - 1e-6))


def _leader(x: float, y: float, box: Box) -> Line:
    end_x, end_y = min(max(x, box.left), box.right), min(max(y, box.top), box.bottom)
    share = min(1.0, MARK / math.dist((x, y), (end_x, end_y)))
    return x + share * (end_x - x), y + share * (end_y - y), end_x, end_y


def _disturb(one: Place, other: Place) -> float:
    """What it costs that two names are in each other's way."""
    cost = 10.0 * one.box.overlap(other.box)
    if one.leader is not None:
        cost += 150.0 * other.box.is_cut(one.leader)
    if other.leader is not None:
        cost += 150.0 * one.box.is_cut(other.leader)
    if one.leader is not None and other.leader is not None:
        cost += 60.0 * _cross(one.leader, other.leader)
    return cost


def _cross(one: Line, other: Line) -> bool:
    """Whether each line has the other's ends on both of its sides."""

    def sides(line: Line, x: float, y: float) -> float:
        return (line[2] - line[0]) * (y - line[1]) - (line[3] - line[1]) * (x - line[0])

    return all(sides(a, *b[:2]) * sides(a, *b[2:]) < 0 for a, b in ((one, other), (other, one)))
