"""Assign a state to each value under a choice: kept, recomputed in one of three ways, offloaded or passed through.

**Recomputed.** A slot is recomputed if its address is chosen and a recipe exists.

**Replayed.** Otherwise the innermost replayed call around it restores it. A replay holds its inputs, which are slots of
the enclosing call. A replayed call inside another one leaves its inputs to the outer replay, which restores them and
leaves the tensors saved in the inner call to the inner replay. Its state, RNG state and buffers, every replayed call
keeps from its forward on. A tensor that is an input of several enclosing replayed calls is treated as an input of the
outermost one. A tensor that one replayed call saves, and that an enclosing one saves or passes on, is restored by the
outer one.

**Advanced.** An advanced call runs forward once more for its result, from its inputs, and saves nothing: no slot that
saves the result, or is given it, holds it. Exceptions: a slot in the call itself keeps or recomputes the result, or a
replayed call encloses the advanced one. So in a chain of replayed blocks only every n-th needs to keep its input; the
other inputs are computed from it in turn, once (two-level checkpointing; "advance" is the name that Griewank
and Walther 2000, doi 10.1145/347837.347846, give this action).

**Offloaded.** A value that would be kept, and whose address is chosen, is copied to the host, and back when needed.

**Kept** otherwise. One kept slot keeps its value; else the first slot that saves a value decides and later ones share
that state, except that a value which another slot offloads needs no replay.

A value without such a slot passes: it exists only while a recompute runs. If several recomputes need it, it is computed
once and held for them, as if it were saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lowtide.planner.simulate.profile_index import Flags, Index, Ints

KEPT, PASSED, RECOMPUTED, REPLAYED, ADVANCED, OFFLOADED = range(6)
"""States from RECOMPUTED on: the value is produced again on demand."""


@dataclass(frozen=True, slots=True, eq=False)
class DecisionVector:
    """Decisions as flags: `recompute` and `offload` for `Index.addresses`, `replay` and `advance` for `Index.ids`."""

    recompute: Flags
    replay: Flags
    advance: Flags
    offload: Flags

    def copy(self) -> DecisionVector:
        return DecisionVector(self.recompute.copy(), self.replay.copy(), self.advance.copy(), self.offload.copy())

    @property
    def key(self) -> bytes:
        """Return a key that is equal for equal choices about one profile."""
        return b"".join(f.tobytes() for f in (self.recompute, self.replay, self.advance, self.offload))


class Assignment(NamedTuple):
    """State of each node under a choice: values first, then calls."""

    state: Ints
    """KEPT, PASSED, RECOMPUTED, REPLAYED, ADVANCED or OFFLOADED; for calls KEPT or REPLAYED."""
    by_call: Ints
    """The call that is replayed or advanced for a value, or -1."""
    foreign_values: list[tuple[int, int]]
    """Pairs of a value and a replayed call that saves it, where the value is produced outside and is not an input.
    Other holders keep the value, so it costs no memory, but reading it runs the replay, which is held
    as long as the value.
    """
    held_inputs: Ints
    """Rows of the input slots that calls hold, at least while they run: all inputs of replayed and advanced calls, and
    only the state of calls inside a replayed one.
    """
    offloaded_storages: list[int]
    """Storages of offloaded values, in the order in which their copies to the host start."""
    offloaded_at: list[int]
    """Position at which the offload of each of `offloaded_storages` has begun."""


def assign(index: Index, choice: DecisionVector) -> Assignment:
    """Return the state of each node under `choice`."""
    is_replayed = index.replayable & choice.replay[index.call_id]
    owner = np.full(len(index.parent) + 1, -1, np.int64)  # the last entry is code outside the model
    for calls in index.by_depth:
        owner[calls] = np.where(is_replayed[calls], calls, owner[index.parent[calls]])
    advanced = [
        call
        for id_ in np.flatnonzero(choice.advance)
        for call in index.advances_of_id[id_]
        if owner[index.parent[call]] < 0
    ]
    holds_inputs = is_replayed.copy()
    holds_inputs[advanced] = True

    active = ~index.slot_is_input | holds_inputs[index.slot_call]
    around = owner[index.slot_within]
    held_inputs = active & index.slot_is_input & ((around < 0) | index.slot_is_state)
    recompute = active & choice.recompute[index.slot_address] & index.slot_recomputable
    replay = (around >= 0) & ~recompute & ~index.slot_is_state
    follows = is_replayed[index.followed_in]
    follower, followed = index.follower[follows], index.followed[follows]
    # For each row the outermost call comes last, and the last write counts.
    recompute[follower], replay[follower], around[follower] = recompute[followed], replay[followed], around[followed]
    offload = np.zeros_like(active)
    if index.can_offload:
        offload = active & ~(recompute | replay | index.slot_is_state) & choice.offload[index.slot_address]
        offload[follower] = offload[followed]

    state = np.where(index.shared, RECOMPUTED, PASSED)
    by_call = np.full(index.n_values, len(index.parent), np.int64)
    rows = np.flatnonzero(active)[::-1]  # backwards, so that the first slot of a value is the last to write
    state[index.slot_value[rows]] = np.where(recompute[rows], RECOMPUTED, np.where(replay[rows], REPLAYED, KEPT))
    rows = np.flatnonzero(active & replay)
    np.minimum.at(by_call, index.slot_value[rows], around[rows])  # calls are numbered from the outside in
    by_call[by_call == len(index.parent)] = -1
    state[index.slot_value[offload & (state[index.slot_value] != RECOMPUTED)]] = OFFLOADED
    state[index.slot_value[active & ~(recompute | replay | offload)]] = KEPT

    values = np.flatnonzero(state == REPLAYED)
    allocated_at = index.allocated_at[index.value_storage[values]]
    foreign = values[(allocated_at < index.enter[by_call[values]]) | (allocated_at >= index.exit[by_call[values]])]
    state[foreign] = KEPT
    for call in reversed(advanced):  # inner calls first
        inside, value = index.rows_within[call], index.result_value[call]
        if state[value] != ADVANCED and not any(active[row] and not replay[row] for row in inside):
            state[value], by_call[value] = ADVANCED, call
            foreign = foreign[foreign != value]
    rows = np.flatnonzero(offload)
    rows = rows[state[index.slot_value[rows]] == OFFLOADED]
    rows = rows[np.argsort(index.slot_order[rows], kind="stable")]
    offloaded_storages, first = np.unique(index.value_storage[index.slot_value[rows]], return_index=True)
    offloaded_storages, rows = offloaded_storages[np.argsort(first)], rows[np.sort(first)]
    calls = np.where(is_replayed, REPLAYED, KEPT)
    return Assignment(
        state=np.concatenate((state, calls)),
        by_call=np.concatenate((by_call, np.full_like(calls, -1))),
        foreign_values=list(zip(foreign.tolist(), by_call[foreign].tolist(), strict=True)),
        held_inputs=np.flatnonzero(held_inputs),
        offloaded_storages=offloaded_storages.tolist(),
        offloaded_at=np.minimum(index.freed_at[offloaded_storages], index.slot_filled[rows]).tolist(),
    )
