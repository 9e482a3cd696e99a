"""Attempts to keep a budget: make plans, run a step under each to verify it, and build the error if none fits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from lowtide.api.verify import Verdict, compare_with_plain
from lowtide.errors import Infeasible, OverBudget, RehearsalError
from lowtide.levers.lever import StepContext
from lowtide.levers.selection import Choice
from lowtide.planner import plan
from lowtide.planner.planning import find_smallest_plan, plain_peak_bytes
from lowtide.planner.records import Plan, Profile
from lowtide.profiler import OTHER_WORK
from lowtide.state.step_outcome import unless_out_of_memory
from lowtide.units import format_bytes
from lowtide.utils.amounts import BudgetFor
from lowtide.utils.progress import Stage

REPAIRS = 4
"""Largest number of plans tried for a budget. Each further plan aims lower by the excess of the plan before."""
FORECAST_MARGIN = 1.2
"""Largest usual ratio of a peak that is forecast for compiled code to the measured peak."""
FORECAST_PEAK: Final = f"peak forecast, within {100 * (FORECAST_MARGIN - 1):.0f} % as a rule"
"""Name of the predicted peak of compiled code before it was measured."""


def plan_for(choice: Choice, aim_bytes: int, budget_bytes: int, offload: bool) -> Plan:
    """Make a plan that aims at a peak of `aim_bytes`, and states `budget_bytes` as its budget."""
    with Stage("planning") as stage:
        is_compiled = bool(choice.profile.graphs)
        attempt = (
            plan_by_forecast(choice.profile, aim_bytes)
            if is_compiled
            else plan(choice.profile, aim_bytes, offload=offload)
        )
        budget, predicted = format_bytes(budget_bytes), format_bytes(attempt.predicted.peak_bytes)
        stage.result = f"planned for {budget}: {predicted} {FORECAST_PEAK if is_compiled else 'peak predicted'}"
    return with_choice(choice, attempt, budget_bytes)


def with_choice(choice: Choice, plan: Plan, budget_bytes: int) -> Plan:
    """Return a copy of `plan` with the budget `budget_bytes`, and with the notes of `choice` on levers.

    Its `plain` is the prediction for the step without any lever.
    """
    return replace(plan, budget_bytes=budget_bytes, plain=choice.plain, notes=(*plan.notes, *choice.notes.values()))


def plan_by_forecast(profile: Profile, budget: int | str) -> Plan:
    """Make a plan for compiled code within the budget.

    If no plan fits, returns the plan with the smallest forecast if that is little above the budget: forecasts may be
    too high, and only compiling shows it. Raises Infeasible otherwise.
    """
    try:
        return plan(profile, budget)
    except Infeasible as why:
        if why.smallest_peak_bytes > FORECAST_MARGIN * why.budget_bytes:
            raise
        return replace(find_smallest_plan(profile), budget_bytes=why.budget_bytes)


def with_excess(profile: Profile, excess_bytes: int) -> Profile:
    """Return a copy of `profile` with all peaks raised by `excess_bytes`: a measured peak minus its forecast."""
    return replace(profile, static=replace(profile.static, margin=profile.static.margin + excess_bytes))


def prove(site: StepContext, plan: Plan) -> Verdict:
    """Run the step under the plan and without it, and compare. Raises RehearsalError if the step under the plan runs
    out of memory.
    """

    def build_no_room_error(said: str) -> RehearsalError:
        return RehearsalError(
            f"a step under a plan for {format_bytes(plan.budget_bytes)} ran out of memory: {said}\n"
            "  A device has to hold more than the step: a CUDA context, fragments between blocks, and other "
            "processes' memory. Give a smaller budget."
        )

    return unless_out_of_memory(
        lambda: compare_with_plain(site.model, site.step, site.batch, plan, site.optimizer), build_no_room_error
    )


def build_over_budget(
    plan: Profile | Plan,
    budget_bytes: int,
    measured: Collection[int],
    nearest: Collection[str] = (),
    *,
    budget_for: BudgetFor = "requested",
    added_bytes: int = 0,
) -> OverBudget:
    """Build the error for a budget that is exceeded by `measured`, the peaks in bytes of all plans that were tried.

    `added_bytes` counts memory in use when the last measured step began, beyond the memory in use in the rehearsal.
    """
    notes = plan.notes if any(OTHER_WORK in note for note in plan.notes) else (*plan.notes, OTHER_WORK)
    plain_bytes = plan.plain.peak_bytes if isinstance(plan, Plan) else plain_peak_bytes(plan)
    if budget_for == "reserved":
        notes = ("these are reserved bytes, with fragments that the allocator can't use", *notes)
    elif added_bytes > 0:
        notes = (describe_more_in_memory(added_bytes), *notes)
    elif min(measured) > plain_bytes:
        notes = (
            f"that is more than the plain step's {format_bytes(plain_bytes)}: this batch needs more than the "
            "rehearsed ones because of its contents, such as lengths, its step did more, such as a gradient penalty in "
            "some steps, or something else was in memory, such as the graph of a batch that was skipped before its "
            "backward (`lowtide watch` names what a script leaves there, and its holder)",
            *notes,
        )
    return OverBudget(budget_bytes=budget_bytes, measured_peak_bytes=min(measured), nearest=nearest, notes=notes)


def describe_more_in_memory(added_bytes: int) -> str:
    """Return a note: `added_bytes` more are in memory when a step begins than when it was rehearsed."""
    return f"{format_bytes(added_bytes)} more is in memory when a step begins than when it was rehearsed"


def list_differences(verdict: Verdict) -> str:
    """Format the kinds of results that differ in bits, such as `gradients (12, first fc1.weight), buffers (1, ...)`."""
    differing = verdict.comparable_differences.items()
    return ", ".join(f"{kind} ({len(names)}, first {names[0]})" for kind, names in differing)
