"""The step under a choice, position by position: what is there when, and what it costs.

A profile holds one traced step on its axis of positions, so any plan's memory is a sum over intervals:

    usage[i] = base[i] + storages alive at i + what was made again and is still waited for at i + scratch memory at i

What becomes of each value is told by `assignment.py`, and when it is there by this file. Backward asks for a value
where it reads a slot of it, a recompute asks for its operands, a replay for its inputs. Values and calls are the nodes
of one graph, visited dependents first; each tells those that it asks:

    made     the first position at which anybody asks: it is made then, once
    wanted   until the last reader has let go of it and all that asked for it have been made
    held     until the last reader of it, and of all that is made from it, has let go: it could be asked for again
    later    bytes that are made from it, one from the other, at that same position: not there yet when it is made
    kept     a storage is there from `allocated_at` to `freed_at`, and longer while the kept values in it are held, or a
             call to be run again that was given one is still running

What is there in a part of a position counts in all of it, so the sum is an upper bound; but for what runs:

    usage[i] = results[i] + max(base[i], base at the beginning of i + memory of what runs at i)

Recomputes and replays run when backward reads a value, which is what a position begins with: before anything is
allocated in it. They run one after the other, each before what is made from it: of their scratch memory only the
largest counts, less what is made later, on top of what waits for the others. What a recompute passes through is made on
the way, one after the other (`recompute_cost.py`); what of that is there when an operand has still to be made waits for
it. A replay allocates again what its whole forward did (`call_allocations.py`); the engine stops it early and may need
less. So does an advance, which leaves only its result.

What is offloaded is there until the next such tensor has left, or forward has ended; and again from the moment at which
the one that left after it is asked for, while that is waited for. Copies are counted in full, both ways, although they
run beside other work: an upper bound.

Cost: array operations over slots and positions and a loop over what is not kept, about 6 ms for 1000 slots; 1 ms where
little has changed since another sweep (`recompute_segments.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import NamedTuple

import numpy as np

from lowtide.planner.simulate.assignment import KEPT, Assignment, DecisionVector, assign
from lowtide.planner.simulate.profile_index import Index, Ints
from lowtide.planner.simulate.recompute_segments import Segments

REMEMBERED = 2**20
"""Positions and values of sweeps that are remembered: some 20 MB."""


class Copies(NamedTuple):
    """Memory that recomputes, replays and advances allocate, as columns: there in positions [start, end)."""

    start: Ints
    end: Ints
    bytes: Ints
    node: Ints
    """The value that is recomputed or advanced to, or `n_values` plus the call that is replayed."""

    def at(self, position: int) -> Copies:
        """Those that are there at `position`."""
        there = (self.start <= position) & (position < self.end)
        return Copies(*(column[there] for column in self))


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """The step under a choice, position by position."""

    usage: Ints
    """Bytes beyond `static`, for each position."""
    peak: int
    """The most of `usage`."""
    extra_ms: float
    extra_flops: int
    state: Ints
    """For each node KEPT, PASSED, RECOMPUTED, REPLAYED, ADVANCED or OFFLOADED."""
    ends: Ints
    """For each storage the first position at which it is gone."""
    copies: Copies
    """What is made again, and one for each position where something runs: what it needs beyond what is there later."""
    host_bytes: int
    """Memory of the host that offloaded tensors are in."""


class Sweeper:
    """Sweeps over the positions of one step."""

    def __init__(self, index: Index, backward: int) -> None:
        self.index = index
        self._backward = backward
        """The position at which forward has ended."""
        self._recent: dict[bytes, Sweep] = {}
        self._most_recent = max(REMEMBERED // (index.end + index.n_values + 1), 16)
        births = np.zeros(index.end + 1, np.int64)
        np.add.at(births, index.allocated_at, index.storage_bytes)
        self._births = births
        before = np.concatenate((index.base[:1], index.base[:-1]))
        self._rise = np.maximum(index.base - before, 0)
        """How far `base` rises in each position, at least: at the beginning it is no higher than in the one before."""
        self._stretches = Segments(index)

    def sweep(self, choice: DecisionVector) -> Sweep:
        """The step under `choice`. Searches come back to the same choices: the last ones are remembered."""
        key = choice.key
        found = self._recent.pop(key, None) or self._swept(choice)
        self._recent[key] = found
        if len(self._recent) > self._most_recent:
            del self._recent[next(iter(self._recent))]
        return found

    def _swept(self, choice: DecisionVector) -> Sweep:
        index, fates = self.index, assign(self.index, choice)
        visits = self._stretches.visits(fates)

        rows = np.flatnonzero(fates.state[index.slot_value] == KEPT)
        ends = index.freed_at.copy()
        np.maximum.at(ends, index.slot_storage[rows], index.slot_release[rows])
        rows = fates.given[fates.state[index.slot_value[fates.given]] == KEPT]
        np.maximum.at(ends, index.slot_storage[rows], index.exit[index.slot_call[rows]])
        values, until = _joined((visit.holds for visit in visits), 2)
        np.maximum.at(ends, index.value_storage[values], until)
        leave, returning = self._away(fates, _joined((visit.returns for visit in visits), 4))
        ends[fates.trips] = np.maximum(ends[fates.trips], leave)
        running = self._running(
            _joined((visit.runs for visit in visits), 3), _joined((visit.waits for visit in visits), 2)
        )
        copies = Copies(*_joined((*(visit.copies for visit in visits), running, returning), 4))
        usage = self._usage(ends, copies)
        return Sweep(
            usage=usage,
            peak=int(usage.max()),
            # exact, so that equal work in another order takes the same time
            extra_ms=math.fsum(chain(index.offload_ms[fates.trips].tolist(), *(visit.times for visit in visits))),
            extra_flops=sum(visit.flops for visit in visits),
            state=fates.state,
            ends=ends,
            copies=copies,
            host_bytes=int(index.storage_bytes[fates.trips].sum()),
        )

    def _running(self, runs: Ints, waits: Ints) -> Ints:
        """Copies for what runs: in each position for the node that needs most, beyond what is there later."""
        runs = runs[:, np.argsort(-runs[2], kind="stable")]
        _, first = np.unique(runs[0], return_index=True)
        when, node, need = runs[:, first]
        waiting = np.zeros(self.index.end, np.int64)
        np.add.at(waiting, *waits)
        return np.array((when, when + 1, np.maximum(need + waiting[when] - self._rise[when], 0), node))

    def _away(self, fates: Assignment, returns: Ints) -> tuple[Ints, Ints]:
        """When each of the offloaded storages leaves, and copies for when they are back."""
        index, copies = self.index, []
        back: dict[int, tuple[int, int, int]] = {}
        for storage, when, until, value in returns.T.tolist():
            start, end, first = back.get(storage, (when, until, value))
            back[storage] = min(start, when), max(end, until), first
        for storage, following in zip_longest(fates.trips, fates.trips[1:]):
            start, end, value = back[storage]
            start = min(start, back[following][0]) if following is not None else start
            if start < end:
                copies.append((start, end, index.bytes_of[storage], value))
        leave = [*fates.out[1:], self._backward][: len(fates.trips)]
        return np.array(leave, np.int64), np.array(copies, np.int64).reshape(-1, 4).T

    def _usage(self, ends: Ints, copies: Copies) -> Ints:
        """Bytes beyond `static` at each position, when storages last to `ends` and `copies` come in addition."""
        changes = self._births.copy()
        np.subtract.at(changes, ends, self.index.storage_bytes)
        np.add.at(changes, copies.start, copies.bytes)
        np.subtract.at(changes, copies.end, copies.bytes)
        usage: Ints = self.index.base + changes.cumsum()[:-1]
        return usage


def _joined(columns: Iterable[Ints], n: int) -> Ints:
    """`n` columns, one part of them after the other."""
    parts = [part for part in columns if part.shape[1]]
    return np.concatenate(parts, axis=1) if parts else np.zeros((n, 0), np.int64)
