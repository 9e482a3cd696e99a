"""The decisions from which solvers choose: groups of recomputes, replays and advances, each with its savings and cost.

A storage is freed only when every value in it is dropped, and an address covers the slots of every call of the model in
the step. So recomputes come in groups: storages that share an address are in one group. A replay or an advance is one
call id. Recomputes inside a replayed call overlap with the replay, because values that it restores need no recompute.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lowtide.planner.simulate.profile_index import Index
from lowtide.planner.simulate.profile_tables import Ints
from lowtide.planner.simulate.recompute_cost import RecomputeCost

MS_PER_FLOP = 1e-15
"""Weight of FLOPs, so small that they only break ties between equal times, or decide if no time was measured."""
_Node = tuple[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Storages that are dropped together, by recomputing or by offloading everything in them."""

    number: int
    addresses: Ints
    storages: frozenset[int]
    cost: float
    expensive: bool
    inside: frozenset[int]
    """Ids of the calls whose replay restores all storages of the group."""


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """Replay of one module call, in every call of the model during the step."""

    id: int
    start: int
    """First position of its forward."""
    storages: frozenset[int]
    """Storages that the replay can restore."""
    cost: float
    around: frozenset[int]
    """Ids of the replayable calls around this call."""
    within: frozenset[int]
    """Ids of the replayable calls inside this call."""


@dataclass(frozen=True, slots=True, eq=False)
class Advance:
    """Advance of one module call, in every call of the model: the call's result is not kept, but computed again."""

    id: int
    start: int
    """First position of its forward."""
    storages: frozenset[int]
    """Storages of the call's results."""
    cost: float


def list_replays(index: Index) -> dict[int, Replay]:
    """Return, by call id, the replays that can restore at least one saved value."""
    calls_by_id = index.reruns.replayed_by_id
    restored = {
        id_: frozenset(int(index.values.storage[value]) for call in calls for value in index.reruns.restorable[call])
        for id_, calls in enumerate(calls_by_id)
    }
    around: dict[int, set[int]] = {id_: set() for id_, storages in restored.items() if storages}
    for id_, outer in around.items():
        enclosing = {int(index.calls.id[o]) for call in calls_by_id[id_] for o in index.calls.around[call]}
        outer |= (enclosing & around.keys()) - {id_}
    return {
        id_: Replay(
            id=id_,
            start=int(index.calls.enter[calls_by_id[id_][0]]),
            storages=restored[id_],
            cost=sum(_cost(index, index.reruns.replay_costs[call]) for call in calls_by_id[id_]),
            around=frozenset(outer),
            within=frozenset(inner for inner, its in around.items() if id_ in its),
        )
        for id_, outer in around.items()
    }


def groups_of(index: Index, replays: dict[int, Replay]) -> list[Group]:
    """Return the groups of storages that can be recomputed. Storages that share a slot address are in one group."""
    joined = _join_slots(index, np.flatnonzero(index.slot_recomputable).tolist())
    around = [set(index.calls.around[call]) for call in index.slots.call.tolist()]
    for row in np.flatnonzero(index.slots.is_input).tolist():
        around[row].discard(int(index.slots.call[row]))
    rows_of: dict[int, list[int]] = {}
    for row, storage in enumerate(index.slots.storage.tolist()):
        rows_of.setdefault(storage, []).append(row)

    groups: list[Group] = []
    for members in joined.sets():
        storages = frozenset(number for kind, number in members if kind == "storage")
        rows = [row for storage in storages for row in rows_of[storage]]
        values = sorted({value for value in index.slots.value[rows].tolist() if index.values.recomputable[value]})
        passing = set().union(*(index.values.shared_operands[value] for value in values))
        costs = [index.values.recompute_costs[value] for value in (*values, *sorted(passing))]
        ids = ({int(index.calls.id[call]) for call in around[row]} & replays.keys() for row in rows)
        groups.append(
            Group(
                number=len(groups),
                addresses=np.array(sorted(number for kind, number in members if kind == "address"), np.int64),
                storages=storages,
                cost=sum(_cost(index, cost) for cost in costs),
                expensive=any(cost.expensive for cost in costs),
                inside=frozenset(id_ for id_ in set.intersection(*ids) if storages <= replays[id_].storages),
            )
        )
    return groups


def list_advances(index: Index) -> list[Advance]:
    """Return the calls that can run forward again for their results, in the order of the forward pass."""
    advances = [
        Advance(
            id=id_,
            start=int(index.calls.enter[its[0]]),
            storages=frozenset(int(index.values.storage[index.reruns.result_value[call]]) for call in its),
            cost=sum(_cost(index, index.reruns.advance_costs[call]) for call in its),
        )
        for id_, its in enumerate(index.reruns.advanced_by_id)
        if its
    ]
    return sorted(advances, key=lambda advance: (advance.start, advance.id))


def list_offloads(index: Index, n_groups: int) -> list[Group]:
    """Return the groups of storages that can be offloaded, numbered from `n_groups` on.

    Storages that share a slot address are in one group.
    """
    rows = np.flatnonzero(~index.slots.is_state).tolist() if index.can_offload else ()
    groups: list[Group] = []
    for members in _join_slots(index, rows).sets():
        storages = frozenset(number for kind, number in members if kind == "storage")
        groups.append(
            Group(
                number=n_groups + len(groups),
                addresses=np.array(sorted(number for kind, number in members if kind == "address"), np.int64),
                storages=storages,
                cost=float(index.storages.offload_ms[list(storages)].sum()),
                expensive=False,
                inside=frozenset(),
            )
        )
    return groups


def _cost(index: Index, cost: RecomputeCost) -> float:
    return index.compute_weighted_ms(cost) + cost.flops * MS_PER_FLOP


def _join_slots(index: Index, rows: Iterable[int]) -> _DisjointSets:
    """Return the addresses and storages of the slots in `rows` as disjoint sets; each slot joins its address and
    storage.
    """
    joined = _DisjointSets()
    for row in rows:
        joined.join(("address", int(index.slots.address[row])), ("storage", int(index.slots.storage[row])))
    return joined


class _DisjointSets:
    """Disjoint sets, in the order in which their first members were added."""

    def __init__(self) -> None:
        self._leader: dict[_Node, _Node] = {}

    def join(self, one: _Node, other: _Node) -> None:
        self._leader[self._find(other)] = self._find(one)

    def _find(self, node: _Node) -> _Node:
        while (leader := self._leader.setdefault(node, node)) != node:
            node = leader
        return node

    def sets(self) -> list[list[_Node]]:
        sets: dict[_Node, list[_Node]] = {}
        for node in self._leader:
            sets.setdefault(self._find(node), []).append(node)
        return list(sets.values())
