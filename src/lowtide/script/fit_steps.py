"""Fit the steps of a loop into a budget.

The first two steps are rehearsed, and a plan is made. It is in force from the third step on, which is measured: if its
peak is over the budget, another plan is made. A batch that is larger than the rehearsed ones runs under the plan
with the smallest peak; the next batch of that size is rehearsed, and from then on has its own plan, next to the one for
smaller batches.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import torch

from lowtide.api.apply import Applied
from lowtide.api.differing_bits import REFUSED, with_kept
from lowtide.api.fit import (
    COMPILED_REPAIRS,
    REPAIRS,
    as_measured,
    forecast_plan,
    over_budget,
    with_excess,
)
from lowtide.errors import Infeasible, LowtideError, OverBudget, RehearsalError
from lowtide.memory.device_budget import check_on_device, on_device
from lowtide.memory.events import Busy
from lowtide.planner import plan
from lowtide.planner.planning import forecast_peak, smallest_plan
from lowtide.planner.records import Plan
from lowtide.profiler.compiled_bits import compiled_bits
from lowtide.profiler.online import NOT_RUN, PATIENCE
from lowtide.profiler.other_memory import NOTEWORTHY
from lowtide.report.text_table import added_time, decisions, lever_lines, listed
from lowtide.runtime.call_shapes import no_larger, shapes_in
from lowtide.runtime.composite_model import name_of
from lowtide.runtime.engine import MEASURED
from lowtide.runtime.fingerprint import check_made_for, fingerprint, place_of
from lowtide.runtime.planned_engine import most_elements
from lowtide.script.alternating_models import PATIENCE as TURNS
from lowtide.script.alternating_models import caller_has_other_optimizers
from lowtide.script.compiled_checks import CompiledChecks, addresses_with_other_bits, error_of_other_bits
from lowtide.script.larger_batches import LargerBatches
from lowtide.script.later_steps import LaterSteps
from lowtide.script.plan_monitor import Measured, MeasuredSteps, PlanMonitor
from lowtide.script.rehearse_steps import Rehearsing
from lowtide.script.run_verdict import RunVerdict
from lowtide.units import format_bytes, format_change, format_ratio
from lowtide.utils.amounts import BudgetFor
from lowtide.utils.progress import Stage, showing

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.planner.records import AppliedLever, Profile, Static
    from lowtide.runtime.guards import Changed
    from lowtide.state.step_outcome import Outcome

OnInfeasible = Literal["raise", "smallest", "plain"]
"""Reactions to a budget that no plan fits: raise, continue under the plan with the smallest peak, or continue without a
plan.
"""

WHOLE_NEXT: Final = "That was inside compiled blocks: they are rehearsed again, to be replayed as a whole"
FIT_SUCH: Final = "To plan for them, give such a step to lowtide.fit; or give a smaller budget"
SMALLEST_FROM_NOW: Final = "The plan with the smallest peak is in force from now on"
SMALLEST_FOR_LARGER: Final = "The plan with the smallest peak is in force for these batches"


class _AppliedPlans(Applied):
    """Plans in force, and their rehearsals; both live as long as the model."""

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[Plan],
        say: Callable[[str], None],
        outgrown: Callable[[str], bool],
        changed: Changed,
        rehearsing: Rehearsing,
    ) -> None:
        super().__init__(model, plans, None, say, outgrown, changed)
        self.rehearsing = rehearsing
        self.profile = rehearsing.profile
        """The profile that the plan for the largest batches was made from."""


class Fitting(PlanMonitor):
    """A listener that rehearses the model, then runs it under a plan for `budget`; a measured excess is repaired."""

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
        self.plan: Plan | None = None
        """The plan for the largest batches so far."""
        self.verdict: RunVerdict | None = None
        self.model_name: str | None = None
        """The class of the planned model."""
        self.unplanned: str | None = None
        """The reason why training continues without a plan."""
        self.when_kept: Callable[[Plan], object] = lambda plan: None
        """Function called with the plan that stays in force, whose peak is within the budget or could not be measured.
        """
        self._budget, self._budget_for = budget, budget_for
        self._on_infeasible = on_infeasible
        self._takes_turns, self._progress = takes_turns, progress
        self._stage = contextlib.ExitStack()
        """Progress stage of the work in this step, if it is shown."""
        self._rehearsing = Rehearsing(stop=False, levers=levers, in_place=in_place)
        self._over: list[int] = []
        """Measured peaks of plans that were over the budget."""
        self._has_said_sizes = False
        """True once varying sizes have been reported."""
        self._preceding: Counter[str] = Counter()
        """Counts, by name, of models called between steps."""
        self._n_waited = 0
        """Number of steps after the rehearsal in which other models that take turns were waited for."""
        self._larger, self._later = LargerBatches(), LaterSteps()
        self._has_held = False
        """True once a plan was found to hold, also if another model is trained since."""
        self._checks = CompiledChecks(say)
        self._n_calls = self._n_planned_calls = 0
        """Number of calls of the model in this step, and in the rehearsed one."""
        self._has_said_calls = False
        """True once a step with more calls than the rehearsed one has been reported."""

    @property
    def n_missing(self) -> int:
        return 1 if self.plan is not None else self._rehearsing.n_missing + 1

    @property
    def awaits(self) -> str:
        if self.plan is None:
            return self._rehearsing.awaits
        return "took a step under its plan"

    @property
    def profile(self) -> Profile | None:
        """The profile of the rehearsed step; None once its plan is final."""
        return self._rehearsing.profile

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans in force, the one for the smallest batches first."""
        return (*self._larger.smaller, *([] if self.plan is None else [self.plan]))

    def precedes(self, module: nn.Module) -> None:
        """Count a model called between steps: its memory is outside all steps."""
        self._preceding[name_of(module)] += 1

    def begins(self, model: nn.Module, batch: Any, optimizers: tuple[Optimizer, ...]) -> None:
        """Rehearse this step, or run it under the plan and measure it."""
        super().begins(model, batch, optimizers)
        self._n_calls = 1
        self._larger.has_optimizers = bool(optimizers)
        if self.unplanned is not None:
            self._rehearsing.leaves()
            self.done = True
        elif self.plan is None:
            self.model_name = name_of(model)
            check_on_device(self._budget, place_of(model), self._budget_for)
            self._budget = on_device(self._budget, place_of(model), self._say)
            hidden, self._rehearsing.compiled = self._rehearsing.n_hidden, self.compiled
            self._shows(f"rehearsing {self.model_name}, step {self._rehearsing.n_steps + 1}", model)
            self._rehearsing.begins(model, batch, optimizers)
            if self._rehearsing.n_hidden == 1 > hidden:
                self._say("the script runs its own recorder, such as a profiler: steps after it are rehearsed")
        elif self._larger.is_awaited:
            self._looks_for_larger(self.plan, model, batch, optimizers)
        elif self._later.is_rehearsing:
            self._rehearse_again(model, batch, optimizers)
        elif self._later.is_measuring:
            self._measure_later(self.plan, model, batch, optimizers)
        else:
            made = self._put_in_force(model, batch)
            if made is not None:
                self._measure(made, model, batch, optimizers)
            elif self.unplanned is None:  # compiled blocks will be replayed
                self._rehearsing.begins(model, batch, optimizers)

    def continues(self, batch: Any) -> None:
        """Count a further call of the model in this step."""
        self._n_calls += 1

    def _measure(self, made: Plan, model: nn.Module, batch: Any, optimizers: tuple[Optimizer, ...]) -> None:
        assert self._in_force.applied is not None
        current, planned = fingerprint(model, batch).batch, made.fingerprint.batch
        self._measured.n_others += current != planned
        if current == planned or (not self._larger.smaller and no_larger(shapes_in(current), shapes_in(planned))):
            self._checks.begin_step()
            with contextlib.suppress(Busy):  # another recording by the script is active, so a later step is measured
                self._shows(f"verifying the plan for {self.model_name}", model)
                self._open = Measured(model, batch, optimizers, self._in_force.applied, self._budget_for)
            self._measured.is_planned = current == planned
        elif self._measured.n_others >= PATIENCE:
            self._keep(made)

    def _shows(self, doing: str, model: nn.Module) -> None:
        """Show the current work as a progress bar until the step ends."""
        self._stage.close()
        with showing(self._progress):
            self._stage.enter_context(Stage(doing, total=sum(1 for _ in model.modules())))

    def ends(self, model: nn.Module) -> None:
        """Make a plan, or check the plan's promise. Raises Infeasible and OverBudget."""
        self._stage.close()
        if self.unplanned is not None:
            return
        if self.plan is None:
            was_rehearsed = self._rehearsing.profile is not None
            self._rehearsing.ends(model)
            if not was_rehearsed:
                self._n_planned_calls = self._n_calls
            if self._rehearsing.n_sizes > 1 and not self._has_said_sizes:
                self._has_said_sizes = True
                self._say(
                    f"batches are of several sizes: up to {PATIENCE} steps are rehearsed, which take longer, and the "
                    "plan is for the largest of them"
                )
            if self._rehearsing.profile is not None and not self._awaits_others(model):
                self._make_plan(self._rehearsing.profile, model)
        elif self._larger.is_rehearsed:
            self._larger.is_rehearsed = False
            self._plan_for_larger(self.plan, model)
        elif self._larger.has_waited_enough:
            self._larger.end_wait()
            self.done = True
        elif self._later.is_rehearsing:
            self._plan_again(self.plan, model)
        elif self._later.is_measuring:
            self._judge_later(self.plan)
        elif self._open is not None:
            step, self._open = self._open, None
            measured_bytes = step.peak_bytes()
            if self._checks.can_judge(self.plan):
                over_bytes = measured_bytes - self.plan.budget_bytes
                if over_bytes > 0 and self._n_calls > self._n_planned_calls and not self._has_said_calls:
                    self._say_more_calls(over_bytes)
                else:
                    self._judge(self.plan, measured_bytes, model)

    def _say_more_calls(self, over_bytes: int) -> None:
        """Report a step that no other plan would bring within the budget, because it does more than planned."""
        self._has_said_calls = True
        calls = "1 call" if self._n_planned_calls == 1 else f"{self._n_planned_calls} calls"
        self._say(
            f"{self.model_name}: this step has {self._n_calls} calls of the model, and the plan is for steps with "
            f"{calls}: its peak is {format_bytes(over_bytes)} over the budget, and other such steps may be as well. "
            + (MEASURED if self._changed("step", "") else FIT_SUCH)
        )

    def _make_plan(self, profile: Profile, model: nn.Module) -> None:
        """Plan for `profile`, or react as `on_infeasible` says if no plan fits. Raises Infeasible."""
        self._say(f"rehearsed {self.model_name} in {self._rehearsing.n_steps} steps")
        try:
            with showing(self._progress), Stage("planning"):
                self.plan = forecast_plan(profile, self._budget) if profile.graphs else plan(profile, self._budget)
        except Infeasible as why:
            if not self._accepts_over(why, model):
                return
            self.plan = replace(smallest_plan(profile), budget_bytes=why.budget_bytes)
        self.plan = replace(self.plan, budget_for=self._budget_for)
        self._announce(self.plan)

    def _accepts_over(self, why: Infeasible, model: nn.Module) -> bool:
        """Return True if the plan with the smallest peak is to be in force above the budget, as `on_infeasible` says.

        Otherwise there is no plan from then on, or compiled blocks are rehearsed again. Raises `why`.
        """
        profile = self._rehearsing.profile
        if profile is not None and profile.graphs and self._rehearsing.replays_blocks(model):
            self._say(f"{_first_line(why)} {WHOLE_NEXT}")
            return False
        if self._on_infeasible == "raise":
            raise why
        if self._on_infeasible == "plain":
            self._go_on_plain(why)
            return False
        self._say(f"{_first_line(why)} As asked, the plan with the smallest peak is in force, above the budget")
        return True

    def _go_on_plain(self, why: LowtideError) -> None:
        self.unplanned = _first_line(why)
        self._say(f"{self.unplanned} Training continues without a plan, as asked")

    def _awaits_others(self, model: nn.Module) -> bool:
        """Return True if a model that may take turns with this one is yet to be updated: one budget is for both."""
        self._n_waited += 1
        return self._takes_turns and self._n_waited <= TURNS and caller_has_other_optimizers(model)

    def gives_up(self, model: nn.Module) -> None:
        """Forget `model`, which is not the trained one, and rehearse the model that is."""
        super().gives_up(model)
        self._stage.close()
        self._rehearsing.gives_up(model)
        if self.plan is not None:
            name = name_of(model)
            self._say(
                f"the plan for that {name} is removed: from here on the script trains another model, which is rehearsed"
            )
        self.plan, self.verdict, self.unplanned, self._over, self._n_waited = None, None, None, [], 0
        self._larger, self._later = LargerBatches(), LaterSteps()
        self._checks = CompiledChecks(self._say)
        self._preceding.clear()

    def lets_go(self) -> None:
        """Release the model; the plan stays in force."""
        if self._in_force.applied is not None:
            self._rehearsing.restart()  # frees the recording
        super().lets_go()
        self._rehearsing = Rehearsing()

    def finish(self) -> None:
        """Keep the plan in force, even if only smaller batches came."""
        self.done |= self._has_held
        if self.plan is not None and self._measured.n_others and not self.done and not self._larger.is_awaited:
            self._keep(self.plan)

    def leaves(self) -> None:
        """End recordings that are for one step only; the plan stays."""
        super().leaves()
        self._stage.close()
        self._rehearsing.leaves()

    def remove_plan(self) -> None:
        """Restore the model."""
        self._in_force.remove_all()

    def _keep(self, made: Plan) -> None:
        """Keep a plan in force although no batch of its size has come."""
        self._say(self._measured.in_words())
        self._stays(made, self._measured.most_bytes or None, is_of_planned_size=False)

    def _stays(self, made: Plan, measured_bytes: int | None, *, is_of_planned_size: bool) -> None:
        self.verdict = RunVerdict(
            budget_bytes=made.budget_bytes,
            predicted_peak_bytes=made.predicted.peak_bytes,
            measured_peak_bytes=measured_bytes,
            budget_for=self._budget_for,
            is_of_planned_size=is_of_planned_size,
            proof=self._checks.proof,
        )
        self.when_kept(made)
        profile = self._rehearsing.profile
        # what is left from the step before, as a graph that outlives it, depends on the plan that was in force then
        leaves_some = profile is not None and profile.static.carried_over >= NOTEWORTHY * profile.static.total
        self._later.plan_holds(is_sure=not leaves_some)
        self.done = self._has_held = True

    def _put_in_force(self, model: nn.Module, batch: Any) -> Plan | None:
        """Put the current plans in force on the model, unless they are already. Compiled code is compared on `batch`.

        Returns the plan that is in force then, if any.
        """
        assert self.plan is not None
        if self._in_force.applied is not None and self._in_force.applied.plan is self.plan:
            self._rehearsing.leaves()
            return self.plan
        self._in_force.remove()
        plain, code = None, self.compiled or model
        is_compared = self._checks.must_compare(self.plan)
        if is_compared:  # before the rehearsal ends, under which code has torch's own partition
            plain = compiled_bits(model, code, batch)
        self._rehearsing.leaves()
        if is_compared and not self._schedule(self.plan, model, batch):
            return None
        self._force(self.plan, model)
        if is_compared:
            kinds = self._checks.compare(self.plan, plain, model, code, batch)
            if kinds and plain is not None and (following := self._with_kept(self.plan, model, batch, plain)):
                self._force(following, model)
                kinds = self._checks.compare(following, plain, model, code, batch)
            if kinds and self.plan is not None:
                self._refuse(kinds, model)
        return self.plan

    def _force(self, made: Plan, model: nn.Module) -> None:
        """Put plans in force, the last of which is `made`."""
        self.plan = made
        if not self._later.has_begun:  # else the plan may stay on a model that has changed
            check_made_for(made.fingerprint, model)
        if self._budget_for == "reserved":
            torch.cuda.empty_cache()  # returns segments of rehearsed steps to the device
        applied = _AppliedPlans(model, self.plans, self._say, self._outgrown, self._changed, self._rehearsing)
        self._in_force.applied = applied
        self.repeats.guard(model, applied)

    def _schedule(self, made: Plan, model: nn.Module, batch: Any) -> bool:
        """Replace a plan for compiled code by the cheapest of a few whose code inductor schedules within the budget.

        Returns False if none is within the budget and no plan is to be in force, as `on_infeasible` says. Raises
        Infeasible.
        """
        best, why = self._checks.scheduled(made, self._rehearsing, model, self.compiled or model, batch)
        if why is not None:
            if self._later.has_begun:
                self._say(f"{_first_line(why)} {SMALLEST_FOR_LARGER}")
            elif not self._accepts_over(why, model):
                self.plan = None
                return False
        if best.decisions != made.decisions:
            self._say(decisions(best))
        self.plan = best
        return True

    def _with_kept(self, made: Plan, model: nn.Module, batch: Any, plain: Outcome) -> Plan | None:
        """Return a plan that keeps the values by which the bits under `made` differ from `plain`; None if none fits."""
        profile = self._rehearsing.profile
        if self._in_force.applied is None or profile is None or not made.recompute:
            return None
        self._in_force.remove()
        kept = addresses_with_other_bits(made, plain, model, self.compiled or model, batch)
        self._rehearsing.profile = with_kept(profile, kept)
        try:
            following = forecast_plan(self._rehearsing.profile, made.budget_bytes)
            self.plan = replace(following, budget_for=made.budget_for)
            if not self._schedule(self.plan, model, batch):
                return None
        except Infeasible as why:
            self._say(_first_line(why))
            return None
        self._say(f"kept: {listed(kept)} ({REFUSED})")
        return self.plan

    def _refuse(self, kinds: dict[str, tuple[str, ...]], model: nn.Module) -> None:
        """Take the plan off. Raises RehearsalError, or goes on without a plan as `on_infeasible` says."""
        why = error_of_other_bits(kinds)
        self._in_force.remove()
        if self._rehearsing.replays_blocks(model):
            self._say(f"{_first_line(why)} {WHOLE_NEXT}")
            self.plan, self._checks = None, CompiledChecks(self._say)
            return
        if self._on_infeasible != "plain":
            raise why
        self._go_on_plain(why)
        self.plan = None

    def _announce(self, plan: Plan) -> None:
        self.is_timed = True
        change = format_change(plan.plain.peak_bytes, plan.predicted.peak_bytes)
        self._say(
            f"{self.model_name}: {change} peak predicted (budget {format_bytes(plan.budget_bytes)}), "
            f"{added_time(plan.predicted.extra_ms, plan.step_ms)}; in force from the next step on"
        )
        for line in (decisions(plan), *lever_lines(plan)):
            self._say(line)
        if self._larger.smaller:
            return
        for name in [name for name, n in self._preceding.items() if n > 1]:
            another = "another " * (name in re.split(", | and ", str(self.model_name)))
            self._say(
                f"note: {another}{name} is called before the model in each step, and memory that it takes until then "
                "is not counted: lowtide.fit counts it"
            )
        for note in plan.notes:
            if note != NOT_RUN:
                self._say(f"note: {note}")

    def _judge(self, made: Plan, measured_bytes: int, model: nn.Module) -> None:
        if measured_bytes <= made.budget_bytes:
            self._measured.most_bytes = max(self._measured.most_bytes, measured_bytes)
            if self._measured.is_planned:
                if made.graphs and self._budget_for == "requested":
                    made = self._as_measured(made, measured_bytes)
                if self._budget_for == "reserved":  # for the plain step requested bytes are known only
                    what = "peak reserved"
                else:
                    what = f"peak, {format_ratio(measured_bytes / made.plain.peak_bytes)} of the plain step's"
                self._say(f"measured {format_bytes(measured_bytes)} {what}: within the budget")
                self._stays(made, measured_bytes, is_of_planned_size=True)
            elif self._measured.n_others >= PATIENCE:
                self._keep(made)
            return
        self._over.append(measured_bytes)
        over = measured_bytes - made.budget_bytes
        profile = self._rehearsing.profile
        assert profile is not None
        if len(self._over) < (COMPILED_REPAIRS if made.graphs else REPAIRS):
            aim_bytes = made.predicted.peak_bytes - over
            if made.graphs:
                aim_bytes = made.budget_bytes
                excess_bytes = measured_bytes - forecast_peak(profile, made)
                self._rehearsing.profile = profile = with_excess(profile, excess_bytes)
            try:
                lower = plan(profile, max(1, aim_bytes))
            except Infeasible:
                lower = smallest_plan(profile)
            if lower.decisions != made.decisions:
                self._say(
                    f"measured {format_bytes(measured_bytes)} peak, {format_bytes(over)} over the budget: planning "
                    "again"
                )
                self.plan = replace(lower, budget_bytes=made.budget_bytes, budget_for=made.budget_for)
                return
        why = over_budget(profile, made.budget_bytes, self._over, budget_for=self._budget_for)
        if made.graphs and self._rehearsing.replays_blocks(model):
            self._say(f"{_first_line(why)} {WHOLE_NEXT}")
            self._in_force.give_up()  # hooks may be changed in the next step
            self.plan, self._over = None, []
            self._checks = CompiledChecks(self._say)
            return
        self._stays_over(made, why)

    def _as_measured(self, made: Plan, measured_bytes: int) -> Plan:
        """Take the measured peak of compiled code as the plan's prediction, instead of the forecast."""
        assert self._in_force.applied is not None
        self.plan = self._checks.compared = self._in_force.applied.plan = made = as_measured(made, measured_bytes)
        return made

    def _stays_over(self, made: Plan, why: OverBudget) -> None:
        """Continue as `on_infeasible` says if no plan keeps to the budget. Raises OverBudget."""
        if self._on_infeasible == "raise" and not self._later.has_begun:
            raise why
        if self._on_infeasible == "plain" and not self._later.has_begun:
            self._go_on_plain(why)
            self._in_force.give_up()  # hooks may be changed in the next step
            self.plan = None
            return
        smallest = format_bytes(why.measured_peak_bytes)
        self._say(f"{_first_line(why)} Training continues under the plan with the smallest measured peak, {smallest}")
        self._stays(made, why.measured_peak_bytes, is_of_planned_size=self._measured.is_planned)

    # --- larger batches, later

    def wants_more(self) -> bool:
        """Return True if a batch exceeded all planned sizes, so that the next one of such a size is rehearsed, or if
        steps are to be measured or rehearsed again.
        """
        self._later.n_updates += 1  # this runs in every step, so it makes no calls
        if self._later.n_updates < self._later.due_at and not self._larger.is_outgrown:
            return False
        applied = self._in_force.resume()
        if not isinstance(applied, _AppliedPlans):
            return False
        self._rehearsing = applied.rehearsing
        if self._larger.is_outgrown:
            self._larger.is_outgrown = False
            self._larger.await_next()
        else:
            self._rehearsing.profile = applied.profile
            self._later.begin()
        self.done = False
        return True

    def passes_over(self) -> None:
        """Report that the trained model runs without a plan, and measure no more steps."""
        super().passes_over()
        self._later.end()

    def takes(self, step_ms: float) -> None:
        """Report the mean time of a step."""
        self.is_timed = False
        super().takes(step_ms)

    def _outgrown(self, what: str) -> bool:
        """Return True if the model gets another plan for a batch that is larger than the planned ones."""
        assert self.plan is not None
        if not self._larger.can_be_planned(self.plan):
            return False
        self._say(
            f"{self.model_name} {what}: the peak may be above the budget, though larger batches run under the plan "
            "with the smallest peak. The next one is rehearsed, for a separate plan"
        )
        self._larger.is_outgrown = True
        return True

    def _looks_for_larger(self, made: Plan, model: nn.Module, batch: Any, optimizers: tuple[Optimizer, ...]) -> None:
        """Rehearse this step if its batch exceeds those that `made` is for; else run it under its plan."""
        if not self._larger.has_come(made, batch):
            self._put_in_force(model, batch)
            return
        self._in_force.remove()
        try:
            self._rehearsing.begins(model, batch, optimizers)
            self._larger.is_rehearsed = True
        except RehearsalError as why:
            self._leave_growth(why)
            self._put_in_force(model, batch)

    def _plan_for_larger(self, made: Plan, model: nn.Module) -> None:
        """Plan for a larger batch once it was rehearsed often enough, so that the next one is measured."""
        try:
            self._rehearsing.ends(model)
        except RehearsalError as why:
            self._leave_growth(why)
        profile = self._rehearsing.profile
        if profile is None:
            return
        self._larger.count_plan()
        larger = self._plan_or_smallest(profile, made, SMALLEST_FOR_LARGER)
        if len(larger.input_shapes) == 1 and most_elements(larger) > most_elements(made):
            if not larger.graphs:  # compiled code has one partition for all sizes
                self._larger.smaller.append(made)
            self.plan = larger
            self._over, self._measured = [], MeasuredSteps()
            self._announce(larger)

    # --- other steps, later

    def _changed(self, kind: Literal["model", "step", "state"], what: str) -> bool:
        """Return True if the steps get another plan if they need one. See Changed."""
        assert self.plan is not None
        if not self._later.can_rehearse(self.plan):
            return False
        self._later.come_soon()
        self._later.is_different |= kind == "step"
        self._later.is_changed |= kind == "model"
        if kind == "model":
            self._say(f"{self.model_name} {what}: the peak may be above the budget until it is rehearsed again")
        return True

    def _measure_later(self, made: Plan, model: nn.Module, batch: Any, optimizers: tuple[Optimizer, ...]) -> None:
        """Measure this step if its batch is one that the plan in force is for."""
        current, planned = fingerprint(model, batch).batch, made.fingerprint.batch
        if current == planned or no_larger(shapes_in(current), shapes_in(planned)):
            assert self._in_force.applied is not None
            with contextlib.suppress(Busy):
                self._open = Measured(
                    model, batch, optimizers, self._in_force.applied, self._budget_for, is_checked=False
                )

    def _judge_later(self, made: Plan) -> None:
        """Compare a later step with the budget: plan again if more is in memory, rehearse again if it does more."""
        step, self._open = self._open, None
        if self._later.is_changed:
            if step is not None:
                step.leave()
            self._later.rehearse()
            return
        known_bytes = 0 if self.verdict is None else self.verdict.measured_peak_bytes or 0
        if step is None or (measured_bytes := step.peak_bytes()) <= max(made.budget_bytes, known_bytes):
            self._later.measured()
            self.done = not self._later.is_measuring
            return
        profile, static = self._rehearsing.profile, step.static
        added_bytes = 0 if profile is None else static.total - profile.static.total
        over = format_bytes(measured_bytes - made.budget_bytes)
        what = f"measured {format_bytes(measured_bytes)} peak, {over} over the budget"
        does_more = self._later.is_different or measured_bytes - made.predicted.peak_bytes > added_bytes
        if does_more and self._later.can_rehearse(made):
            self._say(
                f"{what}, in a step that does more than the rehearsed ones: the next ones are rehearsed, for a new plan"
            )
            self._later.rehearse()
            return
        self._later.stop_measuring()
        assert self.verdict is not None
        self.verdict = replace(self.verdict, measured_peak_bytes=measured_bytes)
        if added_bytes > 0:
            what += f": {format_bytes(added_bytes)} more is in memory when a step begins than when it was rehearsed"
        self._over = []
        if profile is None or made.graphs:
            self._say(what)
            self.done = True
        else:
            self._say(f"{what}; planning again")
            self._plan_for_added(made, profile, static, measured_bytes)

    def _plan_for_added(self, made: Plan, profile: Profile, static: Static, measured_bytes: int) -> None:
        """Plan again, with the memory from before a later step, `static`, and with what its peak had more than that."""
        before_bytes = profile.static.total
        if static.inputs == profile.static.inputs:
            profile = replace(profile, static=replace(static, margin=profile.static.margin))
        unknown_bytes = measured_bytes - made.predicted.peak_bytes - (profile.static.total - before_bytes)
        self._rehearsing.profile = profile = with_excess(profile, max(0, unknown_bytes))
        self._larger.smaller.clear()  # these plans do not count what was added either
        following = self._plan_or_smallest(profile, made, SMALLEST_FROM_NOW)
        self.done = following.decisions == made.decisions
        if not self.done:
            self.plan = following

    def _plan_or_smallest(self, profile: Profile, made: Plan, otherwise: str) -> Plan:
        """Return a plan for the budget of `made`, or say `otherwise` and return the one with the smallest peak."""
        try:
            following = plan(profile, made.budget_bytes)
        except Infeasible as why:
            following = smallest_plan(profile)
            self._say(f"{_first_line(why)} {otherwise}")
        return replace(following, budget_bytes=made.budget_bytes, budget_for=made.budget_for)

    def _rehearse_again(self, model: nn.Module, batch: Any, optimizers: tuple[Optimizer, ...]) -> None:
        """Rehearse this step; nothing is known of such steps."""
        if self._in_force.applied is not None:
            self._in_force.remove()
            self._rehearsing.gives_up(model)
        try:
            self._rehearsing.begins(model, batch, optimizers)
        except RehearsalError as why:
            self._leave_changed(why)
            self._put_in_force(model, batch)

    def _plan_again(self, made: Plan, model: nn.Module) -> None:
        """Plan for changed steps once they were rehearsed often enough, so that the next one is measured."""
        try:
            self._rehearsing.ends(model)
        except RehearsalError as why:
            self._leave_changed(why)
            return
        profile = self._rehearsing.profile
        if profile is None:
            return
        self._later.is_rehearsing = False
        self._n_planned_calls = self._n_calls
        self.plan = self._plan_or_smallest(profile, made, SMALLEST_FROM_NOW)
        self._larger = LargerBatches()
        self._larger.has_optimizers = True
        self._over, self._measured = [], MeasuredSteps()
        self._announce(self.plan)

    def _leave_changed(self, why: RehearsalError) -> None:
        """Leave changed steps without a plan of their own."""
        self._say(f"changed steps are not planned for: {why}")
        self._later.give_up()

    def _leave_growth(self, why: RehearsalError) -> None:
        """Leave larger batches under the plan with the smallest peak."""
        self._say(f"larger batches are not planned for: {why}")
        self._larger.give_up()


def check_on_infeasible(asked: str) -> OnInfeasible:
    """Return `asked` if it is a value of OnInfeasible; raise LowtideError otherwise."""
    known = get_args(OnInfeasible)
    if asked not in known:
        raise LowtideError(f"on_infeasible is {asked!r}; it takes one of {', '.join(map(repr, known))}.")
    return asked  # type: ignore[return-value]


def _first_line(why: LowtideError) -> str:
    text = str(why).partition("\n")[0]
    return f"{text[0].upper()}{text[1:]}"
