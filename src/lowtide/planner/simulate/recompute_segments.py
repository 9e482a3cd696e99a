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
from lowtide.planner.simulate.call_allocations import ForwardMemory
from lowtide.planner.simulate.profile_index import Index
from lowtide.planner.simulate.profile_tables import Ints
from lowtide.planner.simulate.recompute_cost import RecomputeCost
from lowtide.planner.simulate.two_clocks import round_to_ns

REMEMBERED = 128
"""Number of visits that are cached per segment."""


NodeDemand = tuple[int, int, int, int]
"""The numbers `demanded`, `wanted`, `held` and `later` of a node, as `memory_sweep.py` defines them."""


def combine_demands(one: NodeDemand, other: NodeDemand) -> NodeDemand:
    """Combine two demands on a node: the earlier `demanded`, the later `wanted` and `held` (see `NodeDemand`).

    The number `later` is the earlier demand's; for demands at the same position, the larger one.
    """
    later = one[3] if one[0] < other[0] else other[3] if other[0] < one[0] else max(one[3], other[3])
    return min(one[0], other[0]), max(one[1], other[1]), max(one[2], other[2]), later


@dataclass(frozen=True, slots=True, eq=False)
class SegmentResult:
    """Cost and memory of the recomputes in one segment, as columns, and the segment's demands on later segments."""

    demands: list[tuple[int, NodeDemand]]
    restores: list[tuple[int, tuple[int, int]]]
    """Pairs of a call and (storage that the call's replay restores, position until which the storage is wanted)."""
    times: list[float]
    work: Ints
    """Positions, and nanoseconds of host and of device at each; empty where both are one resource."""
    flops: int
    copies: Ints
    """Starts, ends, bytes and nodes: memory in use in positions [start, end)."""
    runs: Ints
    """Positions, nodes that run at each, and the bytes that the node needs beyond the bytes computed later."""
    waits: Ints
    """Positions, and bytes in use until all nodes that run at that position have run."""
    holds: Ints
    """Kept values, and the position until which values computed from each hold it."""
    returns: Ints
    """Offloaded storages, the positions from which and until which each is wanted in GPU memory, and a value in it."""


class Demands:
    """Demands on nodes (values or calls): positions at which backward, or a recompute in a visited segment, reads
    them.
    """

    def __init__(self, by_node: list[NodeDemand]) -> None:
        self.by_node = by_node
        self.restores: dict[int, list[tuple[int, int]]] = {}
        """For each call, the storages that the call's replay restores, and the position until which each is wanted."""

    def add(self, visit: SegmentResult) -> None:
        """Add the demands that a segment, with the outcome `visit`, has on nodes of later segments."""
        for node, wanted in visit.demands:
            self.by_node[node] = combine_demands(self.by_node[node], wanted)
        for call, wanted_back in visit.restores:
            self.restores.setdefault(call, []).append(wanted_back)


class Segment:
    """A run of nodes that are consecutive in topological order."""

    def __init__(self, index: Index, forwards: ForwardMemory, nodes: list[int]) -> None:
        self.index, self.forwards, self.nodes = index, forwards, nodes
        near = {*nodes, *(need for node in nodes for need in index.find_possible_operands(node))}
        self._near, self._nodes = np.array(sorted(near), np.int64), np.array(nodes, np.int64)
        self._own_demands = itemgetter(*nodes)
        self.calls = [node - index.n_values for node in nodes if node >= index.n_values]
        self._visits: dict[object, SegmentResult] = {}

    def visit(self, assignment: Assignment, demand: Demands) -> SegmentResult:
        """Return cost and memory of this segment's recomputes under `assignment`, for the demands `demand`; results are
        cached.
        """
        restores = {call: tuple(demand.restores[call]) for call in self.calls if call in demand.restores}
        key = (
            assignment.state[self._near].tobytes(),
            assignment.by_call[self._nodes].tobytes(),
            self._own_demands(demand.by_node),
            tuple(restores.items()),
        )
        result = self._visits.get(key)
        if result is None:
            if len(self._visits) == REMEMBERED:
                self._visits.clear()
            result = self._visits[key] = _SegmentWalk(self, assignment, demand).visit()
        return result


class Segments:
    """All nodes in topological order, cut into segments.

    The length of a segment is chosen so that looking up all segments in their caches takes about as long as visiting
    one.
    """

    def __init__(self, index: Index) -> None:
        order, forwards, calls = index.order.tolist(), ForwardMemory(index), len(index.profile.calls)
        length = math.isqrt(2 * len(order)) + 1
        starts = range(0, len(order), length)
        self.index = index
        self._all = [Segment(index, forwards, order[start : start + length]) for start in starts]
        self._starts = np.array(starts, np.int64)
        by_value = zip(index.values.read_at.tolist(), index.values.released_at.tolist(), strict=True)
        self._by_backward: list[NodeDemand] = [
            *((read, until, until, 0) for read, until in by_value),
            *[(index.end, 0, 0, 0)] * calls,
        ]

    def visit_all(self, assignment: Assignment) -> list[SegmentResult]:
        """Return the outcome of each segment with nodes that `assignment` recomputes, replays, advances or offloads.

        If a replayed call saves a foreign value (`Assignment.foreign_values`), the replay's inputs are held as long as
        that value. Holding the inputs may prolong the value's own lifetime, so all segments are visited again until
        nothing changes.
        """
        by_node, n_values = self._by_backward.copy(), self.index.n_values
        elsewhere = [(value, n_values + call) for value, call in assignment.foreign_values]
        for value, call in elsewhere:
            by_node[call] = combine_demands(by_node[call], by_node[value])
        while True:
            results = self._visit_all(assignment, Demands(by_node.copy()))
            if not elsewhere:
                return results
            held = np.zeros(n_values, np.int64)
            for visit in results:
                np.maximum.at(held, *visit.holds)
            longer = [(call, int(held[value])) for value, call in elsewhere if held[value] > by_node[call][2]]
            if not longer:
                return results
            for call, until in longer:
                by_node[call] = combine_demands(by_node[call], (self.index.end, 0, until, 0))

    def _visit_all(self, assignment: Assignment, demand: Demands) -> list[SegmentResult]:
        results = []
        is_busy = np.logical_or.reduceat(assignment.state[self.index.order] >= RECOMPUTED, self._starts)
        for number in np.flatnonzero(is_busy).tolist():
            results.append(self._all[number].visit(assignment, demand))
            demand.add(results[-1])
        return results


