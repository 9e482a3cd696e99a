"""Greedy searches: take the most valuable moves, then undo those that turned out to be unnecessary.

The problem is a covering problem with one row per position: take enough bytes off every position that is over the
limit. The greedy rule takes the move with the most covered bytes for its cost, and counts at no position more bytes
than are still missing there (Dobson 1982, doi 10.1287/moor.7.4.515). By that measure a move that only shifts the peak
covers little; coverage is always simulated, never guessed. Then unnecessary decisions are undone, most costly first.
The search is repeated from other starts.

Deterministic. Not optimal: `exact.py` is better wherever its rows describe nearly all memory. Elsewhere the greedy
search finds the smallest peaks, repairs choices that are a little over the limit, and needs no solver.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from lowtide.planner.simulate.assignment import OFFLOADED, RECOMPUTED, DecisionVector
from lowtide.planner.simulate.memory_sweep import Sweep
from lowtide.planner.simulate.profile_tables import Flags
from lowtide.planner.simulate.simulator import Simulator
from lowtide.planner.solve.candidates import Replay
from lowtide.planner.solve.moves import Move, Moves
from lowtide.planner.solve.pareto_pool import ParetoPool

GOOD_ENOUGH = 0.9
"""Share of the best possible worth at which a move is taken without simulating others."""
MOST_TRIED = 6
"""Largest number of moves that are simulated for one choice, unless none of them helps."""
MANY = 600
"""Number of moves beyond which the smallest peak is searched for from one start only."""


MANY_DETOURS, SOME = 64, 16
"""Of more than MANY_DETOURS detours, only about SOME are simulated in each of several rounds."""


class GreedySearch:
    """Greedy searches for decisions about one profiled step. Limits are peaks in bytes beyond `static`."""

    def __init__(self, moves: Moves) -> None:
        self.simulator: Simulator = moves.simulator
        self.moves = moves
        self.pool = ParetoPool()
        """The best of all choices simulated, including intermediate ones."""
        self._known: set[bytes] = set()
        """Keys of the simulated choices."""

    def sweep(self, choice: DecisionVector) -> Sweep:
        sweep = self.simulator.sweep(choice)
        if choice.key not in self._known:
            self._known.add(choice.key)
            self.pool.add(choice, sweep)
        return sweep

    def cost(self, choice: DecisionVector) -> float:
        return self.moves.cost(self.sweep(choice))

    def fits(self, choice: DecisionVector, limit: int) -> bool:
        return self.sweep(choice).peak <= limit

    def find_fitting_choices(self, limit: int, *starts: DecisionVector) -> Iterator[DecisionVector]:
        """Yield choices whose peak is at most `limit`: first the results of `reduce` for each of `starts`.

        Then, for each nesting level of module calls, the choice with all cheap recomputes and just enough replays of
        the level's first calls.
        """
        cheap = self.moves.recompute_all(expensive=False)
        for start in starts:
            if self.fits(choice := self.reduce(start, limit), limit):
                yield choice
        for level in self.moves.list_replay_levels():
            # Early calls first, as they hold their tensors longest. The peak falls with each, except for small bumps.
            prefixes = range(1, len(level) + 1)
            count = bisect.bisect_left(prefixes, True, key=lambda n: self.fits(_with_replays(cheap, level[:n]), limit))
            if count < len(level):
                yield _with_replays(cheap, level[: count + 1])

    def reduce(self, choice: DecisionVector, limit: int) -> DecisionVector:
        """Apply moves to `choice` until its peak is at most `limit` or no move helps; return the result."""
        useless: set[Move] = set()
        sweep = self.sweep(choice)
        while sweep.peak > limit:
            worth = self.moves.worths.under(choice, sweep, np.maximum(sweep.usage - limit, 0))
            promising = [
                (float(worth[n]), self.moves.moves[n]) for n in np.argsort(-worth, kind="stable") if worth[n] > 0
            ]
            state = (choice, sweep, limit)
            move = (
                self._best(*state, [pair for pair in promising if pair[1] not in useless], useless)
                or self._best(*state, [pair for pair in promising if pair[1] in useless], set())
                or self._find_best_detour(*state, self.moves.detours(choice, sweep))
            )
            if move is None:
                break
            choice = move.apply_to(choice)
            sweep = self.sweep(choice)
        return choice

    def _best(
        self, choice: DecisionVector, sweep: Sweep, limit: int, moves: list[tuple[float, Move]], useless: set[Move]
    ) -> Move | None:
        """Return a move whose worth is nearly the best, or None if no move removes bytes over `limit`.

        Worth is the bytes removed per cost. `moves` are given with upper bounds of their worth, best first. Moves that
        turn out to remove nothing are added to `useless`.
        """
        missing, cost = _sum_excess_bytes(sweep, limit), self.moves.cost(sweep)
        best, most = None, 0.0
        for tried, (bound, move) in enumerate(moves):
            if best is not None and (most >= GOOD_ENOUGH * bound or (tried >= MOST_TRIED and bound < math.inf)):
                break
            after = self.sweep(move.apply_to(choice))
            covered = missing - _sum_excess_bytes(after, limit)
            if covered <= 0:
                useless.add(move)
                continue
            worth = covered / max(self.moves.cost(after) - cost, 1e-9)
            if worth > most:
                best, most = move, worth
        return best

    def _find_best_detour(self, choice: DecisionVector, sweep: Sweep, limit: int, moves: list[Move]) -> Move | None:
        """Return one of the best of `moves`, or None if `_best` accepts none of those tried.

        Of many moves, only a sample is simulated, then ever closer neighbours of the best one so far.

        In a long chain, keeping a value again lowers the peak most if the value is near the middle.
        """

        def best(numbers: Iterable[int]) -> Move | None:
            return self._best(choice, sweep, limit, [(math.inf, moves[n]) for n in numbers], set())

        stride = len(moves) // SOME if len(moves) > MANY_DETOURS else 1
        best_move = best(range(stride // 2, len(moves), stride))
        if best_move is None and stride > 1:
            return best(range(len(moves)))
        while best_move is not None and stride > 1:
            at, reach, stride = moves.index(best_move), stride, max(1, 2 * stride // SOME)
            best_move = best(sorted({at, *range(max(0, at - reach), min(len(moves), at + reach + 1), stride)}))
        return best_move

    def prune(self, choice: DecisionVector, limit: int) -> DecisionVector:
        """Return `choice` without decisions that are not needed for a peak of at most `limit`.

        The costliest decisions are undone first, and among decisions of equal cost those about later calls. Several
        decisions are undone at once as long as the choice still fits, which takes fewer simulations.
        """
        sweep = self.sweep(choice)
        full = self._flag_storages_without_room(sweep, limit)
        undoing, size = self.moves.list_undo_moves(choice), 1
        while undoing:
            part = [move for move in undoing[:size] if not self._is_useless(move, choice, full)]
            less = choice
            for move in part:
                less = move.apply_to(less)
            after = self.sweep(less)
            if after.peak <= limit and self.moves.cost(after) <= self.moves.cost(sweep):
                if part:
                    choice, sweep = less, after
                    full = self._flag_storages_without_room(sweep, limit)
                undoing, size = undoing[size:], 2 * size
            elif size > 1:
                size = max(1, size // 4)
            else:
                undoing = undoing[1:]
        return choice

    @staticmethod
    def _is_useless(move: Move, choice: DecisionVector, full: Flags) -> bool:
        """Return True if `move` keeps a storage that has no room: then the peak is surely above the limit, and no
        simulation is needed. `full` flags the storages without room (`_flag_storages_without_room`).
        """
        kept = [group for group in move.keep if not choice.replay[list(group.inside)].any()]
        return any(full[list(piece.storages)].any() for piece in (*kept, *move.unoffload)) or any(
            full[list(advance.storages)].any() for advance in move.unadvance
        )

    def _flag_storages_without_room(self, sweep: Sweep, limit: int) -> Flags:
        """Flag the storages that would raise the peak above `limit` if they were kept from forward until their
        recompute. Runs no simulation.
        """
        index = self.simulator.index
        node, start = sweep.copies.node, sweep.copies.start
        stored = node < index.n_values
        stored[stored] = index.values.storage[node[stored]] >= 0
        back = np.full(len(index.storages.freed_at), index.end, np.int64)
        np.minimum.at(back, index.values.storage[node[stored]], start[stored])
        back[back == index.end] = 0
        # Maxima between pairs of positions; maxima for pairs in descending order are not used.
        spans = np.column_stack((index.storages.freed_at, back)).ravel()
        most = np.maximum.reduceat(np.append(sweep.usage, 0), spans)[::2] if len(spans) else spans
        full: Flags = index.storages.bytes > limit - np.where(index.storages.freed_at < back, most, 0)
        return full

    def drop_ineffective(self, choice: DecisionVector) -> DecisionVector:
        """Return `choice` without recomputes and offloads that have no effect on the step."""
        index, sweep = self.simulator.index, self.sweep(choice)
        calls = [call for id_ in np.flatnonzero(choice.replay) for call in index.reruns.replayed_by_id[id_]]
        calls += [call for id_ in np.flatnonzero(choice.advance) for call in index.reruns.advanced_by_id[id_]]
        effective = sweep.state[index.slots.value] == RECOMPUTED
        effective &= ~index.slots.is_input | np.isin(index.slots.call, calls)
        needed = np.zeros_like(choice.recompute)
        needed[index.slots.address[effective]] = True
        leaving = np.zeros_like(choice.offload)
        leaving[index.slots.address[sweep.state[index.slots.value] == OFFLOADED]] = True
        tidied = DecisionVector(choice.recompute & needed, choice.replay, choice.advance, choice.offload & leaving)
        same = self.sweep(tidied)
        return tidied if (same.peak, same.extra_ms) == (sweep.peak, sweep.extra_ms) else choice

    def search_smallest(self) -> list[DecisionVector]:
        """Return one or two choices with the smallest peak that is found by greedy searches for ever lower limits.

        Searches start from the choice that keeps everything, and from choices with many decisions.
        """
        moves = self.moves
        starts = [
            self.simulator.keep_everything(),
            moves.recompute_all(expensive=False),
            moves.recompute_all(expensive=True),
        ]
        starts += [
            move.apply_to(start)
            for start in starts
            for move in (*(Move(replay=level) for level in moves.list_replay_levels()), *moves.list_nested_replays())
        ]
        starts += sorted(moves.list_sparse_recomputes(), key=lambda choice: self.simulator.sweep(choice).peak)[:1]
        best, peak = min(((start, self.sweep(start).peak) for start in starts), key=lambda pair: pair[1])
        other, step = self.simulator.keep_everything(), (peak - self._floor()) // 2
        while step > peak // 200:
            choice = self.reduce(best, peak - step)
            if len(moves.moves) <= MANY:
                other = self.reduce(other, peak - step)
                choice = min(choice, other, key=lambda choice: self.sweep(choice).peak)
            if self.fits(choice, peak - step):
                best, peak = choice, self.sweep(choice).peak
            else:
                step //= 2
        best = min(self.pool.candidates, key=lambda candidate: (candidate.peak, candidate.cost)).choice
        return [best, *([other] if self.fits(other, self.sweep(best).peak) else [])]

    def _floor(self) -> int:
        """Return a lower bound on the peak of any choice: the peak of a step that keeps and recomputes nothing."""
        index = self.simulator.index
        changes = np.zeros(index.end + 1, np.int64)
        np.add.at(changes, index.storages.allocated_at, index.storages.bytes)
        np.subtract.at(changes, index.storages.freed_at, index.storages.bytes)
        return int((index.base + changes.cumsum()[:-1]).max())


def _sum_excess_bytes(sweep: Sweep, limit: int) -> int:
    """Return the bytes over the limit, added up over all positions."""
    return int(np.maximum(sweep.usage - limit, 0).sum())


def _with_replays(choice: DecisionVector, replays: Sequence[Replay]) -> DecisionVector:
    return Move(replay=tuple(replays)).apply_to(choice)
