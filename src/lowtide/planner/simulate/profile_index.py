"""Index a profile as checked arrays, for lookups by the simulator and the solvers. Nothing is decided here."""

from __future__ import annotations

import graphlib

import numpy as np
import numpy.typing as npt

from lowtide.planner.profile_checks import check, contradiction
from lowtide.planner.records import Profile, Slot
from lowtide.planner.simulate.recompute_cost import RecomputeCost, recompute_cost_of
from lowtide.planner.simulate.two_clocks import TwoClocks

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
HIDDEN = 0.25
"""Weight, when moves are compared, of time on the clock (host or device) that does not bound the plain step."""


class Index:
    """Facts of a profile that are independent of any decision.

    `slot_*` arrays have a row for each slot that holds memory of its own (`storage` is not None), in the order in which
    they are saved. Positions are cut off at the end of the step, `end`, which also means "never". Values and calls
    are the nodes of one graph: value v is node v, call c is node `n_values + c`. Raises LowtideError when the profile
    contradicts itself.
    """

    def __init__(self, profile: Profile) -> None:
        check(profile)
        slots = [slot for slot in profile.slots if slot.storage is not None]
        self.profile = profile
        self.end = len(profile.base_bytes)
        self.base = np.array(profile.base_bytes, np.int64)
        self.n_values = len(profile.values)

        self.storage_bytes = np.array([storage.bytes for storage in profile.storages], np.int64)
        self.bytes_of: list[int] = self.storage_bytes.tolist()
        self.allocated_at = np.minimum(
            np.array([storage.allocated_at for storage in profile.storages], np.int64), self.end
        )
        self.freed_at = np.clip(
            np.array([storage.freed_at for storage in profile.storages], np.int64), self.allocated_at, self.end
        )

        self.addresses = tuple(dict.fromkeys(slot.address for slot in profile.slots))
        self.address_index = {address: index for index, address in enumerate(self.addresses)}
        self.slot_address = np.array([self.address_index[slot.address] for slot in slots], np.int64)
        self.slot_value = np.array([slot.value for slot in slots], np.int64)
        self.slot_storage = np.array([slot.storage for slot in slots], np.int64)
        self.slot_call = np.array([slot.call for slot in slots], np.int64)
        self.slot_is_input = np.array([slot.is_input for slot in slots], np.bool_)
        self.slot_is_state = np.array([slot.is_state for slot in slots], np.bool_)
        self.slot_order = self._order_of_slots()
        """Rank of each slot by the moment at which it is filled. Inputs are filled when their call begins."""
        self.can_offload = profile.offload_bytes_per_ms is not None
        self.offload_ms = 2 * self.storage_bytes / (profile.offload_bytes_per_ms or np.inf)
        """Time to copy each storage to the host and back."""

        self._index_calls(profile)
        self.slot_within = np.where(self.slot_is_input, self.parent[self.slot_call], self.slot_call)
        """For each slot the call whose replay would restore it, or -1; an argument of a call is restored by the call
        around it.
        """
        self.slot_filled = np.where(self.slot_is_input, self.enter[self.slot_call] + 1, self.exit[self.slot_call])
        """For each slot a position by which it is filled."""
        self.n_saved = np.bincount(
            [slot.call for slot in profile.slots if not slot.is_input], minlength=len(profile.calls)
        )
        """For each call the number of tensors that it saves, parameters included."""
        self._index_values(profile, slots)
        self._index_inputs(slots)
        self.first_read = int(self.read.min(initial=self.end))
        """First position at which anything can be recomputed."""
        self.clocks = None if profile.clocks is None else TwoClocks(profile.clocks)
        """Clocks of host and device; None where all times add up."""
        self._weights = self._clock_weights()
        self.order = self._order_dependents_first()
        """Nodes, each after all nodes that could demand it."""

    def _order_of_slots(self) -> Ints:
        saved = ~self.slot_is_input
        order = 2 * np.cumsum(saved)
        calls = np.maximum.accumulate(self.slot_call[saved]) if saved.any() else self.slot_call[saved]
        order[~saved] = 2 * np.searchsorted(calls, self.slot_call[~saved]) + 1
        return order

    def _index_calls(self, profile: Profile) -> None:
        calls = profile.calls
        self.enter = np.array([call.enter for call in calls], np.int64)
        self.exit = np.array([call.exit for call in calls], np.int64)
        self.state_bytes = np.array([call.state_bytes for call in calls], np.int64)
        self.parent = np.array([-1 if call.parent is None else call.parent for call in calls], np.int64)
        self.ids = tuple(dict.fromkeys(call.id for call in calls))
        self.id_index = {id_: index for index, id_ in enumerate(self.ids)}
        self.calls_of_id: list[list[int]] = [[] for _ in self.ids]
        """Calls by id that may be replayed."""
        self.call_id = np.array([self.id_index[call.id] for call in calls], np.int64)
        self.replayable = np.array([call.refused is None for call in calls], np.bool_)
        self.around: list[tuple[int, ...]] = []
        """For each call the call itself and the calls around it, innermost first."""
        for index, call in enumerate(calls):
            if call.refused is None:
                self.calls_of_id[self.id_index[call.id]].append(index)
            self.around.append((index, *(() if call.parent is None else self.around[call.parent])))
        depth = np.array([len(around) for around in self.around], np.int64)
        self.by_depth = [np.flatnonzero(depth == at) for at in range(1, int(depth.max(initial=0)) + 1)]
        """Calls by depth: those without an enclosing call, those with one, and so on."""

    def _index_values(self, profile: Profile, slots: list[Slot]) -> None:
        values = profile.values
        saved = {slot.value for slot in profile.slots}
        fixed = saved - set(self.slot_value.tolist())
        self.value_storage = np.array([-1 if value.storage is None else value.storage for value in values], np.int64)
        for value, storage in zip(self.slot_value[::-1], self.slot_storage[::-1], strict=True):
            if values[value].storage is None:
                self.value_storage[value] = storage
        self.storage_of: list[int] = self.value_storage.tolist()
        self.value_bytes = [value.bytes for value in values]
        self.operands: list[tuple[int, ...]] = []
        """Operands as in the profile, without tensors that exist anyway."""
        self.recomputable = np.zeros(self.n_values, np.bool_)
        for index, value in enumerate(values):
            operands = tuple(need for need in value.operands if need not in fixed)
            self.operands.append(operands)
            reachable = all(self.value_storage[need] >= 0 or self.recomputable[need] for need in operands)
            self.recomputable[index] = value.recipe is not None and value.refused is None and reachable
        self.slot_recomputable = self.recomputable[self.slot_value]

        read = np.array([self.end if slot.need is None else slot.need for slot in slots], np.int64)
        release = np.array(
            [self.end if slot.release is None else min(slot.release, self.end) for slot in slots], np.int64
        )
        release = np.where(read < self.end, np.maximum(release, read + 1), release)
        self.slot_release = np.where(self.slot_is_input, 0, release)
        self.read = np.full(self.n_values, self.end, np.int64)
        """For each value the first position at which backward reads a saved tensor of it."""
        np.minimum.at(self.read, self.slot_value, np.where(self.slot_is_input, self.end, read))
        self.released = np.zeros(self.n_values, np.int64)
        """For each value the position at which its last saved tensor is released."""
        np.maximum.at(self.released, self.slot_value, self.slot_release)

        unsaved = np.array([index not in saved for index in range(self.n_values)], np.bool_)
        only_input = saved - fixed - {slot.value for slot in slots if not slot.is_input}
        self.may_pass = unsaved.copy()
        """Values that no slot holds, or only inputs of replays: recomputes go through them."""
        self.may_pass[list(only_input)] = True
        self.shared = self._flag_shared(saved - only_input)
        """Values with bytes of their own that several recomputes need, and that a slot holds in no or not in all
        plans.
        """
        self.recompute_costs = [self.recompute_cost(value, unsaved) for value in range(self.n_values)]
        """Cost of recomputing each value when every value with a slot exists."""
        self.shared_operands = [
            {need for need in cost.operands if self.shared[need] and self.value_storage[need] < 0}
            for cost in self.recompute_costs
        ]
        """Operands of each recompute that no slot holds and that others need too: computed once for all of them."""
        self.optional = [tuple(set(cost.operands) & only_input) for cost in self.recompute_costs]
        """Operands that only replays hold, as their inputs. Without such a replay `recompute_costs` leaves out their
        own cost.
        """

    def _index_inputs(self, slots: list[Slot]) -> None:
        calls = self.profile.calls
        input_row: dict[tuple[int, int], int] = {}
        for row, slot in enumerate(slots):
            if slot.is_input:
                input_row.setdefault((slot.call, slot.value), row)
        self.inputs: list[tuple[int, ...]] = [() for _ in calls]
        """For each call the values that a replay of it holds."""
        for call, value in input_row:
            self.inputs[call] += (value,)
        both = list(zip(self.inputs, calls, strict=True))
        self.replays = [RecomputeCost(inputs, c.cost_ms, c.flops, host_ms=c.host_ms) for inputs, c in both]
        self.advances = [
            RecomputeCost(inputs, c.advance_ms, c.advance_flops, host_ms=c.advance_host_ms) for inputs, c in both
        ]
        """Cost of running each call once more, except its memory."""
        self.restorable: list[set[int]] = [set() for _ in calls]
        """For each call the values that a replay of it can restore: saved or passed on in it, and produced in it."""
        follows = []
        for row, slot in enumerate(slots):
            for call in self.around[slot.call][1:] if slot.is_input else self.around[slot.call]:
                if (call, slot.value) in input_row:
                    follows.append((row, input_row[call, slot.value], call))
                elif (
                    not slot.is_state
                    and calls[call].enter <= self.allocated_at[self.slot_storage[row]] < calls[call].exit
                ):
                    self.restorable[call].add(slot.value)
        self.follower, self.followed, self.followed_in = np.array(follows, np.int64).reshape(-1, 3).T
        """Slots whose tensor is also an input of an enclosing call, as three columns: row of the slot, row of the
        input, the call. For each slot the innermost call comes first.
        """
        self.result_value: list[int] = [self._result_value_of(call) for call in range(len(calls))]
        """For each call the value that running it forward again produces, or -1."""
        self._calls_by_result: dict[int, list[int]] = {}
        """Calls by the value that running them forward again produces."""
        for call, value in enumerate(self.result_value):
            self._calls_by_result.setdefault(value, []).append(call)
        self.rows_within: list[list[int]] = [
            [] if value < 0 else [r for r in np.flatnonzero(self.slot_value == value).tolist() if self._is_in(call, r)]
            for call, value in enumerate(self.result_value)
        ]
        """For each call the slots inside it that hold its result value."""
        self.advances_of_id: list[list[int]] = [[] for _ in self.ids]
        """Calls by id that may be run forward again."""
        for call, value in enumerate(self.result_value):
            if value >= 0:
                self.advances_of_id[self.id_index[calls[call].id]].append(call)

    def _result_value_of(self, call: int) -> int:
        value = self.profile.calls[call].result_value
        if value is None or value in self.inputs[call] or self.value_storage[value] < 0:
            return -1
        return value if self.enter[call] <= self.allocated_at[self.value_storage[value]] < self.exit[call] else -1

    def _is_in(self, call: int, row: int) -> bool:
        return call in self.around[int(self.slot_call[row])]

    def _clock_weights(self) -> tuple[float, float]:
        """Return the weights of host and device in `weighted_ms`: the clock that the other one hides weighs less."""
        if self.clocks is None:
            return 0.0, 1.0
        is_host_bound = 2 * self.clocks.critical_position() > self.first_read + self.end
        return (1.0, HIDDEN) if is_host_bound else (HIDDEN, 1.0)

    def weighted_ms(self, cost: RecomputeCost) -> float:
        """Return one time for a cost on two clocks, to compare moves by before they are simulated."""
        host, device = self._weights
        return host * cost.host_ms + device * cost.ms

    def recompute_cost(self, value: int, passed: Flags) -> RecomputeCost:
        """Return the cost of recomputing `value` if values in `passed` are not held: they are computed on the way."""
        on_the_way = passed & self.recomputable & ~self.shared
        try:
            return recompute_cost_of(value, self.profile.values, self.operands, on_the_way)
        except RecursionError as error:
            raise contradiction(
                f"value {value} is computed through a longer chain of values than can be followed"
            ) from error

    def possible_operands(self, node: int) -> set[int]:
        """Return the nodes that the cost of producing `node` can depend on."""
        if node >= self.n_values:
            return set(self.inputs[node - self.n_values])
        nodes = {value for call in self._calls_by_result.get(node, ()) for value in self.inputs[call]}
        through = [node]
        for value in through:  # grows during the loop
            nodes.update(self.operands[value])
            through += [need for need in self.operands[value] if self.may_pass[need] and need not in through]
        return nodes

    def _flag_shared(self, saved: set[int]) -> Flags:
        """Flag recomputable values outside `saved` that several recomputes need, also through unsaved views of them."""
        needed_by = [0] * self.n_values
        for value in reversed(range(self.n_values)):
            is_view = value not in saved and not self.value_bytes[value]
            for need in self.operands[value] if self.recomputable[value] else ():
                needed_by[need] += needed_by[value] if is_view else 1
        counts = np.array(needed_by, np.int64)
        unsaved = np.array([value not in saved for value in range(self.n_values)], np.bool_)
        shared: Flags = self.recomputable & unsaved & (counts > 1) & (np.array(self.value_bytes, np.int64) > 0)
        return shared

    def _order_dependents_first(self) -> Ints:
        dependents: dict[int, set[int]] = {node: set() for node in range(self.n_values + len(self.inputs))}
        for value, operands in enumerate(self.operands):
            for need in operands:
                dependents[need].add(value)
        for call, inputs in enumerate(self.inputs):
            dependents[self.n_values + call] |= self.restorable[call]
            for value in inputs:
                dependents[value].add(self.n_values + call)
                if self.result_value[call] >= 0:
                    dependents[value].add(self.result_value[call])
        try:
            return np.array(list(graphlib.TopologicalSorter(dependents).static_order()), np.int64)
        except graphlib.CycleError as error:
            raise contradiction(f"a replay needs its own results (nodes {error.args[1]})") from error
