"""Layout of a picture: layers from the leaves up to the result, and an order within each layer.

A layered drawing after Sugiyama, Tagawa and Toda (1981): a box is one layer above its highest input; long edges bend in
every layer that they pass; each layer is ordered by the mean position of its neighbours, in several sweeps down and up.
Sizes and positions are in pixels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

GAP_X, GAP_Y = 24, 56
_SWEEPS = 8
_BEND_WIDTH = 8


@dataclass(slots=True)
class Box:
    """A box of the drawing, or a bend of a long edge, which has a small `width`."""

    width: float
    height: float
    layer: int
    x: float = 0.0
    """Position of the centre."""
    y: float = 0.0
    above: list[int] = field(default_factory=list)
    below: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Layout:
    """Placed boxes, followed by placed bends. The route of an edge lists the indices of its boxes, lowest first."""

    boxes: list[Box]
    routes: list[list[int]]
    width: float
    height: float


def lay_out(sizes: Sequence[tuple[float, float]], layers: Sequence[int], edges: Sequence[tuple[int, int]]) -> Layout:
    """Place boxes of the given sizes (width, height) in their layers.

    Each edge is a pair of box indices, and leads to a higher layer.
    """
    boxes = [Box(width, height, layer) for (width, height), layer in zip(sizes, layers, strict=True)]
    routes = [_add_bends(boxes, start, end) for start, end in edges]
    rows: dict[int, list[int]] = defaultdict(list)
    for index, box in enumerate(boxes):
        rows[box.layer].append(index)
    ordered = [rows[layer] for layer in sorted(rows)]
    _order_rows(boxes, ordered)
    width = _place_boxes(boxes, ordered)
    y = 0.0
    for row in reversed(ordered):  # the highest layer is drawn first: results on top
        tallest = max(boxes[index].height for index in row)
        for index in row:
            boxes[index].y = y + tallest / 2
        y += tallest + GAP_Y
    return Layout(boxes, routes, width, max(0.0, y - GAP_Y))


def _add_bends(boxes: list[Box], start: int, end: int) -> list[int]:
    """Add a bend to `boxes` for each layer between the boxes `start` and `end`; return the indices along the edge."""
    route = [start]
    for layer in range(boxes[start].layer + 1, boxes[end].layer):
        boxes.append(Box(_BEND_WIDTH, 0, layer))
        route.append(len(boxes) - 1)
    route.append(end)
    for lower, upper in pairwise(route):
        boxes[lower].above.append(upper)
        boxes[upper].below.append(lower)
    return route


def _order_rows(boxes: list[Box], rows: list[list[int]]) -> None:
    place = {index: float(position) for row in rows for position, index in enumerate(row)}
    for sweep in range(_SWEEPS):
        upwards = sweep % 2 == 0
        for row in rows if upwards else reversed(rows):
            means = {}
            for index in row:
                neighbours = boxes[index].below if upwards else boxes[index].above
                means[index] = _mean([place[n] for n in neighbours], place[index])
            row.sort(key=means.__getitem__)
            place.update({index: float(position) for position, index in enumerate(row)})


def _place_boxes(boxes: list[Box], rows: list[list[int]]) -> float:
    """Set the x position of each box, close to its neighbours and without overlap. Return the total width."""
    for row in rows:
        x = 0.0
        for index in row:
            boxes[index].x = x + boxes[index].width / 2
            x += boxes[index].width + GAP_X
    for sweep in range(_SWEEPS):
        for row in rows if sweep % 2 else reversed(rows):
            wanted = [
                _mean([boxes[n].x for n in (boxes[i].below if sweep % 2 else boxes[i].above)], boxes[i].x) for i in row
            ]
            _spread_row([boxes[i] for i in row], wanted)
    left = min((box.x - box.width / 2 for box in boxes), default=0.0)
    for box in boxes:
        box.x -= left
    return max((box.x + box.width / 2 for box in boxes), default=0.0)


def _spread_row(row: list[Box], wanted: list[float]) -> None:
    """Place the boxes of a row near the wanted positions, without overlaps.

    Each position is the mean of two passes, one from the left and one from the right.
    """
    from_left, from_right = list(wanted), list(wanted)
    for i in range(1, len(row)):
        apart = (row[i - 1].width + row[i].width) / 2 + GAP_X
        from_left[i] = max(from_left[i], from_left[i - 1] + apart)
    for i in range(len(row) - 2, -1, -1):
        apart = (row[i].width + row[i + 1].width) / 2 + GAP_X
        from_right[i] = min(from_right[i], from_right[i + 1] - apart)
    for box, left, right in zip(row, from_left, from_right, strict=True):
        box.x = (left + right) / 2


def _mean(numbers: list[float], default: float) -> float:
    return sum(numbers) / len(numbers) if numbers else default
