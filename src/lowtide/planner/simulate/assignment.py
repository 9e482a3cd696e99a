"""What becomes of each value under a choice: it is kept, made again in one of three ways, or only passed through.

**Recomputed.** A slot is recomputed if its address is chosen and a recipe can.

**Replayed.** Else the innermost replayed call around it brings it back. A replay holds its inputs, which are slots of
the call around it: a replayed call inside another one leaves its inputs to the outer replay, which brings them back
and leaves what the inner call saved to the inner one's own. Its state, random numbers and buffers, every replayed call
keeps from its forward on. A tensor that is an input of several replayed calls around it shares what happens to it as an
input of the outermost. What one replayed call saves and another around that one saves or gives on is brought back by
the outer.

**Advanced.** A call that is advanced runs forward once more for its result, from its inputs, and saves nothing: the
result is held by nobody, whoever saves it or is given it. Except where a slot in the call itself keeps or recomputes
it; and only where no replayed call is around it. So of a chain of replayed blocks only every n-th needs to keep its
input, and the others are made from it one after the other, once (two-level checkpointing; "advance" is what Griewank
and Walther 2000, doi 10.1145/347837.347846, call this action).

**Offloaded.** What would be kept, and whose address is chosen, is copied to the host, from where it comes back.

**Kept** otherwise. One kept slot keeps its value; else the first slot that saves a value decides and later ones share,
but for replays: what somebody else offloads needs none.

A value without such a slot passes: it exists only while a recompute runs. Where several recomputes need it, it is made
once and waits for them, as if it were saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lowtide.planner.simulate.profile_index import Flags, Index, Ints

KEPT, PASSED, RECOMPUTED, REPLAYED, ADVANCED, OFFLOADED = range(6)
"""From RECOMPUTED on: made again when somebody asks."""


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
        """Equal for equal choices about one profile."""
        return b"".join(f.tobytes() for f in (self.recompute, self.replay, self.advance, self.offload))


class Assignment(NamedTuple):
    """What becomes of the nodes, values and then calls, one row each."""

    state: Ints
    """KEPT, PASSED, RECOMPUTED, REPLAYED, ADVANCED or OFFLOADED; of calls KEPT or REPLAYED."""
    by_call: Ints
    """The call that is replayed or advanced for a value, or -1."""
    elsewhere: list[tuple[int, int]]
    """Values that are saved in a replayed call but born elsewhere, and not as an input, and these calls: somebody else
    holds them, so they cost no memory, but reading them runs the replay, which is held as long as they are."""
    given: Ints
    """The inputs, as rows of slots, that calls hold at least while they run: replayed and advanced ones, of those in a
    replayed one only the state."""
    trips: list[int]
    """The storages of offloaded values, in the order in which they set out."""
    out: list[int]
    """For each of them the position by which it has set out."""


def assign(index: Index, choice: DecisionVector) -> Assignment:
    """The fates under `choice`."""
    is_replayed = index.replayable & choice.replay[index.call_id]
    owner = np.full(len(index.parent) + 1, -1, np.int64)  # the last stands for what is around the model
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
    given = active & index.slot_is_input & ((around < 0) | index.slot_is_state)
    recompute = active & choice.recompute[index.slot_address] & index.slot_recomputable
    replay = (around >= 0) & ~recompute & ~index.slot_is_state
    follows = is_replayed[index.followed_in]
    follower, followed = index.follower[follows], index.followed[follows]
    # The outermost call comes last for each row, and the last is what stays.
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
    trips, first = np.unique(index.value_storage[index.slot_value[rows]], return_index=True)
    trips, rows = trips[np.argsort(first)], rows[np.sort(first)]
    calls = np.where(is_replayed, REPLAYED, KEPT)
    return Assignment(
        state=np.concatenate((state, calls)),
        by_call=np.concatenate((by_call, np.full_like(calls, -1))),
        elsewhere=list(zip(foreign.tolist(), by_call[foreign].tolist(), strict=True)),
        given=np.flatnonzero(given),
        trips=trips.tolist(),
        out=np.minimum(index.freed_at[trips], index.slot_filled[rows]).tolist(),
    )
