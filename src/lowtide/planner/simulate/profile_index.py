"""Index a profile as checked tables, for lookups by the simulator and the solvers. Nothing is decided here."""

from __future__ import annotations

import graphlib

import numpy as np

from lowtide.planner.profile_checks import check_profile, contradiction
from lowtide.planner.records import Profile
from lowtide.planner.simulate.profile_tables import CallTable, Ints, SlotTable, StorageTable
from lowtide.planner.simulate.recompute_cost import RecomputeCost
from lowtide.planner.simulate.rerun_table import RerunTable
from lowtide.planner.simulate.two_clocks import TwoClocks
from lowtide.planner.simulate.value_table import ValueTable

HIDDEN = 0.25
"""Weight, when moves are compared, of time on the clock (host or device) that does not bound the plain step."""


class Index:
    """Facts of a profile that are independent of any decision, as tables.

    Positions are cut off at the end of the step, `end`, which also means "never". Values and calls are the nodes of one
    graph: value v is node v, call c is node `n_values + c`. Raises LowtideError when the profile contradicts itself.
    """

    def __init__(self, profile: Profile) -> None:
        check_profile(profile)
        self.profile = profile
        self.end = len(profile.base_bytes)
        self.base = np.array(profile.base_bytes, np.int64)
        self.storages = StorageTable(profile, self.end)
        self.calls = CallTable(profile)
        self.slots = SlotTable(profile, self.calls, self.end)
        self.values = ValueTable(profile, self.slots, self.end)
        self.reruns = RerunTable(profile, self.storages, self.calls, self.slots, self.values)

        self.n_values = len(self.values)
        self.can_offload = profile.offload_bytes_per_ms is not None
        self.slot_recomputable = self.values.recomputable[self.slots.value]
        self.first_read = int(self.values.read_at.min(initial=self.end))
        """First position at which anything can be recomputed."""
        self.clocks = None if profile.clocks is None else TwoClocks(profile.clocks)
        """Clocks of host and device; None where all times add up."""
        self._weights = self._choose_clock_weights()
        self.order = self._order_dependents_first()
        """Nodes, each after all nodes that could demand it."""

    def _choose_clock_weights(self) -> tuple[float, float]:
        """Return the weights of host and device time in comparisons of moves: the clock that does not bound the plain
        step's time has the smaller weight.
        """
        if self.clocks is None:
            return 0.0, 1.0
        is_host_bound = 2 * self.clocks.find_critical_position() > self.first_read + self.end
        return (1.0, HIDDEN) if is_host_bound else (HIDDEN, 1.0)

    def compute_weighted_ms(self, cost: RecomputeCost) -> float:
        """Return the weighted sum of a cost's host and device time, for comparing moves before they are simulated."""
        host, device = self._weights
        return host * cost.host_ms + device * cost.ms

    def find_possible_operands(self, node: int) -> set[int]:
        """Return the nodes (values or calls) on whose state the cost of producing `node` can depend."""
        inputs = self.reruns.inputs
        if node >= self.n_values:
            return set(inputs[node - self.n_values])
        advanced_from = {value for call in self.reruns.by_result.get(node, ()) for value in inputs[call]}
        return advanced_from | self.values.collect_passed_and_operands(node)

    def _order_dependents_first(self) -> Ints:
        inputs, n_values = self.reruns.inputs, self.n_values
        dependents: dict[int, set[int]] = {node: set() for node in range(n_values + len(inputs))}
        for value, operands in enumerate(self.values.operands):
            for need in operands:
                dependents[need].add(value)
        for call, call_inputs in enumerate(inputs):
            dependents[n_values + call] |= self.reruns.restorable[call]
            for value in call_inputs:
                dependents[value].add(n_values + call)
                if self.reruns.result_value[call] >= 0:
                    dependents[value].add(self.reruns.result_value[call])
        try:
            return np.array(list(graphlib.TopologicalSorter(dependents).static_order()), np.int64)
        except graphlib.CycleError as error:
            raise contradiction(f"a replay needs its own results (nodes {error.args[1]})") from error
