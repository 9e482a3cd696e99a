"""Sweep over the step under a choice, position by position: memory in use, and the cost.

A profile holds one traced step on its axis of positions, so any plan's memory is a sum over intervals:

    usage[i] = base[i] + storages alive at i + recomputed values still wanted at i + scratch memory at i

`assignment.py` gives each value its state; this file computes when each value exists. Backward demands a value where it
reads a slot of that value, a recompute demands its operands, a replay its inputs. Values and calls are the nodes of one
graph, visited dependents first; each node passes demands to the nodes that it needs:

    demanded first position of a demand: the node is recomputed then, once
    wanted   until the node's last reader has released it, and all nodes that demanded it have been recomputed
    held     until the last readers of the node, and of all values computed from it, have released them: until then it
             could be demanded again
    later    bytes that are computed from the node, directly or not, at the position where it is recomputed: these bytes
             do not exist yet when the node is recomputed
    kept     a storage exists from `allocated_at` to `freed_at`, and longer while the kept values in it are held, or
             while a call that will be replayed, and has such a value as an argument, is still running

Memory in use during part of a position counts for all of it, so the sum is an upper bound; running nodes count less:

    usage[i] = results[i] + max(base[i], base at the beginning of i + memory of the node that runs at i)

Recomputes and replays run when backward reads a value. That is at the beginning of a position, before anything else is
allocated in it. They run one after the other, each before the nodes that depend on it: only the largest scratch memory
counts, less the bytes computed later, on top of recomputed values that wait for other recomputes. Values that a
recompute passes through are computed on the way, one after the other (`recompute_cost.py`); such values wait if they
exist while an operand has still to be recomputed. A replay allocates again as much as its whole forward did
(`call_allocations.py`); the engine stops a replay early and may need less. The same holds for an advance, of which only
the result remains.

An offloaded storage stays in GPU memory until the next storage has been offloaded, or forward has ended. It is back in
GPU memory from the moment at which the storage offloaded after it is demanded, for as long as it is wanted. The time of
copies is counted in full, both ways, although they overlap with other work: an upper bound.

Times add up, or where the profile has the clocks of host and device, they run side by side (`two_clocks.py`). Then each
recompute and replay is work of both clocks at the position that demands it. Each packed slot is work of the host at the
end of its call's forward, and so is each kept slot in the same call, because hooks are pushed around the call.

Cost: array operations over slots and positions and a loop over nodes that are not kept, about 6 ms for 1000 slots; 1 ms
if little has changed since another sweep (`recompute_segments.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import NamedTuple

import numpy as np

from lowtide.planner.simulate.assignment import KEPT, RECOMPUTED, Assignment, DecisionVector, assign
from lowtide.planner.simulate.profile_index import Index
from lowtide.planner.simulate.profile_tables import Ints
from lowtide.planner.simulate.recompute_segments import Segments

REMEMBERED = 2**20
"""Limit of the cache of sweeps, in positions and values: about 20 MB."""


class Copies(NamedTuple):
    """Memory that recomputes, replays and advances allocate, as columns: in use in positions [start, end)."""

    start: Ints
    end: Ints
    bytes: Ints
    node: Ints
    """The value that is recomputed or advanced to, or `n_values` plus the call that is replayed."""

    def at(self, position: int) -> Copies:
        """Return the copies in use at `position`."""
        in_use = (self.start <= position) & (position < self.end)
        return Copies(*(column[in_use] for column in self))


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """Memory and cost of the step under a choice (decisions as flags), position by position."""

    usage: Ints
    """Bytes beyond `static`, for each position."""
    peak: int
    """Maximum of `usage`."""
    extra_ms: float
    extra_flops: int
    state: Ints
    """KEPT, PASSED, RECOMPUTED, REPLAYED, ADVANCED or OFFLOADED, for each node."""
    ends: Ints
    """First position at which each storage is freed."""
    copies: Copies
    """Recomputed memory, and one entry per position at which a node runs: its scratch memory beyond later results."""
    host_bytes: int
    """Bytes of host memory that offloaded tensors occupy."""


class Sweeper:
    """Computation of memory sweeps for one step, with a cache of recent sweeps."""

    def __init__(self, index: Index, backward: int) -> None:
        self.index = index
        self._backward = backward
        """Position at which forward has ended."""
        self._recent: dict[bytes, Sweep] = {}
        self._most_recent = max(REMEMBERED // (index.end + index.n_values + 1), 16)
        births = np.zeros(index.end + 1, np.int64)
        np.add.at(births, index.storages.allocated_at, index.storages.bytes)
        self._births = births
        before = np.concatenate((index.base[:1], index.base[:-1]))
        self._rise = np.maximum(index.base - before, 0)
        """Least rise of `base` within each position: at its beginning it is no higher than in the position before."""
        self._segments = Segments(index)

    def sweep(self, choice: DecisionVector) -> Sweep:
        """Return the memory and cost of the step under `choice`. Recent sweeps are cached: searches revisit choices."""
        key = choice.key
        sweep = self._recent.pop(key, None) or self._compute_sweep(choice)
        self._recent[key] = sweep
        if len(self._recent) > self._most_recent:
            del self._recent[next(iter(self._recent))]
        return sweep

    def _compute_sweep(self, choice: DecisionVector) -> Sweep:
        index, assignment = self.index, assign(self.index, choice)
        visits = self._segments.visit_all(assignment)

        rows = np.flatnonzero(assignment.state[index.slots.value] == KEPT)
        ends = index.storages.freed_at.copy()
        np.maximum.at(ends, index.slots.storage[rows], index.slots.released_at[rows])
        rows = assignment.held_inputs[assignment.state[index.slots.value[assignment.held_inputs]] == KEPT]
        np.maximum.at(ends, index.slots.storage[rows], index.calls.exit[index.slots.call[rows]])
        values, until = _concatenate((visit.holds for visit in visits), 2)
        np.maximum.at(ends, index.values.storage[values], until)
        leave, returning = self._compute_offload_copies(
            assignment, _concatenate((visit.returns for visit in visits), 4)
        )
        ends[assignment.offloaded_storages] = np.maximum(ends[assignment.offloaded_storages], leave)
        running = self._compute_running_copies(
            _concatenate((visit.runs for visit in visits), 3), _concatenate((visit.waits for visit in visits), 2)
        )
        copies = Copies(*_concatenate((*(visit.copies for visit in visits), running, returning), 4))
        usage = self._usage(ends, copies)
        return Sweep(
            usage=usage,
            peak=int(usage.max()),
            # Exact sum, so that equal work in another order takes the same time.
            extra_ms=math.fsum(
                chain(
                    index.storages.offload_ms[assignment.offloaded_storages].tolist(),
                    *(visit.times for visit in visits),
                    self._compute_time_on_clocks(assignment, _concatenate((visit.work for visit in visits), 3)),
                )
            ),
            extra_flops=sum(visit.flops for visit in visits),
            state=assignment.state,
            ends=ends,
            copies=copies,
            host_bytes=int(index.storages.bytes[assignment.offloaded_storages].sum()),
        )

    def _compute_time_on_clocks(self, assignment: Assignment, work: Ints) -> list[float]:
        """Return the extra milliseconds of `work` and of packing slots, in a list of one number; [] without clocks.

        Host and device work side by side. `work` has three rows: positions, and the nanoseconds of host and of device
        that are added there.
        """
        index, clocks = self.index, self.index.clocks
        if clocks is None:
            return []
        host, device = np.zeros((2, index.end), np.int64)
        np.add.at(host, work[0], work[1])
        np.add.at(device, work[0], work[2])
        is_packed = ~index.slots.is_input & (assignment.state[index.slots.value] >= RECOMPUTED)
        packed = np.bincount(index.slots.call[is_packed], minlength=len(index.calls.n_saved))
        kept = np.where(packed > 0, index.calls.n_saved - packed, 0)
        at = np.minimum(index.calls.exit, index.end - 1)
        np.add.at(host, at, packed * clocks.packed_slot_ns + kept * clocks.kept_slot_ns)
        return [clocks.extra_ms(host, device)]

    def _compute_running_copies(self, runs: Ints, waits: Ints) -> Ints:
        """Return the scratch memory of recomputes and replays while they run, as rows of `Copies`.

        `runs` has rows of positions, nodes and scratch bytes: at each position only the largest counts. `waits` has
        rows of positions and bytes: values that wait there for another recompute are added.
        """
        runs = runs[:, np.argsort(-runs[2], kind="stable")]
        _, first = np.unique(runs[0], return_index=True)
        when, node, need = runs[:, first]
        waiting = np.zeros(self.index.end, np.int64)
        np.add.at(waiting, *waits)
        return np.array((when, when + 1, np.maximum(need + waiting[when] - self._rise[when], 0), node))

    def _compute_offload_copies(self, assignment: Assignment, returns: Ints) -> tuple[Ints, Ints]:
        """Return the position at which each offloaded storage leaves GPU memory, and as rows of `Copies` the memory of
        each storage that is copied back.

        `returns` has rows of storages, and of the first position, end and value of each demand on a storage.
        """
        index, copies = self.index, []
        back: dict[int, tuple[int, int, int]] = {}
        for storage, when, until, value in returns.T.tolist():
            start, end, first = back.get(storage, (when, until, value))
            back[storage] = min(start, when), max(end, until), first
        for storage, following in zip_longest(assignment.offloaded_storages, assignment.offloaded_storages[1:]):
            start, end, value = back[storage]
            start = min(start, back[following][0]) if following is not None else start
            if start < end:
                copies.append((start, end, index.storages.bytes_of[storage], value))
        leave = [*assignment.offloaded_at[1:], self._backward][: len(assignment.offloaded_storages)]
        return np.array(leave, np.int64), np.array(copies, np.int64).reshape(-1, 4).T

    def _usage(self, ends: Ints, copies: Copies) -> Ints:
        """Return bytes beyond `static` at each position, if storages are freed at `ends` and `copies` exist as well."""
        changes = self._births.copy()
        np.subtract.at(changes, ends, self.index.storages.bytes)
        np.add.at(changes, copies.start, copies.bytes)
        np.subtract.at(changes, copies.end, copies.bytes)
        usage: Ints = self.index.base + changes.cumsum()[:-1]
        return usage


def _concatenate(columns: Iterable[Ints], n: int) -> Ints:
    """Concatenate arrays of `n` rows each along their second axis; without any, return an empty array of `n` rows."""
    parts = [part for part in columns if part.shape[1]]
    return np.concatenate(parts, axis=1) if parts else np.zeros((n, 0), np.int64)
