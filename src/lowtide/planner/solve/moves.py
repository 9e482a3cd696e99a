"""Moves of a solver: decisions to take or to undo, and an upper bound on the benefit of each move."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lowtide.planner.simulate.assignment import DecisionVector
from lowtide.planner.simulate.memory_sweep import Sweep
from lowtide.planner.simulate.profile_index import Index
from lowtide.planner.simulate.profile_tables import Ints
from lowtide.planner.simulate.simulator import Simulator
from lowtide.planner.solve.candidates import (
    MS_PER_FLOP,
    Advance,
    Group,
    Replay,
    groups_of,
    list_advances,
    list_offloads,
    list_replays,
)

Floats = npt.NDArray[np.float64]
_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """A change of decisions: decisions to take, and decisions to undo."""

    recompute: tuple[Group, ...] = ()
    keep: tuple[Group, ...] = ()
    replay: tuple[Replay, ...] = ()
    unreplay: tuple[Replay, ...] = ()
    advance: tuple[Advance, ...] = ()
    unadvance: tuple[Advance, ...] = ()
    offload: tuple[Group, ...] = ()
    unoffload: tuple[Group, ...] = ()

    def apply_to(self, choice: DecisionVector) -> DecisionVector:
        """Return a copy of `choice` in which this move's decisions are taken and undone."""
        more = choice.copy()
        for group in self.keep:
            more.recompute[group.addresses] = False
        for group in self.recompute:
            more.recompute[group.addresses] = True
        for group in self.unoffload:
            more.offload[group.addresses] = False
        for group in self.offload:
            more.offload[group.addresses] = True
        more.replay[[replay.id for replay in self.unreplay]] = False
        more.replay[[replay.id for replay in self.replay]] = True
        more.advance[[advance.id for advance in self.unadvance]] = False
        more.advance[[advance.id for advance in self.advance]] = True
        return more


class MoveWorths:
    """Upper bounds on the worth of all moves under a choice: bytes over the budget that a move removes, per cost."""

    def __init__(self, index: Index, moves: list[Move], groups: list[Group], replays: dict[int, Replay]) -> None:
        self._index, self._n = index, len(moves)
        self._read = np.full(len(index.storages.allocated_at), index.end, np.int64)
        """First position at which backward reads each storage."""
        stored = index.values.storage >= 0
        np.minimum.at(self._read, index.values.storage[stored], index.values.read_at[stored])
        drops = [
            [piece.storages for piece in (*m.recompute, *m.offload)]
            + [replay.storages for replay in m.replay]
            + [advance.storages for advance in m.advance]
            for m in moves
        ]
        self._relieves = _pairs(drops, lambda storages: storages)
        self._recomputes = _pairs((m.recompute for m in moves), lambda group: (group.number,))
        self._keeps = _pairs((m.keep for m in moves), lambda group: (group.number,))
        self._unreplays = _pairs((m.unreplay for m in moves), lambda replay: (replay.id,))
        self._clashes = _pairs((m.replay for m in moves), lambda replay: (replay.id,))
        self._advances = _pairs((m.advance for m in moves), lambda advance: (advance.id,))
        around = [m.replay[0].within if m.replay and not m.unreplay else frozenset[int]() for m in moves]
        self._is_around = np.array([bool(within) for within in around], np.bool_)
        """True for moves that are tried only around replays of inner calls, because elsewhere another move has the same
        effect.
        """
        self._within = _pairs(([within] if within else [] for within in around), lambda within: within)
        costs = [
            sum(r.cost for r in m.replay) + sum(a.cost for a in m.advance) + sum(g.cost for g in m.offload)
            for m in moves
        ]
        self._call_cost = np.array(costs, np.float64)
        self._group_cost = np.array([group.cost for group in groups], np.float64)
        self._group_address = np.array([group.addresses[0] for group in groups], np.int64)
        self._id_cost = np.zeros(len(index.calls.ids))
        for replay in replays.values():
            self._id_cost[replay.id] = replay.cost

    def under(self, choice: DecisionVector, sweep: Sweep, excess: Ints) -> Floats:
        """Return, for each move, an upper bound on the removed `excess` (bytes over the budget, by position) per cost.

        The bound is 0 if a move can remove nothing. Memory of decisions that a move undoes is not counted, so a solver
        simulates a move before accepting it.
        """
        index, n = self._index, self._n
        over = np.concatenate(([0], np.cumsum(excess > 0)))
        area = np.concatenate(([0], np.cumsum(excess)))
        start, end = index.storages.freed_at, np.maximum(self._read, index.storages.freed_at)
        relief = np.minimum(index.storages.bytes * (over[end] - over[start]), area[end] - area[start])
        relief[sweep.ends <= index.storages.freed_at] = 0
        move, storage = self._relieves
        gain = np.bincount(move, relief[storage], n)

        is_recomputed = choice.recompute[self._group_address]
        cost = self._call_cost.copy()
        move, group = self._recomputes
        cost += np.bincount(move, self._group_cost[group] * ~is_recomputed[group], n)
        move, group = self._keeps
        cost -= np.bincount(move, self._group_cost[group] * is_recomputed[group], n)
        move, id_ = self._unreplays
        cost -= np.bincount(move, self._id_cost[id_] * choice.replay[id_], n)
        move, id_ = self._clashes
        done = np.bincount(move, choice.replay[id_], n)
        move, id_ = self._advances
        impossible = done + np.bincount(move, choice.advance[id_], n) > 0
        move, id_ = self._within
        impossible |= self._is_around & (np.bincount(move, choice.replay[id_], n) == 0)
        worth: Floats = np.where(impossible, 0.0, gain / np.maximum(cost, 1e-9))
        return worth


