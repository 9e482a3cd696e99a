"""Values of a profile: the positions at which backward reads each, and the cost of recomputing it."""

from __future__ import annotations

import numpy as np

from lowtide.planner.profile_checks import contradiction
from lowtide.planner.records import Profile
from lowtide.planner.simulate.profile_tables import Flags, Ints, SlotTable
from lowtide.planner.simulate.recompute_cost import RecomputeCost, compute_recompute_cost


class ValueTable:
    """Values of a profile, a row each."""

    def __init__(self, profile: Profile, slots: SlotTable, end: int) -> None:
        self._values = profile.values
        n = len(profile.values)
        saved = {slot.value for slot in profile.slots}
        held_anyway = saved - set(slots.value.tolist())
        only_inputs = saved - held_anyway - set(slots.value[~slots.is_input].tolist())
        unsaved = np.array([value not in saved for value in range(n)], np.bool_)

        self.storage = self._storages(slots)
        """Storage of each value: its own, else the storage of the first slot that saves it, else -1."""
        self.storage_of: list[int] = self.storage.tolist()
        """`storage` as Python integers, which loops read faster."""
        self.bytes_of = [value.bytes for value in profile.values]
        self.operands = [tuple(need for need in value.operands if need not in held_anyway) for value in profile.values]
        """Operands as in the profile, without tensors that exist anyway, such as parameters."""
        self.recomputable = self._flag_recomputable()

        self.read_at = np.full(n, end, np.int64)
        """First position at which backward reads a saved tensor of each value."""
        np.minimum.at(self.read_at, slots.value, slots.read_at)
        self.released_at = np.zeros(n, np.int64)
        """Position at which the last saved tensor of each value is released."""
        np.maximum.at(self.released_at, slots.value, slots.released_at)

        self.may_pass = unsaved.copy()
        """Values that no slot holds, or only slots for inputs of replays: recomputes compute them on the way."""
        self.may_pass[list(only_inputs)] = True
        self.shared = self._flag_shared(saved - only_inputs)
        """Values with bytes of their own that several recomputes need, and that no slot holds, in some or in all
        plans.
        """
        self.recompute_costs = [self.recompute_cost(value, unsaved) for value in range(n)]
        """Cost of recomputing each value when every value with a slot exists."""
        self.shared_operands = [
            {need for need in cost.operands if self.shared[need] and self.storage[need] < 0}
            for cost in self.recompute_costs
        ]
        """Operands of each recompute that no slot holds and that other recomputes need too: computed once for all."""
        self.optional_operands = [tuple(set(cost.operands) & only_inputs) for cost in self.recompute_costs]
        """Operands of each recompute that only replays hold, as their inputs. Without such a replay, the operand has to
        be recomputed too, which `recompute_costs` leaves out.
        """

    def __len__(self) -> int:
        return len(self._values)

    def _storages(self, slots: SlotTable) -> Ints:
        storages = np.array([-1 if value.storage is None else value.storage for value in self._values], np.int64)
        for value, storage in zip(slots.value[::-1], slots.storage[::-1], strict=True):
            if self._values[value].storage is None:
                storages[value] = storage
        return storages

    def _flag_recomputable(self) -> Flags:
        """Flag values with a usable recipe whose operands are held by a slot or can be recomputed."""
        recomputable = np.zeros(len(self), np.bool_)
        for index, value in enumerate(self._values):
            is_reachable = all(self.storage[need] >= 0 or recomputable[need] for need in self.operands[index])
            recomputable[index] = value.recipe is not None and value.refused is None and is_reachable
        return recomputable

    def _flag_shared(self, saved: set[int]) -> Flags:
        """Flag recomputable values outside `saved` that several recomputes need, also through unsaved views of them."""
        needed_by = [0] * len(self)
        for value in reversed(range(len(self))):
            is_view = value not in saved and not self.bytes_of[value]
            for need in self.operands[value] if self.recomputable[value] else ():
                needed_by[need] += needed_by[value] if is_view else 1
        counts = np.array(needed_by, np.int64)
        unsaved = np.array([value not in saved for value in range(len(self))], np.bool_)
        shared: Flags = self.recomputable & unsaved & (counts > 1) & (np.array(self.bytes_of, np.int64) > 0)
        return shared

    def recompute_cost(self, value: int, passed: Flags) -> RecomputeCost:
        """Return the cost of recomputing `value`, including recomputes of the values that it needs and that `passed`
        flags.
        """
        on_the_way = passed & self.recomputable & ~self.shared
        try:
            return compute_recompute_cost(value, self._values, self.operands, on_the_way)
        except RecursionError as error:
            raise contradiction(
                f"value {value} is computed through a longer chain of values than can be followed"
            ) from error

    def collect_passed_and_operands(self, value: int) -> set[int]:
        """Return all values that a recompute of `value` can read, or compute on the way."""
        operands, through = set[int](), [value]
        for passed in through:  # grows during the loop
            operands.update(self.operands[passed])
            through += [need for need in self.operands[passed] if self.may_pass[need] and need not in through]
        return operands
