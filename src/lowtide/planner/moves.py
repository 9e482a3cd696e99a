"""What a solver can decide: the smallest sets of decisions that free memory, and the most that each can be worth.

A storage is freed only when every value in it is dropped, and an address stands for the slots of every call of the
model in the step. So remakes come in groups: storages that share an address go together. A replay is one call id;
remakes inside it overlap with it, because what it brings back needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lowtide.planner.fates import Choice
from lowtide.planner.indexed import Index, Ints
from lowtide.planner.predict import Simulator, Sweep

Floats = npt.NDArray[np.float64]
MS_PER_FLOP = 1e-15
"""FLOPs decide between what takes the same time, and where no time was measured."""
_Node = tuple[str, int]
_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Storages that are dropped together, by remaking everything in them."""

    number: int
    addresses: Ints
    storages: frozenset[int]
    cost: float
    expensive: bool
    inside: frozenset[int]
    """Ids of the calls whose replay would bring all of it back."""


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """One module call, in every call of the model."""

    id: int
    start: int
    """First position of its forward."""
    storages: frozenset[int]
    """What it can bring back."""
    cost: float
    around: frozenset[int]
    """Ids of the replayable calls around it."""
    within: frozenset[int]
    """Ids of the replayable calls inside it."""


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Decisions to take, and others to take back."""

    remake: tuple[Group, ...] = ()
    keep: tuple[Group, ...] = ()
    replay: tuple[Replay, ...] = ()
    unreplay: tuple[Replay, ...] = ()

    def after(self, choice: Choice) -> Choice:
        """`choice`, changed by this move."""
        more = choice.copy()
        for group in self.keep:
            more.remake[group.addresses] = False
        for group in self.remake:
            more.remake[group.addresses] = True
        more.replay[[replay.id for replay in self.unreplay]] = False
        more.replay[[replay.id for replay in self.replay]] = True
        return more


class Moves:
    """The groups and replays of a profile, and the moves made of them."""

    def __init__(self, simulator: Simulator) -> None:
        index = simulator.index
        self.simulator = simulator
        self.replays = _replays(index)
        self.groups = _groups(index, self.replays)
        self.moves = [
            *(Move(remake=(group,)) for group in self.groups),
            *(self._replayed(replay, cheap=True) for replay in self.replays.values()),
            *(self._replayed(replay, cheap=False) for replay in self.replays.values()),
        ]
        """Each group remade; each call replayed with what is cheap in it remade; each replayed with nothing remade."""

        self.read = np.full(len(index.born), index.end, np.int64)
        """For each storage the first position at which backward reads what is in it."""
        stored = index.value_storage >= 0
        np.minimum.at(self.read, index.value_storage[stored], index.read[stored])
        drops = ([*(g.storages for g in m.remake), *(r.storages for r in m.replay)] for m in self.moves)
        self._relieves = _pairs(drops, lambda storages: storages)
        self._remakes = _pairs((m.remake for m in self.moves), lambda group: (group.number,))
        self._keeps = _pairs((m.keep for m in self.moves), lambda group: (group.number,))
        self._unreplays = _pairs((m.unreplay for m in self.moves), lambda replay: (replay.id,))
        self._clashes = _pairs((m.replay for m in self.moves), lambda replay: (replay.id, *replay.around))
        self._replay_cost = np.array([sum(r.cost for r in move.replay) for move in self.moves], np.float64)
        self._group_cost = np.array([group.cost for group in self.groups], np.float64)
        self._group_address = np.array([group.addresses[0] for group in self.groups], np.int64)
        self._id_cost = np.zeros(len(index.ids))
        for replay in self.replays.values():
            self._id_cost[replay.id] = replay.cost

    def _replayed(self, replay: Replay, *, cheap: bool) -> Move:
        inside = tuple(group for group in self.groups if replay.id in group.inside)
        return Move(
            remake=tuple(group for group in inside if cheap and not group.expensive),
            keep=tuple(group for group in inside if group.expensive or not cheap),
            replay=(replay,),
            unreplay=tuple(self.replays[id_] for id_ in sorted(replay.within)),
        )

    def cost(self, sweep: Sweep) -> float:
        """What a solver minimises: the extra time."""
        return sweep.extra_ms + sweep.extra_flops * MS_PER_FLOP

    def worth(self, choice: Choice, sweep: Sweep, excess: Ints) -> Floats:
        """For each move at most how much of `excess` (bytes over the budget, by position) it takes away per cost.

        0 where nothing is left to gain. What one move takes back of another's is not in it, so a solver simulates a
        move before it believes in it.
        """
        index, n = self.simulator.index, len(self.moves)
        over = np.concatenate(([0], np.cumsum(excess > 0)))
        area = np.concatenate(([0], np.cumsum(excess)))
        start, end = index.dies, np.maximum(self.read, index.dies)
        relief = np.minimum(index.storage_bytes * (over[end] - over[start]), area[end] - area[start])
        relief[sweep.ends <= index.dies] = 0
        move, storage = self._relieves
        gain = np.bincount(move, relief[storage], n)

        made = choice.remake[self._group_address]
        cost = self._replay_cost.copy()
        move, group = self._remakes
        cost += np.bincount(move, self._group_cost[group] * ~made[group], n)
        move, group = self._keeps
        cost -= np.bincount(move, self._group_cost[group] * made[group], n)
        move, id_ = self._unreplays
        cost -= np.bincount(move, self._id_cost[id_] * choice.replay[id_], n)
        move, id_ = self._clashes
        impossible = np.bincount(move, choice.replay[id_], n) > 0
        found: Floats = np.where(impossible, 0.0, gain / np.maximum(cost, 1e-9))
        return found

    def detours(self, choice: Choice, sweep: Sweep) -> list[Move]:
        """What can lower a peak that no more dropping lowers: keep what is remade there, replay inner calls instead."""
        at = int(sweep.usage.argmax())
        there = {copy.node for copy in sweep.copies if copy.start <= at < copy.end}
        index, n_values = self.simulator.index, self.simulator.index.n_values
        storages = {int(index.value_storage[node]) for node in there if node < n_values}
        ids = {index.id_index[self.simulator.profile.calls[node - n_values].id] for node in there if node >= n_values}
        found = [Move(keep=(group,)) for group in self.groups if group.storages & storages]
        for id_ in sorted(ids):
            replay = self.replays[id_]
            inner = tuple(self.replays[i] for i in sorted(replay.within) if not self.replays[i].around & replay.within)
            found += [Move(unreplay=(replay,)), *([Move(replay=inner, unreplay=(replay,))] if inner else [])]
        return found

    def undoing(self, choice: Choice) -> list[Move]:
        """Each group and each replay of `choice` taken back: the costly ones first, of equal ones the late ones."""
        index = self.simulator.index
        parts: list[tuple[float, int, Move]] = [
            (-group.cost, -min(int(index.born[s]) for s in group.storages), Move(keep=(group,)))
            for group in self.groups
            if choice.remake[group.addresses].any()
        ]
        parts += [
            (-replay.cost, -replay.start, Move(unreplay=(replay,)))
            for replay in self.replays.values()
            if choice.replay[replay.id]
        ]
        return [move for _, _, move in sorted(parts, key=lambda part: part[:2])]

    def remade(self, *, expensive: bool) -> Choice:
        """Every cheap group remade, and if `expensive` all others too."""
        groups = tuple(group for group in self.groups if expensive or not group.expensive)
        return Move(remake=groups).after(self.simulator.nothing())

    def levels(self) -> list[tuple[Replay, ...]]:
        """Sets of calls that can be replayed together, the outermost first; each in the order of the forward pass."""
        replays = sorted(self.replays.values(), key=lambda replay: (replay.start, replay.id))
        depth = max((len(replay.around) for replay in replays), default=-1)
        return [
            tuple(r for r in replays if len(r.around) == at or (len(r.around) < at and not r.within))
            for at in range(depth + 1)
        ]


def _replays(index: Index) -> dict[int, Replay]:
    """The calls whose replay brings something back, by id."""
    profile = index.profile
    brings_back = {
        id_: frozenset(int(index.value_storage[value]) for call in calls for value in index.caught[call])
        for id_, calls in enumerate(index.calls_of_id)
    }
    around: dict[int, set[int]] = {id_: set() for id_, storages in brings_back.items() if storages}
    for id_, outer in around.items():
        enclosing = {index.id_index[profile.calls[o].id] for call in index.calls_of_id[id_] for o in index.around[call]}
        outer |= (enclosing & around.keys()) - {id_}
    return {
        id_: Replay(
            id=id_,
            start=int(index.enter[index.calls_of_id[id_][0]]),
            storages=brings_back[id_],
            cost=sum(profile.calls[c].cost_ms + profile.calls[c].flops * MS_PER_FLOP for c in index.calls_of_id[id_]),
            around=frozenset(outer),
            within=frozenset(inner for inner, its in around.items() if id_ in its),
        )
        for id_, outer in around.items()
    }


def _groups(index: Index, replays: dict[int, Replay]) -> list[Group]:
    """What can be remade, joined where it shares an address or a storage."""
    joined = _Joined()
    for row in np.flatnonzero(index.slot_remakeable).tolist():
        joined.join(("address", int(index.slot_address[row])), ("storage", int(index.slot_storage[row])))

    around = [set(index.around[call]) for call in index.slot_call.tolist()]
    for row in np.flatnonzero(index.slot_is_input).tolist():
        around[row].discard(int(index.slot_call[row]))
    rows_of: dict[int, list[int]] = {}
    for row, storage in enumerate(index.slot_storage.tolist()):
        rows_of.setdefault(storage, []).append(row)

    found: list[Group] = []
    for members in joined.sets():
        storages = frozenset(number for kind, number in members if kind == "storage")
        rows = [row for storage in storages for row in rows_of[storage]]
        values = sorted({value for value in index.slot_value[rows].tolist() if index.remakeable[value]})
        passing = set().union(*(index.passing[value] for value in values))
        recipes = [index.recipes[value] for value in (*values, *sorted(passing))]
        ids = ({index.id_index[index.profile.calls[call].id] for call in around[row]} & replays.keys() for row in rows)
        found.append(
            Group(
                number=len(found),
                addresses=np.array(sorted(number for kind, number in members if kind == "address"), np.int64),
                storages=storages,
                cost=sum(recipe.ms + recipe.flops * MS_PER_FLOP for recipe in recipes),
                expensive=any(recipe.expensive for recipe in recipes),
                inside=frozenset(id_ for id_ in set.intersection(*ids) if storages <= replays[id_].storages),
            )
        )
    return found


class _Joined:
    """Disjoint sets, in the order in which their first members came."""

    def __init__(self) -> None:
        self._leader: dict[_Node, _Node] = {}

    def join(self, one: _Node, other: _Node) -> None:
        self._leader[self._find(other)] = self._find(one)

    def _find(self, node: _Node) -> _Node:
        while (leader := self._leader.setdefault(node, node)) != node:
            node = leader
        return node

    def sets(self) -> list[list[_Node]]:
        found: dict[_Node, list[_Node]] = {}
        for node in self._leader:
            found.setdefault(self._find(node), []).append(node)
        return list(found.values())


def _pairs(moves: Iterable[Sequence[_Part]], numbers: Callable[[_Part], Iterable[int]]) -> tuple[Ints, Ints]:
    """Two columns: the number of a move, and one of the `numbers` of one of its parts."""
    pairs = [(move, number) for move, parts in enumerate(moves) for part in parts for number in sorted(numbers(part))]
    first, second = np.array(pairs, np.int64).reshape(-1, 2).T
    return first, second
