"""Module calls that can run again: inputs, costs and results of a replay or an advance of each call."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowtide.planner.records import Profile
from lowtide.planner.simulate.profile_tables import CallTable, Ints, SlotTable, StorageTable
from lowtide.planner.simulate.recompute_cost import RecomputeCost
from lowtide.planner.simulate.value_table import ValueTable


class RepeatedSlots(NamedTuple):
    """Slots whose tensor is also an input of a call around them, as columns; innermost calls of a slot come first."""

    row: Ints
    input_row: Ints
    call: Ints


class RerunTable:
    """Inputs, costs and results of running each module call of a profile again, a row for each call.

    A replay restores saved values; an advance computes only the call's result.
    """

    def __init__(
        self, profile: Profile, storages: StorageTable, calls: CallTable, slots: SlotTable, values: ValueTable
    ) -> None:
        self._storages, self._calls, self._slots, self._values = storages, calls, slots, values
        input_rows: dict[tuple[int, int], int] = {}
        for row in np.flatnonzero(slots.is_input).tolist():
            input_rows.setdefault((int(slots.call[row]), int(slots.value[row])), row)

        self.inputs: list[tuple[int, ...]] = [() for _ in profile.calls]
        """Values that each call needs as inputs to run again."""
        for call, value in input_rows:
            self.inputs[call] += (value,)
        both = list(zip(self.inputs, profile.calls, strict=True))
        self.replay_costs = [RecomputeCost(inputs, c.cost_ms, c.flops, host_ms=c.host_ms) for inputs, c in both]
        """Cost of replaying each call, except its memory."""
        self.advance_costs = [
            RecomputeCost(inputs, c.advance_ms, c.advance_flops, host_ms=c.advance_host_ms) for inputs, c in both
        ]
        """Cost of advancing each call, except its memory."""

        self.restorable: list[set[int]] = [set() for _ in profile.calls]
        """Values that a replay of each call can restore: saved or passed on in it, and produced in it."""
        self.repeated = self._find_repeated(input_rows)

        self.result_value = [self._find_result_value(profile, call) for call in range(len(profile.calls))]
        """The value that advancing each call computes, or -1."""
        self.by_result: dict[int, list[int]] = {}
        """Calls by the value that advancing them computes."""
        for call, value in enumerate(self.result_value):
            self.by_result.setdefault(value, []).append(call)
        self.result_rows = [self._find_result_rows(call) for call in range(len(profile.calls))]
        """Slots inside each call that hold its result value."""

        self.replayed_by_id: list[list[int]] = [[] for _ in calls.ids]
        """Calls that may be replayed, by the number of their id."""
        self.advanced_by_id: list[list[int]] = [[] for _ in calls.ids]
        """Calls that may be advanced, by the number of their id."""
        for call, id_ in enumerate(calls.id.tolist()):
            if calls.replayable[call]:
                self.replayed_by_id[id_].append(call)
            if self.result_value[call] >= 0:
                self.advanced_by_id[id_].append(call)

    def _find_repeated(self, input_rows: dict[tuple[int, int], int]) -> RepeatedSlots:
        """Return the slots whose tensor is an input of a call around them.

        Also fill `restorable`: for each call, the other values saved or passed on in it, and allocated in it.
        """
        slots, repeated = self._slots, []
        for row, (own_call, value) in enumerate(zip(slots.call.tolist(), slots.value.tolist(), strict=True)):
            enclosing = self._calls.around[own_call]
            for call in enclosing[1:] if slots.is_input[row] else enclosing:
                if (call, value) in input_rows:
                    repeated.append((row, input_rows[call, value], call))
                elif not slots.is_state[row] and self._is_allocated_in(call, slots.storage[row]):
                    self.restorable[call].add(value)
        return RepeatedSlots(*np.array(repeated, np.int64).reshape(-1, 3).T)

    def _find_result_value(self, profile: Profile, call: int) -> int:
        value = profile.calls[call].result_value
        if value is None or value in self.inputs[call] or self._values.storage[value] < 0:
            return -1
        return value if self._is_allocated_in(call, self._values.storage[value]) else -1

    def _find_result_rows(self, call: int) -> list[int]:
        value, slots = self.result_value[call], self._slots
        rows = np.flatnonzero(slots.value == value).tolist() if value >= 0 else []
        return [row for row in rows if call in self._calls.around[int(slots.call[row])]]

    def _is_allocated_in(self, call: int, storage: int) -> bool:
        """Return True if `storage` is allocated while `call` runs."""
        return bool(self._calls.enter[call] <= self._storages.allocated_at[storage] < self._calls.exit[call])