class _SegmentWalk:
    """Computation of one segment's outcome, node by node."""

    def __init__(self, segment: Segment, assignment: Assignment, demand: Demands) -> None:
        self._index, self._forwards, self._assignment = segment.index, segment.forwards, assignment
        self._state: list[int] = assignment.state.tolist()
        self._nodes = segment.nodes
        self._demands = {node: demand.by_node[node] for node in segment.nodes}
        self._restores = {call: list(demand.restores.get(call, ())) for call in segment.calls}
        self._times: list[float] = []
        self._work: list[tuple[int, int, int]] = []
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
        elsewhere = [(call, demands) for call, demands in self._restores.items() if n_values + call not in own]
        return SegmentResult(
            demands=[(node, wanted) for node, wanted in self._demands.items() if node not in own],
            restores=[(call, wanted) for call, demands in elsewhere for wanted in demands],
            times=self._times,
            work=_columns(self._work, 3),
            flops=self._flops,
            copies=_columns(self._copies, 4),
            runs=_columns(self._runs, 3),
            waits=_columns(self._waits, 2),
            holds=_columns(self._holds, 2),
            returns=_columns(self._returns, 4),
        )

    def _visit(self, node: int) -> None:
        index, (when, until, held, after) = self._index, self._demands[node]
        is_value, state = node < index.n_values, self._state[node]
        if is_value and state == REPLAYED:
            call = int(self._assignment.by_call[node])
            self._demand(index.n_values + call, (when, until, held, after))
            self._restores.setdefault(call, []).append((index.values.storage_of[node], until))
            return
        if state == OFFLOADED:
            self._returns.append((index.values.storage_of[node], when, until, node))
            return
        cost = self._get_cost(node)
        is_demanded = when < index.end
        if is_demanded:
            after += self._record_recompute(node, cost)
        for operand in cost.operands:
            if self._state[operand] >= RECOMPUTED:
                self._demand(operand, (when, when + 1 if is_demanded else until, held, after))
            else:  # kept; or with neither recipe nor holder, and then held like a kept value
                self._holds.append((operand, held))

    def _demand(self, node: int, wanted: NodeDemand) -> None:
        known = self._demands.get(node)
        self._demands[node] = wanted if known is None else combine_demands(known, wanted)

    def _get_cost(self, node: int) -> RecomputeCost:
        """Return the cost of recomputing, replaying or advancing `node`, except the memory of a module's forward."""
        index = self._index
        if node >= index.n_values:
            return index.reruns.replay_costs[node - index.n_values]
        if self._state[node] == ADVANCED:
            return index.reruns.advance_costs[int(self._assignment.by_call[node])]
        for operand in index.values.optional_operands[node]:
            if self._state[operand] == PASSED and index.values.recomputable[operand]:
                return index.values.recompute_cost(node, self._assignment.state[: index.n_values] == PASSED)
        return index.values.recompute_costs[node]

    def _record_recompute(self, node: int, cost: RecomputeCost) -> int:
        """Record time and memory of recomputing, replaying or advancing `node`. Return the bytes of its result."""
        index, (when, until, _, after) = self._index, self._demands[node]
        scratch = cost.scratch_bytes
        if node >= index.n_values:
            call, ends = node - index.n_values, dict[int, int]()
            for storage, wanted in self._restores[call]:
                if wanted > ends.get(storage, when):
                    ends[storage] = wanted
            self._copies += [(when, end, index.storages.bytes_of[storage], node) for storage, end in ends.items()]
            size = sum(index.storages.bytes_of[storage] for storage in ends)
            scratch = max(0, self._forwards.peak(call, tuple(sorted(ends))) - size)
        else:
            size = index.values.bytes_of[node]
            if self._state[node] == ADVANCED:
                storage = index.values.storage_of[node]
                size = index.storages.bytes_of[storage]
                scratch = max(0, self._forwards.peak(int(self._assignment.by_call[node]), (storage,)) - size)
            else:
                ahead_of = zip(cost.operands, cost.ahead_bytes, strict=True)
                ahead = max((ahead for operand, ahead in ahead_of if self._state[operand] >= RECOMPUTED), default=0)
                self._waits.append((when, ahead))  # until the operand has been recomputed
                scratch = max(0, scratch - ahead)
            stays = (
                until > when + 1 or index.values.read_at[node] == when
            )  # otherwise the value is freed once the other nodes at this position have run
            self._copies.append((when, until, size if stays else 0, node))
            if not stays:
                self._waits.append((when, size))
        self._runs.append((when, node, scratch - after))
        if index.clocks is None:
            self._times.append(cost.ms)
        else:
            self._work.append((when, round_to_ns(cost.host_ms), round_to_ns(cost.ms)))
        self._flops += cost.flops
        return size


def _columns(rows: Sequence[tuple[int, ...]], n: int) -> Ints:
    return np.array(rows, np.int64).reshape(-1, n).T
