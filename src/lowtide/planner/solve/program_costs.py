"""Costs of the linear program's variables, and the rows by which clocks of host and device bound the extra time."""

from __future__ import annotations

import numpy as np

from lowtide.planner.simulate.profile_index import Index
from lowtide.planner.simulate.profile_tables import Ints
from lowtide.planner.simulate.two_clocks import NS_PER_MS, TwoClocks, compute_hand_overs
from lowtide.planner.solve.program_variables import Floats, Row, SavedValues, Variables

HAND_OVERS = 8
"""Number of positions at which the extra time is bounded from below, in addition to the first, the last, and the plain
step's critical position. These positions divide the plain step's time into equal parts.
"""


class VariableCosts:
    """Cost of each variable of the linear program, in ms and in FLOPs, and the variable's upper limit."""

    def __init__(self, index: Index, variables: Variables, saved: SavedValues) -> None:
        n_fixed = variables.n_fixed
        self.ms, self.flops, self.upper = np.zeros(n_fixed), np.zeros(n_fixed), np.ones(n_fixed)
        self.host_ms = np.zeros(n_fixed)
        self.last = np.full(n_fixed, index.end - 1, np.int64)
        """Last position at which the work of each variable can be done."""
        for storage, values in enumerate(saved.by_storage):
            self._set_storage(index, saved, storage, storage + variables.n_storages, values)
        costs = [(variable, index.reruns.replay_costs[call]) for call, variable in variables.runs.items()]
        costs += [(variable, index.reruns.advance_costs[call]) for call, variable in variables.advances.items()]
        costs += [(variable, index.values.recompute_costs[value]) for value, variable in variables.passes.items()]
        for variable, cost in costs:
            self.ms[variable], self.flops[variable], self.host_ms[variable] = cost.ms, cost.flops, cost.host_ms
        for storage, variable in variables.offloads.items():
            self.ms[variable] = index.storages.offload_ms[storage]

    def _set_storage(
        self, index: Index, saved: SavedValues, dropped: int, recomputed: int, saved_values: list[int]
    ) -> None:
        """Set costs and upper limits of a storage's variables, which have the numbers `dropped` and `recomputed`."""
        values = index.values
        read = [value for value in saved_values if values.read_at[value] < index.end]
        restorable = all(
            values.recomputable[v] or v in saved.restoring_calls or v in saved.advances for v in saved_values
        )
        can_recompute = any(values.recomputable[v] or v not in read for v in saved_values)
        self.upper[dropped] = (restorable or index.can_offload) and bool(saved_values)
        self.upper[recomputed] = self.upper[dropped] and can_recompute
        if len(read) == len(saved_values):
            costs = [values.recompute_costs[value] for value in read if values.recomputable[value]]
            self.ms[recomputed] = min((cost.ms for cost in costs), default=0.0)
            self.flops[recomputed] = min((cost.flops for cost in costs), default=0)
            self.host_ms[recomputed] = min((cost.host_ms for cost in costs), default=0.0)
            self.last[recomputed] = max((values.read_at[value] for value in read), default=index.end - 1)

    def move_to_clocks(self, index: Index, variables: Variables, saved: SavedValues) -> list[Row]:
        """Move all costs, except those of copies to the host, to the variable for the extra time. Return the rows that
        bound this variable from below.
        """
        clocks, time = index.clocks, variables.time
        assert clocks is not None
        assert time is not None
        on_clocks = np.ones(variables.n_fixed, np.bool_)
        on_clocks[list(variables.offloads.values())] = False
        device_ms = np.where(on_clocks, self.ms, 0.0)
        least_ms = np.minimum(device_ms, self.host_ms)
        packing_ms, packed_by = _packing(index, clocks, variables, saved)
        ways = compute_hand_overs(clocks.host, clocks.device)
        bounds = []
        for at in _choose_hand_over_positions(clocks, index.end):
            ms = np.where(self.last <= at, self.host_ms, np.where(index.first_read >= at, device_ms, least_ms))
            ms += np.where(packed_by <= at, packing_ms, 0.0)
            bounds.append((ms, (clocks.plain_ns - int(ways[at])) / NS_PER_MS))
        total = max(float(ms.sum()) for ms, _ in bounds)
        self.ms = np.where(on_clocks, 0.0, self.ms)
        self.ms[time] = total
        if not total:
            return []
        return [
            ({**{v: float(ms[v]) / total for v in ms.nonzero()[0].tolist()}, time: -1.0}, slack / total)
            for ms, slack in bounds
        ]


def _packing(index: Index, clocks: TwoClocks, variables: Variables, saved: SavedValues) -> tuple[Floats, Ints]:
    """Return, for each variable, the host milliseconds of packing its slots, and the position by which all these slots
    are packed.
    """
    packing_ms, packed_by = np.zeros(variables.n_fixed), np.full(variables.n_fixed, index.end, np.int64)
    rows = np.flatnonzero(~index.slots.is_input)
    sole = rows[np.isin(index.slots.storage[rows], list(saved.sole))]
    np.add.at(packing_ms, index.slots.storage[sole], clocks.packed_slot_ns / NS_PER_MS)
    packed_by[: variables.n_storages] = 0
    np.maximum.at(packed_by, index.slots.storage[sole], index.calls.exit[index.slots.call[sole]])
    return packing_ms, packed_by


def _choose_hand_over_positions(clocks: TwoClocks, end: int) -> list[int]:
    """Return the positions whose rows bound the extra time: first, last, the critical one, and HAND_OVERS others
    between them.
    """
    elapsed = (clocks.host + clocks.device).cumsum()
    shares = elapsed[-1] * np.arange(1, HAND_OVERS + 1) // (HAND_OVERS + 1)
    between = np.minimum(np.searchsorted(elapsed, shares), end - 1).tolist()
    return sorted({0, end - 1, clocks.find_critical_position(), *between})
