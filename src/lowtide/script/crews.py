"""What is done with the steps of a script: rehearse them, fit them into a budget, or put a plan in force."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lowtide.applying import Applied, apply
from lowtide.errors import Infeasible, RehearsalError, StalePlan
from lowtide.fitting import REPAIRS, over_budget
from lowtide.identity import fingerprint
from lowtide.levers import put_on
from lowtide.levers.lever import NoUse
from lowtide.planner import plan
from lowtide.rehearsal.checks import check_uncompiled
from lowtide.rehearsal.observed import PATIENCE, Observed
from lowtide.remat.given import no_larger, shapes_in
from lowtide.script.callers import models_at_hand
from lowtide.script.measured import Measured
from lowtide.script.steps import Enough
from lowtide.units import format_bytes, format_change, format_ratio, format_time

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.levers import PulledOn
    from lowtide.planner.records import Fingerprint, Plan, Profile, Pulled

TWO_STEPS = "was rehearsed: that takes two steps, and more where batches are of several sizes"

PASSED_OVER = (
    "another model is trained now, without a plan: a plan is for one model object, the first that was trained. Run "
    "each in a process of its own, or call lowtide.fit in the script"
)

MOST_UNUSABLE = 6
"""Steps that may be of no use before the rehearsal is given up."""

PLANS_AGAIN = "`lowtide run --budget`, which plans again until the measured peak is within it"

ONE_FORM = (
    "  Have the model do the same work in each step, or give a step of your own and the largest batch to "
    "lowtide.rehearse or lowtide.fit."
)


class Rehearsing:
    """Rehearses the model, and ends the script when that is done, unless `stop` is False."""

    awaits = TWO_STEPS

    def __init__(self, *, plain: bool = False, stop: bool = True, levers: tuple[Pulled, ...] = ()) -> None:
        self.done = False
        self.profile: Profile | None = None
        self._levers = levers
        self._on: PulledOn | None = None
        self.n_steps = 0
        """Steps that were seen to their end."""
        self._plain, self._stop = plain, stop
        self._observed: Observed | None = None

    def begins(self, model: nn.Module, batch: Any, optimizers: tuple[Optimizer, ...]) -> None:
        """Look at this step. Raises RehearsalError for a model that can't be planned for."""
        check_uncompiled(model)
        if self._observed is None:
            self._observed = Observed(model, plain=self._plain)
        if self._on is None:
            self._on = _put_on(model, self._levers)
        self._observed.begin(batch, optimizers, models_at_hand())

    def ends(self, model: nn.Module) -> None:
        """See whether that was enough. Raises RehearsalError where it will never be."""
        assert self._observed is not None
        self._observed.end()
        self.n_steps += 1
        if self._observed.profile is not None:
            self._finish(self._observed.profile)
            if self._stop:
                raise Enough
        elif len(self._observed.why) >= MOST_UNUSABLE:
            raise RehearsalError(
                f"of {self.n_steps} steps no two did the same work: {self._observed.why[-1]}.\n{ONE_FORM}"
            )
        elif self._observed.n_steps >= PATIENCE:
            raise RehearsalError(f"of {self.n_steps} steps no two were on batches of one form.\n{ONE_FORM}")

    def gives_up(self, model: nn.Module) -> None:
        """That model is not the one."""
        self.leaves()
        self._observed = None

    def loses_track(self, why: RehearsalError) -> None:
        """Without the end of a step there is no rehearsal."""
        raise why

    def passes_over(self) -> None:
        """Nothing: another model was not asked for."""

    def finish(self) -> None:
        """The largest size that came often enough is what was rehearsed, if none was before."""
        if self._observed is not None and not self.done:
            self._observed.finish()
            if self._observed.profile is not None:
                self._finish(self._observed.profile)

    def leaves(self) -> None:
        """Take everything out."""
        if self._observed is not None:
            self._observed.leave()
        if self._on is not None:
            self._on.remove()
            self._on = None

    def _finish(self, profile: Profile) -> None:
        assert self._on is not None
        try:
            self._on.check()
        except NoUse as why:
            raise RehearsalError(f"a lever that was asked for is of no use here: {why}. Leave it out.") from why
        self.profile, self.done = replace(profile, levers=self._levers), True

    @property
    def n_sizes(self) -> int:
        """How many sizes of batches there were."""
        return 0 if self._observed is None else self._observed.n_sizes


def _put_on(model: nn.Module, levers: tuple[Pulled, ...]) -> PulledOn:
    try:
        return put_on(model, levers, None)
    except NoUse as why:
        raise RehearsalError(f"a lever that was asked for can't be put on: {why}. Leave it out.") from why


