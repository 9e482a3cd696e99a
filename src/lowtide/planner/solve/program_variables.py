"""Numbers of the linear program's variables, and the ways in which each saved value can be restored."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from lowtide.planner.simulate.profile_index import Index

Floats = npt.NDArray[np.float64]
Row = tuple[Mapping[int, float], float]
"""Coefficients by variable, and an upper limit of their weighted sum."""


class Variables:
    """Numbers of the linear program's variables. Storage s has the numbers s (dropped) and `n_storages + s`
    (recomputed).
    """

    def __init__(self, index: Index) -> None:
        reruns, n = index.reruns, len(index.storages.bytes)
        replayed = [call for calls in reruns.replayed_by_id for call in calls if reruns.restorable[call]]
        numbers = itertools.count(2 * n)
        self.n_storages = n
        self.runs = dict(zip(replayed, numbers, strict=False))
        """The variable of each call that can be replayed."""
        self.passes = dict(zip(sorted(set().union(*index.values.shared_operands)), numbers, strict=False))
        """The variable of each value that is computed once for several recomputes."""
        self.advances = dict(zip(itertools.chain(*reruns.advanced_by_id), numbers, strict=False))
        """The variable of each call that can be advanced."""
        self.offloads = dict(zip(range(n if index.can_offload else 0), numbers, strict=False))
        """The variable of each storage that can be copied to the host."""
        self.n_decisions = next(numbers)
        self.time = None if index.clocks is None else self.n_decisions
        """The variable of the extra time, as a share of the most that all decisions could take; None without clocks."""
        self.n_fixed = self.n_decisions + (self.time is not None)


class SavedValues:
    """Values that slots save, by storage, and the recomputes, replays and advances that restore or need each."""

    def __init__(self, index: Index, variables: Variables) -> None:
        reruns, values = index.reruns, index.values
        rows = np.flatnonzero(~index.slots.is_input)
        pairs = set(zip(index.slots.storage[rows].tolist(), index.slots.value[rows].tolist(), strict=True))
        self.by_storage: list[list[int]] = [[] for _ in range(variables.n_storages)]
        for storage, value in sorted(pairs):
            self.by_storage[storage].append(value)
        self.sole = {storage: saved[0] for storage, saved in enumerate(self.by_storage) if len(saved) == 1}
        """The saved value of each storage that has exactly one saved value."""
        self.storage_of = {value: storage for storage, value in self.sole.items()}

        self.dependents: dict[int, list[int]] = {}
        """For each value, the saved values whose recompute needs it as an operand."""
        for value in self.sole.values():
            for operand in values.recompute_costs[value].operands if values.recomputable[value] else ():
                self.dependents.setdefault(operand, []).append(value)
        self.restoring_calls: dict[int, list[int]] = {}
        """For each value the calls whose replay restores it."""
        self.dependent_calls: dict[int, list[int]] = {}
        """For each value the calls whose replay needs it."""
        for call in variables.runs:
            for value in sorted(reruns.restorable[call]):
                self.restoring_calls.setdefault(value, []).append(call)
            for value in reruns.inputs[call]:
                self.dependent_calls.setdefault(value, []).append(call)
        self.advances: dict[int, list[int]] = {}
        """For each value, the variables of the calls of which it is the result, and which can be advanced."""
        for call, variable in variables.advances.items():
            self.advances.setdefault(reruns.result_value[call], []).append(variable)
