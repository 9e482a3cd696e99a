"""Fit the steps of a loop into a budget.

The first two steps are rehearsed, and a plan is made. It is in force from the third step on, which is measured: if its
peak is over the budget, another plan is made. A batch that is larger than the rehearsed ones runs under the plan
with the smallest peak; the next batch of that size is rehearsed, and from then on has its own plan, next to the one for
smaller batches.

`StepFitter` decides for each step whether it is rehearsed, measured or left alone. `ModelPlans` makes the plans and
puts them in force; `Replanner` replaces a plan that was kept after measured steps, for larger batches or changed steps.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch

from lowtide.api.plan_attempts import build_over_budget
from lowtide.errors import RehearsalError, StalePlan
from lowtide.memory.device_budget import check_on_device, on_device
from lowtide.memory.events import Busy
from lowtide.profiler.online import PATIENCE
from lowtide.runtime.call_arguments import collect_call_tensors
from lowtide.runtime.call_shapes import no_larger, parse_shapes
from lowtide.runtime.composite_model import find_name
from lowtide.runtime.fingerprint import find_device, fingerprint
from lowtide.runtime.known_calls import KnownCalls
from lowtide.runtime.plan_messages import MEASURED
from lowtide.script.alternating_models import PATIENCE as TURNS
from lowtide.script.alternating_models import caller_has_other_optimizers
from lowtide.script.compiled_checks import CompiledChecks
from lowtide.script.fit_request import FitRequest, OnInfeasible
from lowtide.script.model_plans import FIT_SUCH, BegunStep, ModelPlans, format_first_line
from lowtide.script.plan_monitor import Measured, MeasuredSteps, PlanMonitor
from lowtide.script.rehearse_steps import StepRehearser
from lowtide.script.replanning import DOES_MORE, Replanner
from lowtide.state.process_group import several_processes
from lowtide.units import format_bytes, format_ratio
from lowtide.utils.amounts import BudgetFor
from lowtide.utils.progress import Stage, showing

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.errors import OverBudget
    from lowtide.planner.records import AppliedLever, Plan

NEXT_REHEARSED: Final = (
    "another model is trained now: its next steps are rehearsed, for a plan of its own; those so far ran without a plan"
)
MOST_SHORT: Final = 3
"""Number of models with few steps after which no other model is planned: rehearsals would take much of the time."""
MOST_INEXACT: Final = 0.02
"""Largest share of a predicted peak by which a step of the rehearsed kind may be above it."""


class StepFitter(PlanMonitor):
    """A listener that rehearses the model, then runs it under a plan, and plans again if a peak is over the budget."""

    def __init__(
        self,
        budget: int | str,
        say: Callable[[str], None],
        levers: tuple[AppliedLever, ...] = (),
        *,
        budget_for: BudgetFor = "requested",
        in_place: bool = True,
        on_infeasible: OnInfeasible = "raise",
        takes_turns: bool = True,
        retry: bool = False,
        progress: bool = True,
    ) -> None:
        """Begin without a plan; wait for models that are trained alternately with this one only if `takes_turns`."""
        super().__init__(say, retry=retry)
        self.when_kept: Callable[[Plan], object] = lambda plan: None
        """Function called with the first model's plan that stays in force, whose peak is within the budget or could not
        be measured.
        """
        self._request = FitRequest(budget=budget, budget_for=budget_for, on_infeasible=on_infeasible)
        self._rehearsal_of_next = functools.partial(StepRehearser, stop=False, levers=levers, in_place=in_place)
        self._start_with(self._rehearsal_of_next())
        self._n_short = 0
        """Number of models that were trained for fewer than PATIENCE steps under their plans, before another one."""
        self._takes_turns, self._progress = takes_turns, progress
        self._stage = contextlib.ExitStack()
        """Progress stage of the work in this step, if it is shown."""
        self._has_rehearsed_others = False
        """True once steps were rehearsed because one did more than the rehearsed ones."""
        self._shows_ends = False
        """True if a step ends with each update by an optimizer."""
        self._has_said_sizes = False
        """True once varying sizes have been reported."""
        self._held: Plan | None = None
        """The last plan that was kept after measured steps, even if another model has been trained since."""

    def _start_with(self, rehearsing: StepRehearser) -> None:
        """Start over without plans, for a model that `rehearsing` has not rehearsed yet."""
        self._calls = KnownCalls()
        self.plans = ModelPlans(self._request, rehearsing, self._in_force, self.repeats, self._calls, self._say)
        self._replanning = Replanner(self.plans, self._in_force, self._request.budget_for, self._say)
        self._n_waited = 0
        """Number of steps after the rehearsal in which other models that take turns were waited for."""

    @property
    def plan_in_force(self) -> Plan | None:
        """The trained model's plan; None if it has none yet."""
        return self.plans.plan

    @property
    def n_missing(self) -> int:
        return 1 if self.plans.plan is not None else self.plans.rehearsing.n_missing + 1

    @property
    def awaits(self) -> str:
        if self.plans.plan is None:
            return self.plans.rehearsing.awaits
        return "took a step under its plan"

    def on_earlier_call(self, module: nn.Module) -> None:
        """Count a call of `module` between two steps: neither rehearsed nor measured steps include its memory."""
        self.plans.preceding[find_name(module)] += 1

    # --- a step begins

    def on_step_begin(self, model: nn.Module, batch: Any, optimizers: tuple[Optimizer, ...]) -> None:
        """Rehearse this step, or run it under the plan and measure it."""
        super().on_step_begin(model, batch, optimizers)
        code = model if self.compiled is None else self.compiled  # a compiled model without a length has no truth value
        plans, step = self.plans, BegunStep(model, batch, optimizers, code)
        self._calls.end_between()
        self._calls.begin_step()
        self._see_call(batch)
        plans.larger.has_optimizers = bool(optimizers)
        self._shows_ends = bool(optimizers) and not any(isinstance(o, torch.optim.LBFGS) for o in optimizers)
        if plans.unplanned is not None:
            plans.rehearsing.on_stop()
            self.done = True
        elif plans.plan is None:
            self._rehearse(step)
        elif plans.larger.is_awaited:
            self._replanning.look_for_larger(plans.plan, step)
        elif plans.later.is_rehearsing:
            self._replanning.rehearse(step)
        elif plans.later.is_measuring:
            self._open = self._replanning.measure(plans.plan, step)
        else:
            self._put_in_force(step)

    def on_further_call(self, batch: Any) -> None:
        """Count a further call of the model in this step."""
        self._calls.n += 1
        self._see_call(batch)

    def _see_call(self, batch: Any) -> None:
        """Record the form of a call, with the arguments `batch`, as one that occurs in rehearsed steps."""
        if self.plans.plan is None or self.plans.later.is_rehearsing:
            self._calls.see(None, collect_call_tensors(*batch), *batch)

    def on_inner_call(self, called: Callable[..., Any], batch: Any) -> None:
        """Pass a call inside a step on to the rehearsal, which may copy its arguments."""
        self.plans.rehearsing.on_inner_call(called, batch)

    def _put_in_force(self, step: BegunStep) -> None:
        """Put the plan in force, and measure this step. If the model has changed since its rehearsal, rehearse the step
        instead.
        """
        rehearsing = self.plans.rehearsing
        try:
            plan = self.plans.put_in_force(step)
        except StalePlan:
            self._say(f"{self.plans.name} has changed since it was rehearsed: it is rehearsed again")
            rehearsing.on_model_replaced(step.model)
            self._start_with(rehearsing)
            self._rehearse(step)
            return
        if plan is not None:
            self._measure(plan, step)
        elif self.plans.unplanned is None:  # compiled blocks will be replayed
            with self._may_go_on_plain():
                rehearsing.on_step_begin(step.model, step.batch, step.optimizers)

    def _rehearse(self, step: BegunStep) -> None:
        plans, place = self.plans, find_device(step.model)
        plans.name = find_name(step.model)
        check_on_device(self._request.budget, place, self._request.budget_for)
        self._request.budget = on_device(self._request.budget, place, self._say)
        rehearsing = plans.rehearsing
        n_hidden, rehearsing.compiled = rehearsing.n_hidden, self.compiled
        self._show(f"rehearsing {plans.name}, step {rehearsing.n_steps + 1}", step.model)
        with self._may_go_on_plain():
            rehearsing.on_step_begin(step.model, step.batch, step.optimizers)
        if rehearsing.n_hidden == 1 > n_hidden:
            self._say("the script runs its own recorder, such as a profiler: steps after it are rehearsed")

    @contextlib.contextmanager
    def _may_go_on_plain(self) -> Iterator[None]:
        """Within this block, continue without a plan if a rehearsal fails, unless the model is the first one."""
        try:
            yield
        except RehearsalError as why:
            if not self._request.is_for_next:
                raise
            self.plans.go_on_plain(why)

    def _measure(self, plan: Plan, step: BegunStep) -> None:
        """Begin to measure this step if its batch is no larger than the batches of `plan`, which is in force."""
        applied = self._in_force.applied
        assert applied is not None
        current, planned = fingerprint(step.model, step.batch).batch, plan.fingerprint.batch
        self._measured.n_others += current != planned
        if current == planned or (not self.plans.smaller and no_larger(parse_shapes(current), parse_shapes(planned))):
            self.plans.checks.begin_step()
            with contextlib.suppress(Busy):  # another recording by the script is active, so a later step is measured
                self._show(f"verifying the plan for {self.plans.name}", step.model)
                self._open = Measured(
                    step.model,
                    step.batch,
                    step.optimizers,
                    applied,
                    self._request.budget_for,
                    with_coming=self.plans.counts_coming,
                )
            self._measured.is_planned = current == planned
        elif self._measured.n_others >= PATIENCE:
            self._keep(plan)

    def _show(self, doing: str, model: nn.Module) -> None:
        """Show the current work as a progress bar until the step ends."""
        self._stage.close()
        with showing(self._progress):
            self._stage.enter_context(Stage(doing, total=sum(1 for _ in model.modules())))

    # --- a step ends

    def on_step_end(self, model: nn.Module) -> None:
        """Make a plan from rehearsed steps, or compare a measured peak with the budget.

        Raises Infeasible if no plan fits, and OverBudget if all measured peaks are over the budget.
        """
        self._stage.close()
        plans = self.plans
        plans.unlike.n_steps += 1
        if plans.unplanned is not None:
            return
        if plans.plan is None:
            self._plan_if_rehearsed(model)
        elif plans.larger.is_rehearsed:
            if self._replanning.plan_for_larger(plans.plan, model):
                self._start_measuring()
        elif plans.larger.has_waited_enough:
            plans.larger.end_wait()
            self.done = True
        elif plans.later.is_rehearsing:
            if self._replanning.plan_changed(plans.plan, model):
                self._calls.end_rehearsal()
                self._start_measuring()
        elif plans.later.is_measuring:
            step, self._open = self._open, None
            if step is not None and self._calls.is_unlike and not plans.later.is_different:
                plans.judge_unlike(step.peak_bytes())
                plans.later.measured()
                self.done = not plans.later.is_measuring
            else:
                self.done = self._replanning.judge(plans.plan, step)
        elif self._open is not None:
            step, self._open = self._open, None
            measured_bytes = step.peak_bytes()
            if self._calls.is_unlike:
                plans.judge_unlike(measured_bytes)
            elif plans.checks.end_step(plans.plan):
                self._judge(plans.plan, step, measured_bytes, model)

    def _plan_if_rehearsed(self, model: nn.Module) -> None:
        """Make the first plan once enough steps were rehearsed, and models that take turns have been waited for."""
        rehearsing = self.plans.rehearsing
        was_rehearsed = rehearsing.profile is not None
        with self._may_go_on_plain():
            rehearsing.on_step_end(model)
        if not was_rehearsed:
            self._calls.end_rehearsal()
        if rehearsing.n_sizes > 1 and not self._has_said_sizes:
            self._has_said_sizes = True
            self._say(
                f"batches are of several sizes: up to {PATIENCE} steps are rehearsed, which take longer, and the "
                "plan is for the largest of them"
            )
        if rehearsing.profile is not None and not self._wait_for_others(model):
            with showing(self._progress):
                self.plans.make(rehearsing.profile, model)
            self.is_timed |= self.plans.plan is not None

    def _wait_for_others(self, model: nn.Module) -> bool:
        """Count a step of waiting for models that may take turns with this one, because the plan has to cover them.

        Return False if there are no such models, or if enough steps were counted.
        """
        self._n_waited += 1
        return self._takes_turns and self._n_waited <= TURNS and caller_has_other_optimizers(model)

    def _start_measuring(self) -> None:
        """Begin to measure steps under a plan that has replaced another one."""
        self._measured, self.is_timed = MeasuredSteps(), True

    # --- a measured step is judged

    def _judge(self, plan: Plan, step: Measured, measured_bytes: int, model: nn.Module) -> None:
        """Keep a plan that is within the budget; replace one that is over it. Raises OverBudget."""
        over_bytes = measured_bytes - plan.budget_bytes
        if over_bytes <= 0:
            self._judge_within(plan, measured_bytes)
            return
        if self._calls.is_first_excess:
            self._calls.is_reported = True
            following = MEASURED if self.plans.changed("step", "") else FIT_SUCH
            self._say(
                f"{self.plans.name}: {self._calls.put_in_words()}: its peak is {format_bytes(over_bytes)} over the "
                f"budget, and other such steps may be as well. {following}"
            )
            return
        over, added_bytes = self.plans.over, self.plans.added_bytes(step.static)
        if self._does_more(plan, step, measured_bytes - added_bytes):
            self._say(
                f"measured {format_bytes(measured_bytes)} peak, {format_bytes(over_bytes)} over the budget, {DOES_MORE}"
            )
            self._rehearse_others(model)
            return
        over.append(measured_bytes)
        self._measured.n_planned = 0
        if self.plans.plan_lower(plan, measured_bytes, added_bytes):
            return
        profile = self.plans.profile
        assert profile is not None
        why = build_over_budget(
            profile, plan.budget_bytes, over, budget_for=self._request.budget_for, added_bytes=added_bytes
        )
        if plan.graphs and self.plans.replay_blocks_whole(why, model):
            self._in_force.give_up()  # hooks may be changed in the next step
            self.plans.over, self.plans.checks = [], CompiledChecks(self._say)
            return
        self._stays_over(plan, why)

    def _does_more(self, plan: Plan, step: Measured, measured_bytes: int) -> bool:
        """Return True if `step` saves what `plan` expects, but its backward may do more than in the rehearsed steps.

        Return False if several kinds of steps are known, or if another kind was already waited for.
        """
        profile, applied, predicted_bytes = self.plans.profile, self._in_force.applied, plan.predicted.peak_bytes
        assert profile is not None
        assert applied is not None
        are_known = profile.draws or self.plans.rehearsing.n_in_round > 1 or self._has_rehearsed_others
        if are_known or applied.drifted or plan.graphs or several_processes():
            return False
        is_beyond = measured_bytes - predicted_bytes > MOST_INEXACT * predicted_bytes
        return is_beyond and self.plans.rehearsing.may_differ(creates_graph=step.creates_graph)

    def _rehearse_others(self, model: nn.Module) -> None:
        """Rehearse the next steps, until a kind of step has run that was not rehearsed before."""
        self._has_rehearsed_others = True
        rehearsing = self.plans.rehearsing
        self._in_force.give_up()  # hooks may be changed in the next step
        rehearsing.on_steps_changed(model)
        self._start_with(rehearsing)

    def _judge_within(self, plan: Plan, measured_bytes: int) -> None:
        """Keep a plan that is within the budget, once a batch of its size, or many smaller batches, were measured."""
        self._measured.most_bytes = max(self._measured.most_bytes, measured_bytes)
        self._measured.n_planned += self._measured.is_planned
        if 0 < self._measured.n_planned < self.plans.rehearsing.n_in_round:
            return
        if self._measured.is_planned:
            if plan.graphs and self._request.budget_for == "requested":
                plan = self.plans.take_measured(plan, measured_bytes)
            if self._request.budget_for == "reserved":  # only the requested bytes of the plain step are known
                what = "peak reserved"
            else:
                what = f"peak, {format_ratio(measured_bytes / plan.plain.peak_bytes)} of the plain step's"
            self._say(f"measured {format_bytes(measured_bytes)} {what}: within the budget")
            self._stays(plan, measured_bytes, is_of_planned_size=True)
        elif self._measured.n_others >= PATIENCE:
            self._keep(plan)

    def _stays_over(self, plan: Plan, why: OverBudget) -> None:
        """Continue as `on_infeasible` says if every plan's measured peak is over the budget. Raises OverBudget."""
        has_begun = self.plans.later.has_begun
        if self._request.ends_training and not has_begun:
            raise why
        if self._request.on_infeasible == "plain" and not has_begun:
            self.plans.go_on_plain(why)
            self._in_force.give_up()  # hooks may be changed in the next step
            return
        smallest = format_bytes(why.measured_peak_bytes)
        self._say(
            f"{format_first_line(why)} Training continues under the plan with the smallest measured peak, {smallest}"
        )
        self._stays(plan, why.measured_peak_bytes, is_of_planned_size=self._measured.is_planned)

    def _keep(self, plan: Plan) -> None:
        """Keep a plan in force although no batch of its size was measured."""
        self._say(self._measured.put_in_words())
        self._stays(plan, self._measured.most_bytes or None, is_of_planned_size=False)

    def _stays(self, plan: Plan, measured_bytes: int | None, *, is_of_planned_size: bool) -> None:
        self.plans.hold(plan, measured_bytes, is_of_planned_size=is_of_planned_size)
        if not self._request.is_for_next:  # a saved plan is for the model that is trained first
            self.when_kept(plan)
        self._held, self.done = plan, True

    # --- between steps, and after them

    def on_model_replaced(self, model: nn.Module) -> None:
        """Forget `model`, which is not the trained model, and rehearse the trained one."""
        super().on_model_replaced(model)
        self._stage.close()
        self.plans.rehearsing.on_model_replaced(model)
        if self.plans.plan is not None:
            name = find_name(model)
            self._say(
                f"the plan for that {name} is removed: from here on the script trains another model, which is rehearsed"
            )
        self._start_with(self.plans.rehearsing)

    @property
    def plans_next(self) -> bool:  # type: ignore[override]
        """True if the next trained model gets a plan, too.

        The next model gets none if models are trained for a few steps each, or in several processes, because one
        process would plan alone.
        """
        return self._n_short < MOST_SHORT and not several_processes()

    def on_next_model(self) -> None:
        """Rehearse the model that is trained next; the last model's plan is removed if that model is alive."""
        self._n_short += self.plans.later.n_updates < PATIENCE
        self._in_force.resume()
        self._in_force.give_up()  # hooks may be changed in the next step
        self._request.is_for_next = True
        self._start_with(self._rehearsal_of_next())
        self._has_said_sizes, self.done = False, False
        self._start_measuring()
        self._say(NEXT_REHEARSED)

    def on_release(self) -> None:
        """Drop the references to the model; the plan stays in force."""
        self._calls.detach(shows_ends=self._shows_ends)
        self.plans.release()

    def on_later_update(self) -> bool:
        """Count an update under the plan; return True if more steps have to be observed.

        More steps are observed if a batch exceeded all planned sizes, or if later steps are due to be measured or
        rehearsed.
        """
        plans = self.plans
        plans.later.n_updates += 1  # this runs in every step, so it makes few calls
        plans.unlike.n_steps += 1
        self._calls.n_seen, self._calls.is_unlike = 0, False
        if plans.unlike.open is not None:
            plans.end_unlike()
        if plans.later.n_updates >= plans.later.counts_at:
            plans.later.count()
        if plans.later.n_updates < plans.later.due_at and not plans.larger.is_outgrown:
            return False
        if not plans.resume():
            return False
        self.done = False
        return True

    def on_timed(self, step_ms: float) -> None:
        """Report the mean time of a step."""
        self.is_timed = False
        super().on_timed(step_ms)

    def on_unplanned_model(self) -> None:
        """Report that the trained model runs without a plan, and measure no more steps."""
        super().on_unplanned_model()
        self.plans.later.end()

    def finish(self) -> None:
        """Keep the plan in force, even if only smaller batches were measured."""
        plan, measured = self.plans.plan, self._measured
        if plan is not None and plan is not self._held and not self.plans.larger.is_awaited:
            if measured.n_planned:
                self._stays(plan, measured.most_bytes, is_of_planned_size=True)
            elif measured.n_others:
                self._keep(plan)
        self.done |= self._held is not None

    def on_stop(self) -> None:
        """End the recording and the rehearsal of the current step; the plan stays in force."""
        super().on_stop()
        self._stage.close()
        self.plans.unlike.leave()
        self.plans.rehearsing.on_stop()

    def remove_plan(self) -> None:
        """Remove all plans, and so restore the models."""
        self._in_force.remove_all()
