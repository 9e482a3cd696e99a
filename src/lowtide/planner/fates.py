"""What becomes of each value under a choice: it is kept, remade, brought back by a replay, or only passed through.

A slot is remade if its address is chosen and a recipe can; else the replayed module call around it brings it back; else
it is kept. The slots of a call's inputs count only where that call is replayed, and a saved tensor that is an input of
a replayed call around it shares what happens to that input. One kept slot keeps its value; otherwise the first slot
that saves a value decides and later ones share.

A value without such a slot passes: it exists only while a remake runs. Where several remakes need it, it is made once
and waits for them, as if it were saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lowtide.planner.indexed import Flags, Index, Ints

KEPT, REMADE, REPLAYED, PASSED = range(4)


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Decisions as flags: one for each of `Index.addresses` and of `Index.ids`."""

    remake: Flags
    replay: Flags

    def copy(self) -> Choice:
        return Choice(self.remake.copy(), self.replay.copy())


class Fates(NamedTuple):
    """What becomes of the values, one row each."""

    state: Ints
    """KEPT, REMADE, REPLAYED or PASSED."""
    by_call: Ints
    """The replayed call around the first slot that saves it, or -1."""
    foreign: Ints
    """Indices of values that are saved in a replayed call but born elsewhere, and not as an input: somebody else holds
    them, so they cost no memory, but reading them runs the replay."""


def fates_of(index: Index, choice: Choice, replayed: list[int]) -> Fates:
    """The fates under `choice`, of which `replayed` are the calls. Raises ValueError if one of these is in another."""
    owner = np.full(len(index.within), -1, np.int64)
    for call in replayed:  # outer calls come first
        if owner[call] >= 0:
            outer, inner = (index.profile.calls[c].id for c in (owner[call], call))
            raise ValueError(f"{inner} is inside {outer}: a replayed call inside a replayed call is not supported")
        owner[index.within[call]] = call
    inside = owner[index.slot_call]

    active = ~index.slot_is_input | (inside == index.slot_call)
    remake = active & choice.remake[index.slot_address] & index.slot_remakeable
    replay = (inside >= 0) & ~index.slot_is_input & ~remake
    following = inside[index.follower] == index.followed_in
    remake[index.follower[following]] = remake[index.followed[following]]
    replay[index.follower[following]] = False

    state = np.where(index.shared, REMADE, PASSED)
    by_call = np.full(index.n_values, -1, np.int64)
    rows = np.flatnonzero(active)[::-1]  # backwards, so that the first slot of a value is the last to write
    state[index.slot_value[rows]] = np.where(remake[rows], REMADE, np.where(replay[rows], REPLAYED, KEPT))
    by_call[index.slot_value[rows]] = inside[rows]
    state[index.slot_value[active & ~remake & ~replay]] = KEPT

    values = np.flatnonzero(state == REPLAYED)
    born = index.born[index.value_storage[values]]
    foreign = values[(born < index.enter[by_call[values]]) | (born >= index.exit[by_call[values]])]
    state[foreign] = KEPT
    return Fates(state, by_call, foreign)