class Fitting:
    """Rehearses the model, then has it run within `budget`: under a plan, whose first step is measured and repaired."""

    def __init__(self, budget: int | str, say: Callable[[str], None], levers: tuple[Pulled, ...] = ()) -> None:
        self.done = False
        self.plan: Plan | None = None
        self.when_kept: Callable[[Plan], object] = lambda plan: None
        """Called with the plan that stays in force: its peak is within the budget, or there was none to measure."""
        self._budget, self._say = budget, say
        self._rehearsing = Rehearsing(stop=False, levers=levers)
        self._applied: Applied | None = None
        self._over: list[int] = []
        """Peaks that were measured under plans, and were over the budget."""
        self._most = 0
        """The largest that was within it."""
        self._passed_over = 0
        """Steps under a plan, on other batches than the one that it is for."""
        self._is_planned = False
        """Whether this step is on such a batch."""
        self._told = False
        """Whether it was said that sizes vary."""
        self._open: Measured | None = None

    @property
    def awaits(self) -> str:
        if self.plan is None:
            return self._rehearsing.awaits
        return "took a step under its plan, which is for that one object: another of its class runs without"

    def begins(self, model: nn.Module, batch: Any, optimizers: tuple[Optimizer, ...]) -> None:
        """Rehearse this step, or run it under the plan and measure it."""
        if self.plan is None:
            self._rehearsing.begins(model, batch, optimizers)
            return
        self._rehearsing.leaves()
        if self._applied is None or self._applied.plan is not self.plan:
            self._put_in_force(model, self.plan)
        found, planned = fingerprint(model, batch).batch, self.plan.fingerprint.batch
        self._passed_over += found != planned
        if no_larger(shapes_in(found), shapes_in(planned)):
            assert self._applied is not None
            self._open = Measured(model, batch, optimizers, self._applied)
            self._is_planned = found == planned
        elif self._passed_over >= PATIENCE:
            self._keep(self.plan)

    def ends(self, model: nn.Module) -> None:
        """Plan, or see whether the plan kept its promise. Raises Infeasible and OverBudget."""
        if self.plan is None:
            self._rehearsing.ends(model)
            if self._rehearsing.n_sizes > 1 and not self._told:
                self._told = True
                self._say(f"batches are of several sizes: the largest of {PATIENCE} steps is planned for")
            if self._rehearsing.profile is not None:
                self.plan = plan(self._rehearsing.profile, self._budget)
                self._announce(self.plan)
        elif self._open is not None:
            step, self._open = self._open, None
            self._judge(self.plan, step.peak_bytes())

    def gives_up(self, model: nn.Module) -> None:
        """That model is not the one."""
        self._rehearsing.gives_up(model)

    def loses_track(self, why: RehearsalError) -> None:
        """Without the end of a step there is no rehearsal."""
        self._rehearsing.loses_track(why)

    def finish(self) -> None:
        """The plan stays in force, also where it had smaller batches only."""
        if self.plan is not None and self._passed_over and not self.done:
            self._keep(self.plan)

    def passes_over(self) -> None:
        """Say that there is no plan for what is trained."""
        self._say(PASSED_OVER)

    def leaves(self) -> None:
        """End what is in force for a step only; the plan stays."""
        self._rehearsing.leaves()
        if self._open is not None:
            self._open.leave()

    def _finish(self) -> None:
        """The plan stays in force; nobody here holds the model any longer."""
        self.done, self._applied, self._rehearsing = True, None, Rehearsing()

    def _keep(self, made: Plan) -> None:
        """The plan stays in force, of which no batch that it is for has come."""
        said = f"the largest measured peak is {format_bytes(self._most)}" if self._most else "no peak was measured"
        self._say(f"in {self._passed_over} steps under the plan no batch was as large as the one it is for: {said}")
        self.when_kept(made)
        self._finish()

    def _put_in_force(self, model: nn.Module, plan: Plan) -> None:
        if self._applied is not None:
            self._applied.remove()
        self._applied = apply(model, plan, say=self._say)

    def _announce(self, plan: Plan) -> None:
        from lowtide.report.text import decisions, lever_lines

        change = format_change(plan.plain.peak_bytes, plan.predicted.peak_bytes)
        self._say(
            f"{change} peak predicted (budget {format_bytes(plan.budget_bytes)}), "
            f"+{format_time(plan.predicted.extra_ms)} a step; in force from the next step on"
        )
        for line in (decisions(plan), *lever_lines(plan)):
            self._say(line)

    def _judge(self, made: Plan, measured_bytes: int) -> None:
        if measured_bytes <= made.budget_bytes:
            self._most = max(self._most, measured_bytes)
            if self._is_planned:
                share = format_ratio(measured_bytes / made.plain.peak_bytes)
                self._say(
                    f"measured {format_bytes(measured_bytes)} peak, {share} of the plain step's: within the budget"
                )
                self.when_kept(made)
                self._finish()
            elif self._passed_over >= PATIENCE:
                self._keep(made)
            return
        self._over.append(measured_bytes)
        over = measured_bytes - made.budget_bytes
        self._say(f"measured {format_bytes(measured_bytes)} peak, {format_bytes(over)} over the budget: planning again")
        assert self._rehearsing.profile is not None
        with contextlib.suppress(Infeasible):
            if len(self._over) < REPAIRS:
                lower = plan(self._rehearsing.profile, max(1, made.predicted.peak_bytes - over))
                self.plan = replace(lower, budget_bytes=made.budget_bytes)
                return
        raise over_budget(self._rehearsing.profile, made.budget_bytes, self._over)