class Moves:
    """The groups and replays of a profile, and the moves that decide on them."""

    def __init__(self, simulator: Simulator) -> None:
        index = simulator.index
        self.simulator = simulator
        self.replays = list_replays(index)
        self.groups = groups_of(index, self.replays)
        self.advances = list_advances(index)
        self.offloads = list_offloads(index, len(self.groups))
        self.moves = [
            *(Move(recompute=(group,)) for group in self.groups),
            *(self._make_replay_move(replay, cheap=True) for replay in self.replays.values()),
            *(self._make_replay_move(replay, cheap=False) for replay in self.replays.values()),
            *(Move(replay=(replay,)) for replay in self.replays.values() if replay.within),
            *(Move(advance=(advance,)) for advance in self.advances),
            *(Move(offload=(group,)) for group in self.offloads),
        ]
        """Moves that recompute one group, replay one call with its cheap contents recomputed or with nothing in it
        recomputed, replay around inner replays, advance one call, or offload one group.
        """
        self.worths = MoveWorths(index, self.moves, self.groups, self.replays)

    def _make_replay_move(self, replay: Replay, *, cheap: bool) -> Move:
        """Return the move that replays a call, and no longer recomputes the groups that the replay restores.

        With `cheap`, groups that are cheap to recompute are still recomputed.
        """
        inside = tuple(group for group in self.groups if replay.id in group.inside)
        return Move(
            recompute=tuple(group for group in inside if cheap and not group.expensive),
            keep=tuple(group for group in inside if group.expensive or not cheap),
            replay=(replay,),
            unreplay=tuple(self.replays[id_] for id_ in sorted(replay.within)),
        )

    def cost(self, sweep: Sweep) -> float:
        """Return the extra milliseconds of a sweep, plus a tiny weight for FLOPs that breaks ties."""
        return sweep.extra_ms + sweep.extra_flops * MS_PER_FLOP

    def detours(self, choice: DecisionVector, sweep: Sweep) -> list[Move]:
        """Return moves for a peak that dropping more storages does not lower.

        Such moves keep values that are recomputed at the peak, or replay inner calls.
        """
        at = int(sweep.usage.argmax())
        nodes = set(sweep.copies.at(at).node.tolist())
        index, n_values = self.simulator.index, self.simulator.index.n_values
        storages = {int(index.values.storage[node]) for node in nodes if node < n_values}
        ids = {int(index.calls.id[node - n_values]) for node in nodes if node >= n_values}
        detours = [Move(keep=(group,)) for group in self.groups if group.storages & storages]
        detours += [Move(unoffload=(group,)) for group in self.offloads if group.storages & storages]
        detours += [Move(unadvance=(a,)) for a in self.advances if a.storages & storages and choice.advance[a.id]]
        for id_ in sorted(ids):
            replay = self.replays[id_]
            inner = tuple(self.replays[i] for i in sorted(replay.within) if not self.replays[i].around & replay.within)
            detours += [
                Move(unreplay=(replay,)),
                *([Move(replay=inner, unreplay=(replay,)), Move(replay=inner)] if inner else []),
            ]
        return detours

    def list_undo_moves(self, choice: DecisionVector) -> list[Move]:
        """Return one move for each group or call that `choice` does not keep, to undo that decision.

        The costliest decisions are first, and among decisions of equal cost those about later groups and calls.
        """
        index = self.simulator.index
        parts: list[tuple[float, int, Move]] = [
            (-group.cost, -min(int(index.storages.allocated_at[s]) for s in group.storages), Move(keep=(group,)))
            for group in self.groups
            if choice.recompute[group.addresses].any()
        ]
        parts += [
            (-replay.cost, -replay.start, Move(unreplay=(replay,)))
            for replay in self.replays.values()
            if choice.replay[replay.id]
        ]
        parts += [
            (-group.cost, -min(int(index.storages.allocated_at[s]) for s in group.storages), Move(unoffload=(group,)))
            for group in self.offloads
            if choice.offload[group.addresses].any()
        ]
        parts += [(-a.cost, -a.start, Move(unadvance=(a,))) for a in self.advances if choice.advance[a.id]]
        return [move for _, _, move in sorted(parts, key=lambda part: part[:2])]

    def recompute_all(self, *, expensive: bool) -> DecisionVector:
        """Return the choice that recomputes every cheap group, and with `expensive` also every expensive group."""
        groups = tuple(group for group in self.groups if expensive or not group.expensive)
        return Move(recompute=groups).apply_to(self.simulator.keep_everything())

    def list_sparse_recomputes(self) -> list[DecisionVector]:
        """Return choices that recompute all but every n-th group, in forward order: small peaks of long chains."""
        groups = sorted(
            self.groups, key=lambda group: min(self.simulator.index.storages.allocated_at[list(group.storages)])
        )
        everything = self.recompute_all(expensive=True)
        return [Move(keep=tuple(groups[every - 1 :: every])).apply_to(everything) for every in _strides(len(groups))]

    def list_replay_levels(self) -> list[tuple[Replay, ...]]:
        """Return the calls that can be replayed, by nesting level, outermost first; each level in forward order."""
        replays = sorted(self.replays.values(), key=lambda replay: (replay.start, replay.id))
        depth = max((len(replay.around) for replay in replays), default=-1)
        return [
            tuple(r for r in replays if len(r.around) == at or (len(r.around) < at and not r.within))
            for at in range(depth + 1)
        ]

    def list_nested_replays(self) -> list[Move]:
        """Return moves to schedules with small peaks, such as a replay of all calls of two successive nesting levels.

        Further moves replay one level and keep only every n-th result of the calls that can be advanced, or offload all
        storages that can be offloaded, with or without replays of one level.
        """
        levels = self.list_replay_levels()
        schedules = [Move(replay=(*outer, *inner)) for outer, inner in pairwise(levels)]
        for every in _strides(len(self.advances)):
            advance = tuple(a for number, a in enumerate(self.advances, 1) if number % every)
            schedules += [Move(replay=level, advance=advance) for level in levels]
        if self.offloads:
            schedules += [Move(offload=tuple(self.offloads))]
            schedules += [Move(replay=level, offload=tuple(self.offloads)) for level in levels]
        return schedules


def _strides(n: int) -> list[int]:
    """Return the strides to try when every stride-th of `n` results in a chain is kept; the last stride keeps none."""
    strides, stride = [], 2
    while stride <= n:
        strides.append(stride)
        stride += max(1, stride // 3)
    return [*strides, n + 1] if n else []


def _pairs(moves: Iterable[Sequence[_Part]], numbers: Callable[[_Part], Iterable[int]]) -> tuple[Ints, Ints]:
    """Return two columns: the index of a move, and a number that `numbers` returns for one of the move's parts.

    `moves` has the parts of each move. Every number of every part is in the columns.
    """
    pairs = [(move, number) for move, parts in enumerate(moves) for part in parts for number in sorted(numbers(part))]
    first, second = np.array(pairs, np.int64).reshape(-1, 2).T
    return first, second
