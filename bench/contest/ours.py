"""Lowtide on one model: rehearsed once, then planned, applied and measured for each budget."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import lowtide
from contest.records import Cell
from contest.step import Bits, Steps
from lowtide.planner import smallest_peak
from lowtide.planner.records import Plan, Profile
from lowtide.report.text import decisions


@dataclass(slots=True, eq=False)
class Ours:
    """A model that plans are put on, and its profile."""

    steps: Steps
    plain: Bits
    profile: Profile = field(init=False)
    rehearsal_seconds: float = field(init=False)

    def __post_init__(self) -> None:
        began = time.perf_counter()
        self.profile = lowtide.rehearse(self.steps.model, self.steps.step, self.steps.batch)
        self.rehearsal_seconds = time.perf_counter() - began

    def smallest_peak_bytes(self) -> int:
        """Of any plan that the planner finds."""
        return smallest_peak(self.profile)[1].peak_bytes

    @contextmanager
    def within(self, asked: Cell) -> Iterator[Cell]:
        """`asked` with what was measured within its budget; inside, the plan is in force.

        The same as `lowtide.fit`: a plan is made, the step is measured under it, and if its peak is above the budget
        `fit` goes on from there. What no plan reaches comes back with a `refusal`, and nothing is in force.
        """
        assert asked.budget_bytes is not None
        began = time.perf_counter()
        try:
            plan = lowtide.plan(self.profile, asked.budget_bytes)
        except lowtide.Infeasible as error:
            yield replace(asked, refusal=_first_line(error))
            return
        cell = replace(
            asked,
            plan_seconds=time.perf_counter() - began,
            predicted_peak_bytes=plan.predicted.peak_bytes,
            predicted_extra_ms=plan.predicted.extra_ms,
            predicted_extra_flops=plan.predicted.extra_flops,
            bound_ms=plan.bound_ms,
        )
        applied = lowtide.apply(self.steps.model, plan)
        try:
            cell = self._measured(cell, plan)
            if cell.peak_bytes is not None and cell.peak_bytes > asked.budget_bytes:
                applied.remove()
                fitted = self._fit(asked.budget_bytes)
                if isinstance(fitted, str):
                    yield replace(cell, refusal=fitted)
                    return
                applied = fitted.applied
                cell = replace(self._measured(cell, fitted.plan), repaired=True)
            yield cell
        finally:
            applied.remove()

    def _measured(self, cell: Cell, plan: Plan) -> Cell:
        measured = self.steps.measure(self.plain)
        return replace(cell, plan=decisions(plan), **measured.as_fields())

    def _fit(self, budget_bytes: int) -> lowtide.Fitted | str:
        steps = self.steps
        try:
            return lowtide.fit(steps.model, steps.step, steps.batch, budget=budget_bytes, profile=self.profile)
        except (lowtide.Infeasible, lowtide.OverBudget) as error:
            return _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".:")
