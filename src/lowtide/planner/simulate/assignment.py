"""Assign a state to each value under a choice (decisions as flags): kept, recomputed in one of three ways, offloaded or
passed through.

**Recomputed.** A slot is recomputed if its address is chosen and a recipe exists.

**Replayed.** Otherwise the innermost replayed call around the slot restores it. A replay holds its inputs, which are
slots of the enclosing call. If a replayed call is inside another replayed call, the outer replay restores the inputs of
the inner call, and the inner replay restores the tensors saved in the inner call. Every replayed call holds its state,
which is RNG state and buffers, from its forward on. A tensor that is an input of several nested replayed calls counts
as an input of the outermost call. A tensor that an inner replayed call saves, and that an outer replayed call saves or
passes on, is restored by the outer call.

**Advanced.** An advanced call runs forward again from its inputs, only for its result, and saves nothing. Its result is
held neither by slots that save the result, nor by slots for inputs of other calls. A call is not advanced if a slot in
the call itself keeps or recomputes the result, or if a replayed call encloses it. So in a chain of replayed blocks only
every n-th block keeps its input; the inputs of the blocks behind it are computed one after the other, each once
(two-level checkpointing; "advance" is the name that Griewank and Walther 2000, doi 10.1145/347837.347846, give this
action).

**Offloaded.** A value that would be kept, and whose address is chosen, is copied to the host, and back when needed.

**Kept** otherwise. If several slots save a value, one kept slot is enough to keep it. Otherwise the first slot that
saves the value decides for all, except that a value which another slot offloads needs no replay.

A value without a slot is passed through: it exists only while a recompute runs. If several recomputes need the value,
it is computed once and held for them, as if it were saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lowtide.planner.simulate.profile_index import Index
from lowtide.planner.simulate.profile_tables import Flags, Ints

KEPT, PASSED, RECOMPUTED, REPLAYED, ADVANCED, OFFLOADED = range(6)
"""States from RECOMPUTED on: the value is produced again on demand."""


@dataclass(frozen=True, slots=True, eq=False)
class DecisionVector:
    """Decisions as flags: `recompute` and `offload` for each slot address, `replay` and `advance` for each call id."""

    recompute: Flags
    replay: Flags
    advance: Flags
    offload: Flags

    def copy(self) -> DecisionVector:
        return DecisionVector(self.recompute.copy(), self.replay.copy(), self.advance.copy(), self.offload.copy())

    @property
    def key(self) -> bytes:
        """Return the flags as bytes, to compare choices about one profile."""
        return b"".join(f.tobytes() for f in (self.recompute, self.replay, self.advance, self.offload))


class Assignment(NamedTuple):
    """State of each node (value or module call) under a choice: first all values, then all calls."""

    state: Ints
    """KEPT, PASSED, RECOMPUTED, REPLAYED, ADVANCED or OFFLOADED; for calls KEPT or REPLAYED."""
    by_call: Ints
    """The call that is replayed or advanced for a value, or -1."""
    foreign_values: list[tuple[int, int]]
    """Pairs of a value and a replayed call that saves it, although the call neither produces it nor has it as an input.
    Other holders keep the value, so it costs no memory. But reading it runs the replay, which is held as long as the
    value.
    """
    held_inputs: Ints
    """Rows of the input slots that calls hold, at least while they run: all inputs of replayed and advanced calls, but
    only the state of calls inside a replayed call.
    """
    offloaded_storages: list[int]
    """Storages of offloaded values, in the order in which their copies to the host start."""
    offloaded_at: list[int]
    """Position at which the offload of each of `offloaded_storages` has begun."""


class _SlotStates(NamedTuple):
    """Flags of each slot under a choice, as columns. A slot that exists and has no other flag is kept."""

    exists: Flags
    """Slots that a call saves, and inputs of calls that run again."""
    recompute: Flags
    replay: Flags
    offload: Flags
    replayed_call: Ints
    """The replayed call that restores each slot, or -1."""


def assign(index: Index, choice: DecisionVector) -> Assignment:
    """Return the state of each value and each module call under the decisions in `choice`."""
    is_replayed = index.calls.replayable & choice.replay[index.calls.id]
    replayed_around = _find_innermost_replayed(index, is_replayed)
    advanced = [
        call
        for id_ in np.flatnonzero(choice.advance)
        for call in index.reruns.advanced_by_id[id_]
        if replayed_around[index.calls.parent[call]] < 0
    ]
    runs_again = is_replayed.copy()
    runs_again[advanced] = True

    slots = _assign_slots(index, choice, is_replayed, runs_again, replayed_around)
    state, by_call = _assign_values(index, slots)
    foreign = _keep_foreign(index, state, by_call)
    foreign = _assign_advances(index, advanced, slots, state, by_call, foreign)
    offloaded_storages, offloaded_at = _order_offloads(index, slots, state)
    is_held = index.slots.is_state | (replayed_around[index.slots.within] < 0)
    calls = np.where(is_replayed, REPLAYED, KEPT)
    return Assignment(
        state=np.concatenate((state, calls)),
        by_call=np.concatenate((by_call, np.full_like(calls, -1))),
        foreign_values=list(zip(foreign.tolist(), by_call[foreign].tolist(), strict=True)),
        held_inputs=np.flatnonzero(slots.exists & index.slots.is_input & is_held),
        offloaded_storages=offloaded_storages.tolist(),
        offloaded_at=offloaded_at.tolist(),
    )


def _find_innermost_replayed(index: Index, is_replayed: Flags) -> Ints:
    """Return, for each module call, the innermost replayed call among the call itself and the calls around it, or -1.

    The result has a last entry of -1 for code outside the model, which an index of -1 selects.
    """
    parent = index.calls.parent
    innermost = np.full(len(parent) + 1, -1, np.int64)
    for calls in index.calls.by_depth:
        innermost[calls] = np.where(is_replayed[calls], calls, innermost[parent[calls]])
    return innermost


def _assign_slots(
    index: Index, choice: DecisionVector, is_replayed: Flags, runs_again: Flags, replayed_around: Ints
) -> _SlotStates:
    """Return the state of each slot: kept, recomputed, replayed or offloaded, or not held at all.

    `is_replayed` flags the replayed calls, `runs_again` also the advanced ones. `replayed_around` has the innermost
    replayed call of each call (`_find_innermost_replayed`).
    """
    slots, repeated = index.slots, index.reruns.repeated
    replayed_call = replayed_around[slots.within]
    exists = ~slots.is_input | runs_again[slots.call]
    recompute = exists & choice.recompute[slots.address] & index.slot_recomputable
    replay = (replayed_call >= 0) & ~recompute & ~slots.is_state
    # A slot that repeats an input of a replayed call shares that input's state. The outermost call comes last for each
    # row, and the last write counts.
    counts = is_replayed[repeated.call]
    row, input_row = repeated.row[counts], repeated.input_row[counts]
    recompute[row], replay[row], replayed_call[row] = recompute[input_row], replay[input_row], replayed_call[input_row]
    offload = np.zeros_like(exists)
    if index.can_offload:
        offload = exists & ~(recompute | replay | slots.is_state) & choice.offload[slots.address]
        offload[row] = offload[input_row]
    return _SlotStates(exists, recompute, replay, offload, replayed_call)


def _assign_values(index: Index, slots: _SlotStates) -> tuple[Ints, Ints]:
    """Derive the state of each value from its slots. Also return, for each value, the replayed call that restores it,
    or -1.
    """
    exists, recompute, replay, offload, replayed_call = slots
    value, n_calls = index.slots.value, len(index.calls.parent)
    state = np.where(index.values.shared, RECOMPUTED, PASSED)
    rows = np.flatnonzero(exists)[::-1]  # backwards, so that the first slot of a value is the last to write
    state[value[rows]] = np.where(recompute[rows], RECOMPUTED, np.where(replay[rows], REPLAYED, KEPT))
    state[value[offload & (state[value] != RECOMPUTED)]] = OFFLOADED
    state[value[exists & ~(recompute | replay | offload)]] = KEPT

    by_call = np.full(index.n_values, n_calls, np.int64)
    rows = np.flatnonzero(exists & replay)
    np.minimum.at(by_call, value[rows], replayed_call[rows])  # calls are numbered from the outside in
    by_call[by_call == n_calls] = -1
    return state, by_call


def _keep_foreign(index: Index, state: Ints, by_call: Ints) -> Ints:
    """Set the `state` of foreign values to KEPT, and return these values.

    A value is foreign if it was produced outside the call whose replay should restore it.
    """
    values = np.flatnonzero(state == REPLAYED)
    allocated_at, calls = index.storages.allocated_at[index.values.storage[values]], by_call[values]
    is_outside = (allocated_at < index.calls.enter[calls]) | (allocated_at >= index.calls.exit[calls])
    foreign: Ints = values[is_outside]
    state[foreign] = KEPT
    return foreign


def _assign_advances(
    index: Index, advanced: list[int], slots: _SlotStates, state: Ints, by_call: Ints, foreign: Ints
) -> Ints:
    """Set the `state` of results of `advanced` calls to ADVANCED, unless a slot inside the call holds the result.

    Returns `foreign` without the values that are such results.
    """
    for call in reversed(advanced):  # inner calls first
        rows, value = index.reruns.result_rows[call], index.reruns.result_value[call]
        if state[value] != ADVANCED and not any(slots.exists[row] and not slots.replay[row] for row in rows):
            state[value], by_call[value] = ADVANCED, call
            foreign = foreign[foreign != value]
    return foreign


def _order_offloads(index: Index, slots: _SlotStates, state: Ints) -> tuple[Ints, Ints]:
    """Return the offloaded storages in the order in which their copies start, and the position of each start."""
    value = index.slots.value
    rows = np.flatnonzero(slots.offload)
    rows = rows[state[value[rows]] == OFFLOADED]
    rows = rows[np.argsort(index.slots.order[rows], kind="stable")]
    storages, first = np.unique(index.values.storage[value[rows]], return_index=True)
    storages, rows = storages[np.argsort(first)], rows[np.sort(first)]
    return storages, np.minimum(index.storages.freed_at[storages], index.slots.filled_at[rows])