class Applying:
    """Puts a plan that was made before in force on its model, before the first forward, and measures a step under it.

    That is the second of the first two on batches of the planned size: in the first an optimizer has no state yet. Of
    both, backward is compared with what was saved.
    """

    awaits = "was called as its plan has it"

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self.done = False
        self._plan, self._say = plan, say
        self._differences: tuple[str, ...] = ()
        self._model: nn.Module | None = None
        self._applied: Applied | None = None
        self._open: Measured | None = None
        self._peaks: list[int] = []
        self._n_others = 0
        """Steps on other batches, or of another model."""

    def begins(self, model: nn.Module, batch: Any, optimizers: tuple[Optimizer, ...]) -> None:
        """Put the plan in force if this is its model, on a batch that is not larger than the planned one; measure."""
        planned, found = self._plan.fingerprint, fingerprint(model, batch)
        if self._applied is None:
            self._put_in_force(model, found)
        if self._applied is None:
            return
        if model is self._model and found.batch == planned.batch:
            try:
                self._open = Measured(model, batch, optimizers, self._applied)
            except RehearsalError as why:
                self.loses_track(why)
        else:
            self._n_others += 1
            if self._n_others == PATIENCE:
                self._finish()

    def ends(self, model: nn.Module) -> None:
        """See whether the plan keeps its promise. Raises OverBudget; StalePlan if the trained model is not its own."""
        if self._applied is None:
            raise StalePlan(
                f"this plan is not for the {type(model).__name__} that the script trains.",
                differences=self._differences,
            )
        if self._open is not None:
            step, self._open = self._open, None
            self._peaks.append(step.peak_bytes())
            if len(self._peaks) == 2:
                self._finish()

    def loses_track(self, why: RehearsalError) -> None:
        """The plan stays in force, and is not measured."""
        self._say(f"the peak under the plan is not measured: {why}")
        self._leave_in_force()

    def finish(self) -> None:
        """What is in force stays so; say what there was to measure."""
        if self._applied is not None and not self.done:
            self._finish()

    def passes_over(self) -> None:
        """Say that there is no plan for what is trained."""
        self._say(PASSED_OVER)

    def gives_up(self, model: nn.Module) -> None:
        """That model is not the one."""
        self.leaves()

    def leaves(self) -> None:
        """End what is in force for a step only; the plan stays."""
        if self._open is not None:
            self._open.leave()
            self._open = None

    def _put_in_force(self, model: nn.Module, found: Fingerprint) -> None:
        planned = self._plan.fingerprint
        if no_larger(shapes_in(found.batch), shapes_in(planned.batch)):
            found = replace(found, batch=planned.batch)
        self._differences = planned.differences(found)
        if not self._differences:
            self._model, self._applied = model, apply(model, self._plan, say=self._say)
            self._say(
                f"the plan is in force: {format_bytes(self._plan.predicted.peak_bytes)} peak predicted "
                f"(budget {format_bytes(self._plan.budget_bytes)})"
            )

    def _finish(self) -> None:
        self._leave_in_force()
        if not self._peaks:
            self._say(f"no step like the planned one came in {self._n_others} steps: its peak was not measured")
        elif self._peaks[-1] <= self._plan.budget_bytes:
            self._say(f"measured {format_bytes(self._peaks[-1])} peak: within the budget")
        else:
            raise over_budget(self._plan, self._plan.budget_bytes, self._peaks[-1:], nearest=(PLANS_AGAIN,))

    def _leave_in_force(self) -> None:
        """Nobody here holds the model any longer."""
        self.leaves()
        self.done, self._model, self._applied = True, None, None
