"""Storages, calls and slots of a profile as columns.

Positions are cut off at the end of the step, `end`, which also means "never".
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lowtide.planner.records import Profile

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class StorageTable:
    """Storages of a profile, a row each."""

    def __init__(self, profile: Profile, end: int) -> None:
        storages = profile.storages
        self.bytes = np.array([storage.bytes for storage in storages], np.int64)
        self.bytes_of: list[int] = self.bytes.tolist()
        """`bytes` as Python integers, which loops read faster."""
        self.allocated_at = np.minimum(np.array([storage.allocated_at for storage in storages], np.int64), end)
        self.freed_at = np.clip(np.array([storage.freed_at for storage in storages], np.int64), self.allocated_at, end)
        self.offload_ms = 2 * self.bytes / (profile.offload_bytes_per_ms or np.inf)
        """Time to copy each storage to the host and back."""


class CallTable:
    """Module calls of a profile, a row each, and the tree that they form."""

    def __init__(self, profile: Profile) -> None:
        calls = profile.calls
        self.enter = np.array([call.enter for call in calls], np.int64)
        self.exit = np.array([call.exit for call in calls], np.int64)
        self.state_bytes = np.array([call.state_bytes for call in calls], np.int64)
        self.replayable = np.array([call.refused is None for call in calls], np.bool_)
        self.n_saved = np.bincount(
            [slot.call for slot in profile.slots if not slot.is_input], minlength=len(profile.calls)
        )
        """Number of tensors that each call saves, parameters included."""

        self.ids = tuple(dict.fromkeys(call.id for call in calls))
        """Ids by number; a call in a loop over batches can occur several times."""
        self.id_index = {id_: index for index, id_ in enumerate(self.ids)}
        self.id = np.array([self.id_index[call.id] for call in calls], np.int64)

        self.parent = np.array([-1 if call.parent is None else call.parent for call in calls], np.int64)
        self.around: list[tuple[int, ...]] = []
        """For each call, the call itself and the calls around it, innermost first."""
        for index, call in enumerate(calls):
            self.around.append((index, *(() if call.parent is None else self.around[call.parent])))
        depth = np.array([len(around) for around in self.around], np.int64)
        self.by_depth = [np.flatnonzero(depth == at) for at in range(1, int(depth.max(initial=0)) + 1)]
        """Calls by depth: those without an enclosing call, those with one, and so on."""


class SlotTable:
    """Slots that hold memory of their own (`storage` is not None), a row each, in the order in which they are saved."""

    def __init__(self, profile: Profile, calls: CallTable, end: int) -> None:
        slots = [slot for slot in profile.slots if slot.storage is not None]
        self.addresses = tuple(dict.fromkeys(slot.address for slot in profile.slots))
        self.address_index = {address: index for index, address in enumerate(self.addresses)}
        self.address = np.array([self.address_index[slot.address] for slot in slots], np.int64)
        self.value = np.array([slot.value for slot in slots], np.int64)
        self.storage = np.array([slot.storage for slot in slots], np.int64)
        self.call = np.array([slot.call for slot in slots], np.int64)
        self.is_input = np.array([slot.is_input for slot in slots], np.bool_)
        self.is_state = np.array([slot.is_state for slot in slots], np.bool_)

        self.order = self._order()
        """Rank of each slot by the moment at which it is filled. Inputs are filled when their call begins."""
        self.within = np.where(self.is_input, calls.parent[self.call], self.call)
        """The call whose replay would restore each slot, or -1. For an input of a call, that is the enclosing call."""
        self.filled_at = np.where(self.is_input, calls.enter[self.call] + 1, calls.exit[self.call])
        """A position by which each slot is filled."""

        read = np.array([end if slot.need is None else slot.need for slot in slots], np.int64)
        released = np.array([end if slot.release is None else min(slot.release, end) for slot in slots], np.int64)
        released = np.where(read < end, np.maximum(released, read + 1), released)
        self.read_at = np.where(self.is_input, end, read)
        """Position at which backward reads each slot; `end` for inputs, which a replay reads."""
        self.released_at = np.where(self.is_input, 0, released)

    def _order(self) -> Ints:
        saved = ~self.is_input
        order = 2 * np.cumsum(saved)
        calls = np.maximum.accumulate(self.call[saved]) if saved.any() else self.call[saved]
        order[~saved] = 2 * np.searchsorted(calls, self.call[~saved]) + 1
        return order
