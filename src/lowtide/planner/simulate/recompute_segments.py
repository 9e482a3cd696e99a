"""Simulate recomputes, one segment of the graph's nodes at a time, with a cache.

Nodes are visited dependents first. The outcome in a segment of that order depends only on the states of its nodes and
of the nodes that they could need, and on the demands of earlier segments. A search changes one decision at a time:
nearly every segment has been visited with the same inputs before.

`memory_sweep.py` defines the terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from lowtide.planner.simulate.assignment import ADVANCED, OFFLOADED, PASSED, RECOMPUTED, REPLAYED, Assignment
from lowtide.planner.simulate.call_allocations import Forwards
from lowtide.planner.simulate.profile_index import Index, Ints
from lowtide.planner.simulate.recompute_cost import Recipe

REMEMBERED = 128
"""Cached visits per segment."""


Wanted = tuple[int, int, int, int]
"""`made`, `wanted`, `held` and `later` of a node."""


def both(one: Wanted, other: Wanted) -> Wanted:
    """Return the combined demand of two demands on a node."""
    later = one[3] if one[0] < other[0] else other[3] if other[0] < one[0] else max(one[3], other[3])
    return min(one[0], other[0]), max(one[1], other[1]), max(one[2], other[2]), later


@dataclass(frozen=True, slots=True, eq=False)
class SegmentResult:
    """Outcome of one segment, as columns, and its demands on later segments."""

    asks: list[tuple[int, Wanted]]
    brings_back: list[tuple[int, tuple[int, int]]]
    """Pairs of a call and (storage that its replay restores, position until which that is wanted)."""
    times: list[float]
    flops: int
    copies: Ints
    """Starts, ends, bytes and nodes: memory in use in positions [start, end)."""
    runs: Ints
    """Positions, nodes that run there, and the bytes that each needs beyond those computed later."""
    waits: Ints
    """Positions, and bytes in use until all nodes there have run."""
    holds: Ints
    """Kept values, and the position until which the values computed from them hold them."""
    returns: Ints
    """Offloaded storages, when they must be back, until when they are wanted, and values in them."""


class Demand:
    """Demands of backward and of the segments visited so far."""

    def __init__(self, by_node: list[Wanted]) -> None:
        self.by_node = by_node
        self.brings_back: dict[int, list[tuple[int, int]]] = {}
        """For each call the storages that its replay restores, and until when each is wanted."""

    def take(self, visit: SegmentResult) -> None:
        """Add the demands of `visit`."""
        for node, wanted in visit.asks:
            self.by_node[node] = both(self.by_node[node], wanted)
        for call, wanted_back in visit.brings_back:
            self.brings_back.setdefault(call, []).append(wanted_back)


class Segment:
    """A run of nodes that are consecutive in the order."""

    def __init__(self, index: Index, forwards: Forwards, nodes: list[int]) -> None:
        self.index, self.forwards, self.nodes = index, forwards, nodes
        near = {*nodes, *(need for node in nodes for need in index.could_need(node))}
        self._near, self._nodes = np.array(sorted(near), np.int64), np.array(nodes, np.int64)
        self._asked = itemgetter(*nodes)
        self.calls = [node - index.n_values for node in nodes if node >= index.n_values]
        self._visits: dict[object, SegmentResult] = {}

    def visit(self, fates: Assignment, asked: Demand) -> SegmentResult:
        """Return the outcome of this segment under `fates`, for the demands `asked`."""
        brings_back = {call: tuple(asked.brings_back[call]) for call in self.calls if call in asked.brings_back}
        key = (
            fates.state[self._near].tobytes(),
            fates.by_call[self._nodes].tobytes(),
            self._asked(asked.by_node),
            tuple(brings_back.items()),
        )
        found = self._visits.get(key)
        if found is None:
            if len(self._visits) == REMEMBERED:
                self._visits.clear()
            found = self._visits[key] = _SegmentWalk(self, fates, asked).visit()
        return found


class Segments:
    """All nodes in their order, in segments just long enough that looking all up takes about as long as one visit."""

    def __init__(self, index: Index) -> None:
        order, forwards, calls = index.order.tolist(), Forwards(index), len(index.profile.calls)
        length = math.isqrt(2 * len(order)) + 1
        starts = range(0, len(order), length)
        self.index = index
        self._all = [Segment(index, forwards, order[start : start + length]) for start in starts]
        self._starts = np.array(starts, np.int64)
        by_value = zip(index.read.tolist(), index.released.tolist(), strict=True)
        self._by_backward: list[Wanted] = [
            *((read, until, until, 0) for read, until in by_value),
            *[(index.end, 0, 0, 0)] * calls,
        ]

    def visits(self, fates: Assignment) -> list[SegmentResult]:
        """Return one visit to each segment under `fates` in which something is recomputed.

        A replay that saves a value held elsewhere is held as long as that value, and may itself hold values that decide
        how long that is: segments are visited until nothing is held longer than before.
        """
        by_node, n_values = self._by_backward.copy(), self.index.n_values
        elsewhere = [(value, n_values + call) for value, call in fates.elsewhere]
        for value, call in elsewhere:
            by_node[call] = both(by_node[call], by_node[value])
        while True:
            found = self._visited(fates, Demand(by_node.copy()))
            if not elsewhere:
                return found
            held = np.zeros(n_values, np.int64)
            for visit in found:
                np.maximum.at(held, *visit.holds)
            longer = [(call, int(held[value])) for value, call in elsewhere if held[value] > by_node[call][2]]
            if not longer:
                return found
            for call, until in longer:
                by_node[call] = both(by_node[call], (self.index.end, 0, until, 0))

    def _visited(self, fates: Assignment, asked: Demand) -> list[SegmentResult]:
        found = []
        is_busy = np.logical_or.reduceat(fates.state[self.index.order] >= RECOMPUTED, self._starts)
        for number in np.flatnonzero(is_busy).tolist():
            found.append(self._all[number].visit(fates, asked))
            asked.take(found[-1])
        return found


class _SegmentWalk:
    """A visit to one segment, node by node."""

    def __init__(self, stretch: Segment, fates: Assignment, asked: Demand) -> None:
        self._index, self._forwards, self._fates = stretch.index, stretch.forwards, fates
        self._state: list[int] = fates.state.tolist()
        self._nodes = stretch.nodes
        self._asked = {node: asked.by_node[node] for node in stretch.nodes}
        self._brings_back = {call: list(asked.brings_back.get(call, ())) for call in stretch.calls}
        self._times: list[float] = []
        self._flops = 0
        self._copies: list[tuple[int, int, int, int]] = []
        self._runs: list[tuple[int, int, int]] = []
        self._waits: list[tuple[int, int]] = []
        self._holds: list[tuple[int, int]] = []
        self._returns: list[tuple[int, int, int, int]] = []

    def visit(self) -> SegmentResult:
        for node in self._nodes:
            if self._state[node] >= RECOMPUTED:
                self._visit(node)
        own, n_values = set(self._nodes), self._index.n_values
        elsewhere = [(call, found) for call, found in self._brings_back.items() if n_values + call not in own]
        return SegmentResult(
            asks=[(node, wanted) for node, wanted in self._asked.items() if node not in own],
            brings_back=[(call, wanted) for call, found in elsewhere for wanted in found],
            times=self._times,
            flops=self._flops,
            copies=_columns(self._copies, 4),
            runs=_columns(self._runs, 3),
            waits=_columns(self._waits, 2),
            holds=_columns(self._holds, 2),
            returns=_columns(self._returns, 4),
        )

    def _visit(self, node: int) -> None:
        index, (when, until, held, after) = self._index, self._asked[node]
        is_value, state = node < index.n_values, self._state[node]
        if is_value and state == REPLAYED:
            call = int(self._fates.by_call[node])
            self._ask(index.n_values + call, (when, until, held, after))
            self._brings_back.setdefault(call, []).append((index.storage_of[node], until))
            return
        if state == OFFLOADED:
            self._returns.append((index.storage_of[node], when, until, node))
            return
        recipe = self._recipe(node)
        is_made = when < index.end
        if is_made:
            after += self._made(node, recipe)
        for operand in recipe.operands:
            if self._state[operand] >= RECOMPUTED:
                self._ask(operand, (when, when + 1 if is_made else until, held, after))
            else:  # kept; or without a recipe and a holder, and then held like a kept one
                self._holds.append((operand, held))

    def _ask(self, node: int, wanted: Wanted) -> None:
        known = self._asked.get(node)
        self._asked[node] = wanted if known is None else both(known, wanted)

    def _recipe(self, node: int) -> Recipe:
        """Return the recipe for `node`, without the memory of a forward."""
        index = self._index
        if node >= index.n_values:
            return index.replays[node - index.n_values]
        if self._state[node] == ADVANCED:
            return index.advances[int(self._fates.by_call[node])]
        for operand in index.optional[node]:
            if self._state[operand] == PASSED and index.recomputable[operand]:
                return index.recipe(node, self._fates.state[: index.n_values] == PASSED)
        return index.recipes[node]

    def _made(self, node: int, recipe: Recipe) -> int:
        """Record the cost of making `node`. Return the bytes in use when it has been made."""
        index, (when, until, _, after) = self._index, self._asked[node]
        scratch = recipe.scratch_bytes
        if node >= index.n_values:
            call, ends = node - index.n_values, dict[int, int]()
            for storage, wanted in self._brings_back[call]:
                if wanted > ends.get(storage, when):
                    ends[storage] = wanted
            self._copies += [(when, end, index.bytes_of[storage], node) for storage, end in ends.items()]
            size = sum(index.bytes_of[storage] for storage in ends)
            scratch = max(0, self._forwards.peak(call, tuple(sorted(ends))) - size)
        else:
            size = index.value_bytes[node]
            if self._state[node] == ADVANCED:
                storage = index.storage_of[node]
                size = index.bytes_of[storage]
                scratch = max(0, self._forwards.peak(int(self._fates.by_call[node]), (storage,)) - size)
            else:
                ahead_of = zip(recipe.operands, recipe.ahead_bytes, strict=True)
                ahead = max((ahead for operand, ahead in ahead_of if self._state[operand] >= RECOMPUTED), default=0)
                self._waits.append((when, ahead))  # until the operand has been recomputed
                scratch = max(0, scratch - ahead)
            stays = until > when + 1 or index.read[node] == when  # otherwise it is freed when the others have run
            self._copies.append((when, until, size if stays else 0, node))
            if not stays:
                self._waits.append((when, size))
        self._runs.append((when, node, scratch - after))
        self._times.append(recipe.ms)
        self._flops += recipe.flops
        return size


def _columns(rows: Sequence[tuple[int, ...]], n: int) -> Ints:
    return np.array(rows, np.int64).reshape(-1, n).T
