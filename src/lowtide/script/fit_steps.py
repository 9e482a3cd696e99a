"""The steps of a script, fitted into a budget."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lowtide.api.apply import apply
from lowtide.api.fit import REPAIRS, over_budget
from lowtide.errors import Infeasible
from lowtide.memory.events import Busy
from lowtide.planner import plan
from lowtide.planner.planning import smallest_plan
from lowtide.profiler.online import NOT_RUN, PATIENCE
from lowtide.runtime.call_shapes import no_larger, shapes_in
from lowtide.runtime.fingerprint import fingerprint
from lowtide.script.alternating_models import PATIENCE as TURNS
from lowtide.script.alternating_models import others_at_hand
from lowtide.script.composite_model import name_of
from lowtide.script.plan_monitor import Measured, UnderPlan
from lowtide.script.rehearse_steps import Rehearsing
from lowtide.units import format_bytes, format_change, format_ratio, format_time

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.planner.records import AppliedLever, Plan


class Fitting(UnderPlan):
    """Rehearses the model, then has it run within `budget`: under a plan, whose first step is measured and repaired."""

    def __init__(
        self,
        budget: int | str,
        say: Callable[[str], None],
        levers: tuple[AppliedLever, ...] = (),
        *,
        in_place: bool = True,
    ) -> None:
        super().__init__(say)
        self.plan: Plan | None = None
        self.when_kept: Callable[[Plan], object] = lambda plan: None
        """Called with the plan that stays in force: its peak is within the budget, or there was none to measure."""
        self._budget = budget
        self._rehearsing = Rehearsing(stop=False, levers=levers, in_place=in_place)
        self._over: list[int] = []
        """Peaks that were measured under plans, and were over the budget."""
        self._told = False
        """Whether it was said that sizes vary."""
        self._preceding: Counter[str] = Counter()
        """By name, models before which steps have not begun."""
        self._n_waited = 0
        """Steps after the rehearsal in which others might have taken turns."""

    @property
    def awaits(self) -> str:
        if self.plan is None:
            return self._rehearsing.awaits
        return "took a step under its plan"

    def precedes(self, module: nn.Module) -> None:
        """Remember it: what it took is in no step."""
        self._preceding[name_of(module)] += 1

    def begins(self, model: nn.Module, batch: Any, optimizers: tuple[Optimizer, ...]) -> None:
        """Rehearse this step, or run it under the plan and measure it."""
        super().begins(model, batch, optimizers)
        if self.plan is None:
            hidden = self._rehearsing.n_hidden
            self._rehearsing.begins(model, batch, optimizers)
            if self._rehearsing.n_hidden == 1 > hidden:
                self._say("the script records by itself, as with a profiler: steps after that are rehearsed")
            return
        self._rehearsing.leaves()
        if self._applied is None or self._applied.plan is not self.plan:
            self._put_in_force(model, self.plan)
        found, planned = fingerprint(model, batch).batch, self.plan.fingerprint.batch
        self._n_others += found != planned
        if no_larger(shapes_in(found), shapes_in(planned)):
            assert self._applied is not None
            with contextlib.suppress(Busy):  # the script records this one by itself: another is measured
                self._open = Measured(model, batch, optimizers, self._applied)
            self._is_planned = found == planned
        elif self._n_others >= PATIENCE:
            self._keep(self.plan)

    def ends(self, model: nn.Module) -> None:
        """Plan, or see whether the plan kept its promise. Raises Infeasible and OverBudget."""
        if self.plan is None:
            self._rehearsing.ends(model)
            if self._rehearsing.n_sizes > 1 and not self._told:
                self._told = True
                self._say(
                    f"batches are of several sizes: the largest of at most {PATIENCE} steps is planned for, which take "
                    "longer than others"
                )
            if self._rehearsing.profile is not None and not self._awaits_others(model):
                self.plan = plan(self._rehearsing.profile, self._budget)
                self._announce(self.plan)
        elif self._open is not None:
            step, self._open = self._open, None
            self._judge(self.plan, step.peak_bytes())

    def _awaits_others(self, model: nn.Module) -> bool:
        """Whether a model that may take turns with this one is yet to be updated: one budget is for both."""
        self._n_waited += 1
        return self._n_waited <= TURNS and others_at_hand(model)

    def gives_up(self, model: nn.Module) -> None:
        """That model is not the one: what is trained instead is rehearsed anew."""
        super().gives_up(model)
        self._rehearsing.gives_up(model)
        if self.plan is not None:
            name = name_of(model)
            self._say(f"the plan for that {name} is given up: from here on another model is trained, and rehearsed")
        self.plan, self._over, self._n_waited = None, [], 0
        self._preceding.clear()

    def lets_go(self) -> None:
        """The plan stays in force; nobody here holds the model any longer."""
        super().lets_go()
        self._rehearsing = Rehearsing()

    def finish(self) -> None:
        """The plan stays in force, also where it had smaller batches only."""
        if self.plan is not None and self._n_others and not self.done:
            self._keep(self.plan)

    def leaves(self) -> None:
        """End what is in force for a step only; the plan stays."""
        super().leaves()
        self._rehearsing.leaves()

    def _keep(self, made: Plan) -> None:
        """The plan stays in force, of which no batch that it is for has come."""
        self._say_smaller_only()
        self.when_kept(made)
        self.done = True

    def _put_in_force(self, model: nn.Module, plan: Plan) -> None:
        if self._applied is not None:
            self._applied.remove()
        self._applied = apply(model, plan, say=self._say)

    def _announce(self, plan: Plan) -> None:
        from lowtide.report.text_table import decisions, lever_lines

        change = format_change(plan.plain.peak_bytes, plan.predicted.peak_bytes)
        self._say(
            f"{change} peak predicted (budget {format_bytes(plan.budget_bytes)}), "
            f"+{format_time(plan.predicted.extra_ms)} a step; in force from the next step on"
        )
        for line in (decisions(plan), *lever_lines(plan)):
            self._say(line)
        for name in [name for name, n in self._preceding.items() if n > 1]:
            self._say(
                f"note: {name} is called before the model in each step, and what it takes until then is not counted: "
                "lowtide.fit counts it"
            )
        for note in plan.notes:
            if note != NOT_RUN:
                self._say(f"note: {note}")

    def _judge(self, made: Plan, measured_bytes: int) -> None:
        if measured_bytes <= made.budget_bytes:
            self._most = max(self._most, measured_bytes)
            if self._is_planned:
                share = format_ratio(measured_bytes / made.plain.peak_bytes)
                self._say(
                    f"measured {format_bytes(measured_bytes)} peak, {share} of the plain step's: within the budget"
                )
                self.when_kept(made)
                self.done = True
            elif self._n_others >= PATIENCE:
                self._keep(made)
            return
        self._over.append(measured_bytes)
        over = measured_bytes - made.budget_bytes
        self._say(f"measured {format_bytes(measured_bytes)} peak, {format_bytes(over)} over the budget: planning again")
        assert self._rehearsing.profile is not None
        if len(self._over) < REPAIRS:
            try:
                lower = plan(self._rehearsing.profile, max(1, made.predicted.peak_bytes - over))
            except Infeasible:
                lower = smallest_plan(self._rehearsing.profile)
            if lower.decisions != made.decisions:
                self.plan = replace(lower, budget_bytes=made.budget_bytes)
                return
        raise over_budget(self._rehearsing.profile, made.budget_bytes, self._over)
