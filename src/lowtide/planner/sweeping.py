"""The step under a choice, position by position: what is there when, and what it costs.

A profile holds one traced step on its axis of positions, so any plan's memory is a sum over intervals:

    usage[i] = base[i] + storages alive at i + what was made again and is still waited for at i + scratch memory at i

What becomes of each value is told by `fates.py`, and when it is there by this file. Backward asks for a value where it
reads a slot of it, a remake asks for its operands, a replay for its inputs. Values and calls are the nodes of one
graph, visited dependents first; each tells those that it asks:

    made     the first position at which anybody asks: it is made then, once
    wanted   until the last reader has let go of it and all that asked for it have been made
    later    bytes that are made from it, one from the other, at that same position: not there yet when it is made
    kept     a storage is there from `born` to `dies`, and longer where it is held: by the readers of the kept values in
             it, and by whatever is made from one of them, until nobody wants that any more

What is there in a part of a position counts in all of it, so the sum is an upper bound; but for what runs:

    usage[i] = results[i] + max(base[i], base at the beginning of i + memory of what runs at i)

Remakes and replays run when backward reads a value, which is what a position begins with: before anything is allocated
in it. They run one after the other, each before what is made from it: of their scratch memory only the largest counts,
less what is made later, on top of what waits for the others. What a remake passes through is made on the way, one after
the other (`passing.py`); what of that is there when an operand has still to be made waits for it. A replay allocates
again what its whole forward did (`forwards.py`); the engine stops it early and may need less. So does an advance, which
leaves only its result.

What is offloaded is there until the next such tensor has left, or forward has ended; and again from the moment at which
the one that left after it is asked for, while that is waited for. Copies are counted in full, both ways, although they
run beside other work: an upper bound.

Cost: array operations over slots and positions and a loop over what is not kept, about 1 ms for 1000 slots.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lowtide.planner.fates import ADVANCED, KEPT, OFFLOADED, PASSED, REMADE, REPLAYED, Choice, fates_of
from lowtide.planner.forwards import Forwards
from lowtide.planner.indexed import Index, Ints
from lowtide.planner.passing import Recipe

REMEMBERED = 2**20
"""Positions and values of sweeps that are remembered: some 20 MB."""


class Copy(NamedTuple):
    """Memory that a remake, replay or advance allocates: there in positions [start, end)."""

    start: int
    end: int
    bytes: int
    node: int
    """The value that is remade or advanced to, or `n_values` plus the call that is replayed."""


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """The step under a choice, position by position."""

    usage: Ints
    """Bytes beyond `static`, for each position."""
    peak: int
    """The most of `usage`."""
    extra_ms: float
    extra_flops: int
    state: list[int]
    """For each value KEPT, PASSED, REMADE, REPLAYED, ADVANCED or OFFLOADED."""
    ends: Ints
    """For each storage the first position at which it is gone."""
    copies: list[Copy]
    """What is made again, and one for each position where something runs: what it needs beyond what is there later."""
    host_bytes: int
    """Memory of the host that offloaded tensors are in."""


class Sweeper:
    """Sweeps over the positions of one step."""

    def __init__(self, index: Index, backward: int) -> None:
        self.index = index
        self._backward = backward
        """The position at which forward has ended."""
        self._forwards = Forwards(index)
        self._recent: dict[bytes, Sweep] = {}
        self._most_recent = max(REMEMBERED // (index.end + index.n_values + 1), 16)
        births = np.zeros(index.end + 1, np.int64)
        np.add.at(births, index.born, index.storage_bytes)
        self._births = births
        self._storage_of: list[int] = index.value_storage.tolist()
        self._storage_bytes: list[int] = index.storage_bytes.tolist()
        self._made: list[int] = [*index.read.tolist(), *[index.end] * len(index.profile.calls)]
        """For each node the position at which backward asks for it, before any other node does."""
        self._wanted: list[int] = [*index.released.tolist(), *[0] * len(index.profile.calls)]
        before = np.concatenate((index.base[:1], index.base[:-1]))
        self._rise: list[int] = np.maximum(index.base - before, 0).tolist()
        """How far `base` rises in each position, at least: at the beginning it is no higher than in the one before."""

    def sweep(self, choice: Choice) -> Sweep:
        """The step under `choice`. Searches come back to the same choices: the last ones are remembered."""
        key = choice.key
        found = self._recent.pop(key, None) or self._swept(choice)
        self._recent[key] = found
        if len(self._recent) > self._most_recent:
            del self._recent[next(iter(self._recent))]
        return found

    def _swept(self, choice: Choice) -> Sweep:
        index, calls = self.index, self.index.profile.calls
        never, first_call = index.end, index.n_values
        replayed = sorted(call for id_ in np.flatnonzero(choice.replay) for call in index.calls_of_id[id_])
        states, by_call, foreign, trips = fates_of(index, choice, replayed)
        state, call_of, storage_of = states.tolist(), by_call.tolist(), self._storage_of
        made, wanted = self._made.copy(), self._wanted.copy()
        later = [0] * len(made)
        rows = np.flatnonzero(states[index.slot_value] == KEPT)
        ends = index.dies.copy()
        np.maximum.at(ends, index.slot_storage[rows], index.slot_release[rows])
        held = ends.tolist()

        def ask(node: int, when: int, until: int, after: int = 0) -> None:
            if when < made[node]:
                made[node], later[node] = when, after
            elif when == made[node] and after > later[node]:
                later[node] = after
            if until > wanted[node]:
                wanted[node] = until

        for value in foreign.tolist():
            ask(first_call + call_of[value], made[value], wanted[value])
        copies: list[Copy] = []
        running: dict[int, Copy] = {}
        waiting: dict[int, int] = defaultdict(int)
        brings_back: dict[int, list[int]] = {call: [] for call in replayed}
        times, extra_flops = [float(index.offload_ms[storage]) for storage in trips], 0
        back: dict[int, Copy] = {}
        for node in self._not_kept(states, replayed):
            when, until = made[node], wanted[node]
            if node < first_call and state[node] == REPLAYED:
                ask(first_call + call_of[node], when, until, later[node])
                brings_back[call_of[node]].append(node)
                continue
            if node < first_call and state[node] == OFFLOADED:
                storage = storage_of[node]
                known = back.get(storage, Copy(never, 0, self._storage_bytes[storage], node))
                back[storage] = known._replace(start=min(known.start, when), end=max(known.end, until))
                continue
            if node >= first_call:
                call = calls[node - first_call]
                operands, ms, flops = index.inputs[node - first_call], call.cost_ms, call.flops
            elif state[node] == ADVANCED:
                call = calls[call_of[node]]
                operands, ms, flops = index.inputs[call_of[node]], call.advance_ms, call.advance_flops
            else:
                operands, ahead_bytes, ms, flops, scratch, _ = self._recipe(node, state)
            after = later[node]
            if when < never:
                times.append(ms)
                extra_flops += flops
                if node >= first_call:
                    ends_of = dict[int, int]()
                    for value in brings_back[node - first_call]:
                        storage = storage_of[value]
                        if wanted[value] > ends_of.get(storage, when):
                            ends_of[storage] = wanted[value]
                    copies += [Copy(when, end, self._storage_bytes[s], node) for s, end in ends_of.items()]
                    size = sum(map(self._storage_bytes.__getitem__, ends_of))
                    scratch = max(0, self._forwards.peak(node - first_call, tuple(sorted(ends_of))) - size)
                else:
                    size = index.value_bytes[node]
                    if state[node] == ADVANCED:
                        size = self._storage_bytes[storage_of[node]]
                        scratch = max(0, self._forwards.peak(call_of[node], (storage_of[node],)) - size)
                    else:
                        made_again = (n for o, n in zip(operands, ahead_bytes, strict=True) if state[o] >= REMADE)
                        ahead = max(made_again, default=0)
                        waiting[when] += ahead  # until the operand has been made
                        scratch = max(0, scratch - ahead)
                    stays = until > when + 1 or index.read[node] == when  # else it is gone when the others have run
                    copies.append(Copy(when, until, size if stays else 0, node))
                    waiting[when] += 0 if stays else size
                if when not in running or scratch - after > running[when].bytes:
                    running[when] = Copy(when, when + 1, scratch - after, node)
                after += size
            for operand in operands:
                if state[operand] >= REMADE:
                    ask(operand, when, when + 1 if when < never else until, after)
                else:  # kept; or nobody's and without a recipe, then it is held like what is kept
                    held[storage_of[operand]] = max(held[storage_of[operand]], until)

        for n, storage in enumerate(trips):
            trip, is_last = back[storage], n + 1 == len(trips)
            left = self._backward if is_last else int(index.dies[trips[n + 1]])
            held[storage] = max(held[storage], left)
            start = trip.start if is_last else min(trip.start, back[trips[n + 1]].start)
            if start < trip.end:
                copies.append(trip._replace(start=start))
        ends = np.array(held, np.int64)
        for when, copy in running.items():
            copies.append(copy._replace(bytes=max(0, copy.bytes + waiting[when] - self._rise[when])))
        usage = self._usage(ends, copies)
        extra_ms = math.fsum(times)  # exact, so that equal work in another order takes the same time
        host_bytes = sum(self._storage_bytes[storage] for storage in trips)
        return Sweep(usage, int(usage.max()), extra_ms, extra_flops, state, ends, copies, host_bytes)

    def _not_kept(self, states: Ints, replayed: list[int]) -> list[int]:
        """The nodes that have to be made again, dependents first."""
        active = np.zeros(self.index.n_values + len(self.index.profile.calls), np.bool_)
        active[: self.index.n_values] = states >= REMADE
        active[[self.index.n_values + call for call in replayed]] = True
        order: list[int] = self.index.order[active[self.index.order]].tolist()
        return order

    def _recipe(self, value: int, state: list[int]) -> Recipe:
        for operand in self.index.optional[value]:
            if state[operand] == PASSED and self.index.remakeable[operand]:
                return self.index.recipe(value, np.array(state) == PASSED)
        return self.index.recipes[value]

    def _usage(self, ends: Ints, copies: list[Copy]) -> Ints:
        """Bytes beyond `static` at each position, when storages last to `ends` and `copies` come in addition."""
        changes = self._births.copy()
        np.subtract.at(changes, ends, self.index.storage_bytes)
        if copies:
            starts, stops, sizes, _ = zip(*copies, strict=True)
            size = np.array(sizes, np.int64)
            np.add.at(changes, np.array(starts, np.int64), size)
            np.subtract.at(changes, np.array(stops, np.int64), size)
        usage: Ints = self.index.base + changes.cumsum()[:-1]
        return usage
