"""Measurements of Lowtide on one model: rehearsed once, then planned, applied and measured for each budget."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import lowtide
from contest.pieces import Taken
from contest.records import Cell
from contest.step import Bits, Measured, Steps
from lowtide.planner import find_smallest_peak
from lowtide.planner.records import Decisions, Plan, Profile
from lowtide.report.text_table import decisions

REPAIRS = 4
"""Largest number of further plans for one budget."""


@dataclass(slots=True, eq=False)
class Ours:
    """A model that plans are applied to, and its profile."""

    steps: Steps
    plain: Bits
    profile: Profile = field(init=False)
    rehearsal_seconds: float = field(init=False)
    _known: dict[Decisions, Measured] = field(init=False, default_factory=dict)
    """Measurements by decisions: plans for several budgets may decide the same."""

    def __post_init__(self) -> None:
        began = time.perf_counter()
        self.profile = lowtide.rehearse(self.steps.model, self.steps.step, self.steps.batch)
        self.rehearsal_seconds = time.perf_counter() - began

    def smallest_peak_bytes(self) -> int:
        """Return the smallest peak of any plan that the planner finds."""
        return find_smallest_peak(self.profile)[1].peak_bytes

    def within(self, asked: Cell) -> tuple[Cell, Plan | None]:
        """Plan for the budget of `asked` and measure; return the cell with its measurements, and the plan, no longer in
        force.

        As in `lowtide.fit`, a plan is made, the step is measured under it, and if its peak is above the budget the next
        plan aims lower by the excess. If no plan keeps to the budget, the cell has a `refusal`, and the plan is None.
        """
        assert asked.budget_bytes is not None
        began = time.perf_counter()
        try:
            plan = self._plan(asked, asked.budget_bytes)
        except lowtide.Infeasible as error:
            return replace(asked, refusal=_get_first_line(error)), None
        cell = replace(
            asked,
            plan_seconds=time.perf_counter() - began,
            predicted_peak_bytes=plan.predicted.peak_bytes,
            predicted_extra_ms=plan.predicted.extra_ms,
            predicted_extra_flops=plan.predicted.extra_flops,
            bound_ms=plan.bound_ms,
        )
        cell = self._measured(cell, plan)
        repairs = iter(range(REPAIRS))
        while (over := (cell.peak_bytes or 0) - asked.budget_bytes) > 0:
            try:
                next(repairs)
                plan = self._plan(asked, plan.predicted.peak_bytes - over)
            except (lowtide.Infeasible, StopIteration):
                return replace(asked, refusal=f"measured {over} bytes above the budget"), None
            cell = replace(self._measured(cell, plan), repaired=True)
        return cell, plan

    def _plan(self, asked: Cell, aim_bytes: int) -> Plan:
        """Make a plan with a peak of at most `aim_bytes`.

        It minimizes FLOPs if the cell's FLOPs are compared with a peer's or another budget's, and time otherwise.
        """
        for_flops = asked.kind in ("peer's peak", "ladder")
        return lowtide.plan(self.profile, aim_bytes, minimize="flops" if for_flops else "time")

    def _measured(self, cell: Cell, plan: Plan) -> Cell:
        if (measured := self._known.get(plan.decisions)) is None:
            with lowtide.apply(self.steps.model, plan):
                measured = self._known[plan.decisions] = self.steps.measure(self.plain)
        return replace(cell, plan=decisions(plan), **measured.as_fields())


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A model's steps under a plan, which is in force only during each step."""

    steps: Steps
    plan: Plan

    def taken(self) -> Taken:
        with lowtide.apply(self.steps.model, self.plan):
            return self.steps.taken()


def _get_first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".:")
