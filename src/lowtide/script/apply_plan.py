"""Run a script under an existing plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lowtide.api.apply import apply
from lowtide.api.plan_attempts import build_over_budget
from lowtide.errors import RehearsalError, StalePlan
from lowtide.memory.device_budget import check_on_device
from lowtide.profiler.online import PATIENCE
from lowtide.runtime.call_shapes import no_larger, parse_shapes
from lowtide.runtime.composite_model import CompositeModel, find_name, is_of_parts
from lowtide.runtime.fingerprint import describe_differences, find_device, fingerprint
from lowtide.script.plan_monitor import Measured, PlanMonitor
from lowtide.state.process_group import several_processes
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.planner.records import Fingerprint, Plan

MOST_MEASURED = 4
"""Largest number of repeated measurements, of which the smallest peak counts, if frees in other threads go unseen."""

PLANS_AGAIN = "`lowtide run --budget`, which plans again until the measured peak is within it"


def build_stale_plan(model: nn.Module, differences: tuple[str, ...]) -> StalePlan:
    """Build the error for a plan that is not for `model`, which the script trains; `differences` names the reasons."""
    what = f"this plan is not for the {find_name(model)} that the script trains. Make one with `lowtide plan make`."
    return StalePlan(what, differences=differences)


class PlanApplier(PlanMonitor):
    """A listener that puts an existing plan in force before the model's first forward, and measures a step under it.

    The measured step is the second on a batch of the planned size: in the first an optimizer has no state yet. A step
    in which DistributedDataParallel makes new buckets does not count. If there are no batches of that size, smaller
    ones are measured. In all measured steps the tensors read by backward are compared with the saved ones.

    On a CPU, gloo's threads free some of the sent tensors, which the recorder does not see. So with several processes a
    step above the budget is measured again, up to `MOST_MEASURED` times, and the smallest peak counts.
    """

    awaits = "was called as its plan has it"

    def __init__(self, plan: Plan, say: Callable[[str], None], *, retry: bool = False) -> None:
        super().__init__(say, retry=retry)
        self._plan = plan
        self._differences: tuple[str, ...] = ()
        self._model: nn.Module | None = None
        self._peaks: list[int] = []
        """Peaks of steps on batches of the planned size."""

    @property
    def plan_in_force(self) -> Plan:
        """The plan that is applied to the script's model."""
        return self._plan

    def on_step_begin(self, model: nn.Module, batch: Any, optimizers: tuple[Optimizer, ...]) -> None:
        """Put the plan in force if it was made for `model`; measure the step if its batch is no larger than planned."""
        planned, current = self._plan.fingerprint, fingerprint(model, batch)
        super().on_step_begin(model, batch, optimizers)
        if self._in_force.applied is None:
            self._put_in_force(model, current)
        if self._in_force.applied is None:
            return
        is_own = model is self._model
        self._measured.is_planned = is_own and current.batch == planned.batch
        self._measured.n_others += not self._measured.is_planned
        if is_own and no_larger(parse_shapes(current.batch), parse_shapes(planned.batch)):
            try:
                self._open = Measured(model, batch, optimizers, self._in_force.applied, self._plan.budget_for)
            except RehearsalError as why:
                self._report_unmeasured(why)
        elif self._measured.n_others >= PATIENCE:
            self._finish()

    def on_step_end(self, model: nn.Module) -> None:
        """Compare the measured peak with the plan's budget.

        Raises OverBudget if the peak is larger, and StalePlan if the plan is not for `model`.
        """
        if self._in_force.applied is None:
            self._measured.n_others += 1
            if (
                is_of_parts(self._plan.fingerprint)
                and type(model) is not CompositeModel
                and self._measured.n_others < PATIENCE
            ):
                return  # models that take turns are recognised later
            raise build_stale_plan(model, self._differences)
        if self._open is not None:
            step, self._open = self._open, None
            peak_bytes = step.peak_bytes()
            if not step.is_usual:
                return
            if self._measured.is_planned:
                self._peaks.append(peak_bytes)
            else:
                self._measured.most_bytes = max(self._measured.most_bytes, peak_bytes)
            if (
                self._is_judged(model)
                or self._measured.n_others >= PATIENCE
                or self._measured.most_bytes > self._plan.budget_bytes
            ):
                self._finish()

    def _is_judged(self, model: nn.Module) -> bool:
        """Return True if enough steps on batches of the planned size were measured."""
        n = len(self._peaks) - 1
        misses_frees = several_processes() and find_device(model).type == "cpu"
        return n >= (MOST_MEASURED if misses_frees and self._peak_bytes > self._plan.budget_bytes else 1)

    @property
    def _peak_bytes(self) -> int:
        """The smallest peak after the first step, in which an optimizer has no state yet; 0 without any peak."""
        return min(self._peaks[1:] or self._peaks, default=0)

    def _report_unmeasured(self, why: RehearsalError) -> None:
        """Report that the peak can't be measured, because of the error `why`; leave the plan in force."""
        self._say(f"the peak under the plan is not measured: {why}")
        self._leave_in_force()

    def on_release(self) -> None:
        """Drop the references to the model; the plan stays in force."""
        super().on_release()
        self._model = None

    def finish(self) -> None:
        """Leave the plan in force, and report the measurements."""
        if self._in_force.applied is not None and not self.done:
            self._finish()

    def on_model_replaced(self, model: nn.Module) -> None:
        """Look for the plan's model again, because `model` was not the trained model."""
        super().on_model_replaced(model)
        self._model, self._peaks = None, []

    def _put_in_force(self, model: nn.Module, current: Fingerprint) -> None:
        self._differences = describe_differences(self._plan.fingerprint, current)
        if not self._differences:
            check_on_device(self._plan.budget_bytes, find_device(model), self._plan.budget_for)
            self._model = model
            self._in_force.applied = applied = apply(model, self._plan, say=self._say)
            self.repeats.guard(model, applied)
            self._say(
                f"the plan is in force: {format_bytes(self._plan.predicted.peak_bytes)} peak predicted "
                f"(budget {format_bytes(self._plan.budget_bytes)})"
            )

    def _finish(self) -> None:
        self._leave_in_force()
        measured_bytes = max(self._measured.most_bytes, self._peak_bytes)
        if measured_bytes > self._plan.budget_bytes:
            raise build_over_budget(
                self._plan,
                self._plan.budget_bytes,
                [measured_bytes],
                nearest=(PLANS_AGAIN,),
                budget_for=self._plan.budget_for,
            )
        if self._peaks:
            reserved = " reserved" if self._plan.budget_for == "reserved" else ""
            self._say(f"measured {format_bytes(measured_bytes)} peak{reserved}: within the budget")
        else:
            self._say(self._measured.put_in_words())

    def _leave_in_force(self) -> None:
        self.on_stop()
        self.done = True
