"""Plan again for a model whose measured plan is kept: for larger batches, and for steps that need more memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from lowtide.api.plan_attempts import describe_more_in_memory, with_excess
from lowtide.errors import RehearsalError
from lowtide.memory.events import Busy
from lowtide.planner.planning import find_smallest_plan
from lowtide.runtime.call_shapes import no_larger, parse_shapes
from lowtide.runtime.fingerprint import fingerprint
from lowtide.runtime.planned_engine import find_most_elements
from lowtide.script.larger_batches import LargerBatches
from lowtide.script.model_plans import SMALLEST_FOR_LARGER
from lowtide.script.plan_monitor import Measured
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from torch import nn

    from lowtide.planner.records import Plan, Profile, Static
    from lowtide.script.model_plans import BegunStep, ModelPlans
    from lowtide.script.plan_monitor import InForce
    from lowtide.utils.amounts import BudgetFor

DOES_MORE: Final = "in a step that does more than the rehearsed ones: the next ones are rehearsed, for a new plan"
SMALLEST_FROM_NOW: Final = "The plan with the smallest peak is in force from now on"


class Replanner:
    """Measurements and rehearsals after the first plan of a model, each of which may replace the plan."""

    def __init__(self, plans: ModelPlans, in_force: InForce, budget_for: BudgetFor, say: Callable[[str], None]) -> None:
        self._plans, self._in_force, self._budget_for, self._say = plans, in_force, budget_for, say

    # --- for larger batches

    def look_for_larger(self, plan: Plan, step: BegunStep) -> None:
        """Rehearse this step if its batch exceeds the batches that `plan` covers; else run it under its plan."""
        if not self._plans.larger.look_at(plan, step.batch):
            self._plans.put_in_force(step)
            return
        self._in_force.remove()
        try:
            self._plans.rehearsing.on_step_begin(step.model, step.batch, step.optimizers)
            self._plans.larger.is_rehearsed = True
        except RehearsalError as why:
            self._leave_growth(why)
            self._plans.put_in_force(step)

    def plan_for_larger(self, plan: Plan, model: nn.Module) -> bool:
        """Make a plan for larger batches once enough of them were rehearsed. Returns True if `plan` was replaced."""
        plans = self._plans
        plans.larger.is_rehearsed = False
        try:
            plans.rehearsing.on_step_end(model)
        except RehearsalError as why:
            self._leave_growth(why)
        if plans.profile is None:
            return False
        plans.larger.count_plan()
        larger = plans.plan_or_smallest(plans.profile, plan, SMALLEST_FOR_LARGER)
        if len(larger.input_shapes) != 1 or find_most_elements(larger) <= find_most_elements(plan):
            return False
        if not larger.graphs:  # compiled code has one partition for all sizes
            plans.smaller.append(plan)
        plans.plan, plans.over = larger, []
        plans.announce(larger)
        return True

    def _leave_growth(self, why: RehearsalError) -> None:
        """Make no plans for larger batches, because of the error `why`; such batches run under the plan with the
        smallest peak.
        """
        self._say(f"larger batches are not planned for: {why}")
        self._plans.larger.give_up()

    # --- for steps that need more memory

    def measure(self, plan: Plan, step: BegunStep) -> Measured | None:
        """Begin to measure this step if `plan`, which is in force, covers its batch; return the recording, or None."""
        current, planned = fingerprint(step.model, step.batch).batch, plan.fingerprint.batch
        if current == planned or no_larger(parse_shapes(current), parse_shapes(planned)):
            applied = self._in_force.applied
            assert applied is not None
            with contextlib.suppress(Busy):
                return Measured(
                    step.model,
                    step.batch,
                    step.optimizers,
                    applied,
                    self._budget_for,
                    is_checked=False,
                    with_coming=self._plans.counts_coming,
                )
        return None

    def judge(self, plan: Plan, step: Measured | None) -> bool:
        """Compare a later step's peak with the budget; if it is over the budget, plan or rehearse again.

        If the step began with more memory, the next plan counts it; if the step itself needs more, steps are rehearsed.
        Returns True if no further step has to be observed for now.
        """
        later = self._plans.later
        if later.is_changed:
            if step is not None:
                step.leave()
            later.rehearse()
            return False
        verdict = self._plans.verdict
        known_bytes = 0 if verdict is None else verdict.measured_peak_bytes or 0
        if step is None or (measured_bytes := step.peak_bytes()) <= max(plan.budget_bytes, known_bytes):
            later.measured()
            return not later.is_measuring
        profile, static = self._plans.profile, step.static
        added_bytes = 0 if profile is None else static.total - profile.static.total
        over = format_bytes(measured_bytes - plan.budget_bytes)
        what = f"measured {format_bytes(measured_bytes)} peak, {over} over the budget"
        does_more = later.is_different or measured_bytes - plan.predicted.peak_bytes > added_bytes
        if does_more and later.can_rehearse(plan):
            self._say(f"{what}, {DOES_MORE}")
            later.rehearse()
            return False
        later.stop_measuring()
        assert verdict is not None
        self._plans.verdict = replace(verdict, measured_peak_bytes=measured_bytes)
        if added_bytes > 0:
            what += f": {describe_more_in_memory(added_bytes)}"
        self._plans.over = []
        if profile is None or plan.graphs:
            self._say(what)
            return True
        self._say(f"{what}; planning again")
        return not self._plan_for_added(plan, profile, static, measured_bytes)

    def _plan_for_added(self, plan: Plan, profile: Profile, static: Static, measured_bytes: int) -> bool:
        """Plan again after a step over the budget: count `static`, the memory before it, and the rest of the excess.

        Returns True if `plan` was replaced.
        """
        before_bytes = profile.static.total
        if static.inputs == profile.static.inputs:
            profile = replace(profile, static=replace(static, margin=profile.static.margin))
        unknown_bytes = measured_bytes - plan.predicted.peak_bytes - (profile.static.total - before_bytes)
        profile = with_excess(profile, max(0, unknown_bytes))
        self._plans.rehearsing.profile = profile
        self._plans.smaller.clear()  # these plans do not count what was added either
        following = self._plans.plan_or_smallest(profile, plan, SMALLEST_FROM_NOW)
        if following.decisions == plan.decisions:
            return False
        self._plans.plan = following
        return True

    def rehearse(self, step: BegunStep) -> None:
        """Rehearse this step from scratch, without the results of earlier rehearsals."""
        if self._in_force.applied is not None:
            self._in_force.remove()
            rehearsing = self._plans.rehearsing
            forget = (
                rehearsing.on_steps_changed if self._plans.later.awaits_another_kind else rehearsing.on_model_replaced
            )
            forget(step.model)
        try:
            self._plans.rehearsing.on_step_begin(step.model, step.batch, step.optimizers)
        except RehearsalError as why:
            self._leave_changed(why)
            self._plans.put_in_force(step)

    def plan_changed(self, plan: Plan, model: nn.Module) -> bool:
        """Make a plan for changed steps once enough of them were rehearsed. Returns True if `plan` was replaced."""
        plans = self._plans
        try:
            plans.rehearsing.on_step_end(model)
        except RehearsalError as why:
            self._leave_changed(why)
            return False
        if plans.profile is None:
            return False
        plans.later.is_rehearsing = False
        plans.rehearsing.tell_kinds(plans.unlike.calls)
        plans.plan = plans.plan_or_smallest(plans.profile, plan, SMALLEST_FROM_NOW)
        if plans.plan.decisions == plan.decisions and plans.later.awaits_another_kind:
            self._say(f"no step that does more came again while steps were rehearsed. {SMALLEST_FROM_NOW}")
            smallest = find_smallest_plan(plans.profile)
            plans.plan = replace(smallest, budget_bytes=plan.budget_bytes, budget_for=plan.budget_for)
        plans.smaller, plans.larger, plans.over = [], LargerBatches(), []
        plans.larger.has_optimizers = True
        plans.announce(plans.plan)
        return True

    def _leave_changed(self, why: RehearsalError) -> None:
        """Leave changed steps without a plan of their own, because of the error `why`."""
        self._say(f"changed steps are not planned for: {why}")
        self._plans.later.give_up()
