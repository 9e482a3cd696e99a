"""`lowtide.within`: keep any training loop of this process within a memory budget."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Self

from lowtide.api.fitted import check_has_no_plan
from lowtide.errors import LowtideError
from lowtide.levers import parse_script_lever
from lowtide.memory.device_budget import check_on_device
from lowtide.profiler.preconditions import check_is_module
from lowtide.report.text_table import decisions, format_extra_time, format_lever_lines
from lowtide.runtime.fingerprint import find_device
from lowtide.script.calling_code import end_search_here
from lowtide.script.fit_request import OnInfeasible, check_on_infeasible
from lowtide.script.fit_steps import StepFitter
from lowtide.script.repeat_step import format_repeat_count
from lowtide.script.run_listened import watched, why_not
from lowtide.script.run_verdict import RunVerdict
from lowtide.units import format_bytes, format_change
from lowtide.utils.amounts import BudgetFor
from lowtide.utils.interrupts import resend_dropped_interrupts, uninterrupted, uninterrupted_enter
from lowtide.utils.messages import note, tell
from lowtide.utils.rendering import Displayed, format_repr

if TYPE_CHECKING:
    from torch import nn

    from lowtide.planner.records import Plan
    from lowtide.script.step_detector import StepDetector

__all__ = ["Run", "RunVerdict", "within"]


class Run(Displayed):
    """Training steps kept within a budget, as long as a `with` block runs. `print` it to see the decisions."""

    def __init__(self, fitting: StepFitter, model: nn.Module | None, say: Callable[[str], None]) -> None:
        self._fitting, self._model, self._say = fitting, model, say
        self._stack = contextlib.ExitStack()
        self._detector: StepDetector | None = None
        self._failure: str | None = None
        """The error that ended training, in words."""
        self._unfinished: str | None = None
        """The reason why the block ended before a step was measured under a plan, once it has ended so."""

    @property
    def plan(self) -> Plan | None:
        """The plan for the largest batches so far; None before it is made, and if training continues without a plan."""
        return self._fitting.plans.plan

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans in force, the one for the smallest batches first."""
        return self._fitting.plans.all

    @property
    def verdict(self) -> RunVerdict | None:
        """Measured memory of the steps under `plan`; None until a step was measured."""
        return self._fitting.plans.verdict

    @property
    def n_repeated(self) -> int:
        """Number of steps that ran out of memory and were repeated."""
        return self._fitting.repeats.n

    def metrics(self) -> dict[str, float]:
        """Return numbers for a training log; none before there is a plan.

        Peaks are in requested bytes. If the budget is for reserved bytes, `lowtide_reserved_peak_bytes` was measured.

        Names are letters and underscores, which TensorBoard, Weights & Biases and MLflow all accept.
        """
        plan, verdict = self.plan, self.verdict
        if plan is None:
            return {}
        measured_bytes = None if verdict is None else verdict.measured_peak_bytes
        reserved = {}
        if plan.budget_for == "reserved" and measured_bytes is not None:
            reserved, measured_bytes = {"lowtide_reserved_peak_bytes": measured_bytes}, None
        return {
            "lowtide_budget_bytes": plan.budget_bytes,
            "lowtide_peak_bytes": plan.predicted.peak_bytes if measured_bytes is None else measured_bytes,
            **reserved,
            "lowtide_plain_peak_bytes": plan.plain.peak_bytes,
            "lowtide_extra_ms": plan.predicted.extra_ms,
            "lowtide_plans": len(self.plans),
            "lowtide_repeated_steps": self.n_repeated,
        }

    @uninterrupted_enter
    def __enter__(self) -> Self:
        if self._detector is not None:
            raise LowtideError("this block was entered before. Call lowtide.within(...) for each block.")
        model, self._model = self._model, None
        if model is not None:
            check_has_no_plan(model)
        with contextlib.ExitStack() as stack:
            stack.enter_context(resend_dropped_interrupts())
            stack.enter_context(end_search_here())
            self._detector = stack.enter_context(watched(self._fitting, model, when_failed=self.leave))
            stack.callback(self._fitting.remove_plan)
            self._stack = stack.pop_all()
        return self

    @uninterrupted
    def leave(self) -> None:
        """Restore the model and all other state; may be called before the block ends."""
        self._stack.close()

    @uninterrupted
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        detector, fitting = self._detector, self._fitting
        assert detector is not None
        with self._stack:
            if error is None and detector.failed is None:
                detector.end_last_step()
                fitting.finish()
                if not fitting.done:
                    self._unfinished = why_not("the block", detector, fitting)
                    self._say(f"note: {self._unfinished}")
            elif error is not None and not fitting.done:
                self._unfinished = f"the block was ended by {type(error).__name__}"
        if (failed := detector.failed) is not None:
            self._failure, detector.failed = str(failed), None  # its traceback holds the frames of the loop
        if error is None and failed is not None:  # the loop has caught the error and goes on
            try:
                raise failed
            finally:
                del failed

    def __repr__(self) -> str:
        return format_repr(type(self).__name__, str(self).partition("\n")[0])

    def __str__(self) -> str:
        fitting = self._fitting
        if fitting.plans.unplanned is not None:
            return f"{fitting.plans.unplanned} Training went on without a plan."
        if self._detector is None:
            return "not begun: the training loop belongs in a block, `with lowtide.within(...) as run:`."
        failure = self._failure or (self._detector and self._detector.failed)
        if failure is not None:
            return f"ended: {failure}"
        if fitting.plans.plan is None and self._unfinished is not None:
            return f"no plan was made: {self._unfinished}"
        if fitting.plans.plan is None:
            return f"no plan yet: a model gets one when it {fitting.awaits}."
        plans = [plan.timed_by(fitting.step_ms_under(plan)) for plan in fitting.plans.all]
        return "\n".join([*map(self._format_in_a_line, plans), *self._proof(plans[-1])])

    def _format_in_a_line(self, plan: Plan) -> str:
        change = format_change(plan.plain.peak_bytes, plan.predicted.peak_bytes)
        size = "" if len(self._fitting.plans.all) == 1 else f" up to {' and '.join(plan.input_shapes)}"
        return (
            f"{self._fitting.plans.name}{size}: {change} peak predicted (budget {format_bytes(plan.budget_bytes)})"
            f"{format_extra_time(plan)}; {decisions(plan)}"
        )

    def _proof(self, plan: Plan) -> list[str]:
        unmeasured = "not measured yet" if self._unfinished is None else f"not measured: {self._unfinished}"
        proof = unmeasured if self.verdict is None else str(self.verdict)
        repeated = [format_repeat_count(self.n_repeated)] if self.n_repeated else []
        return [*format_lever_lines(plan), proof, *repeated, *(f"note: {noted}" for noted in plan.notes)]


def within(
    budget: int | str,
    *,
    budget_for: BudgetFor = "requested",
    model: nn.Module | None = None,
    on_infeasible: OnInfeasible = "raise",
    levers: Collection[str] = (),
    in_place: bool = True,
    retry: bool = False,
    progress: bool = True,
) -> Run:
    """Keep the training steps of a `with` block within `budget`, at little extra time and with bit-identical results.

    The loop stays unchanged, in any form: a plain one, a Trainer, a function in its own thread. The first two steps are
    rehearsed, which takes some seconds; the third is the first under a plan, and measured. If batch sizes vary, up to
    20 steps are observed. A batch that is larger than all of these runs under the plan with the smallest
    peak; the next batch of that size gets its own plan. At the end of the block, however it ends, the model is
    restored.

    Args:
        budget: Bytes, "8GiB", "500MB" or "60%" of the plain step's peak, for all memory of the step: parameters,
            gradients, optimizer state and batch included, and anything else in memory, such as other models. On a GPU
            also "90% of gpu", or "auto": the memory that is free there, less a margin for fragmentation.
        budget_for: The bytes that the budget bounds: the "requested" ones, or on a GPU "reserved" ones, as for `fit`.
        model: The model to plan for, which the loop may call through a wrapper. By default the one that is trained.
        on_infeasible: If no plan fits, "raise" ends training with the error, "smallest" continues under the plan
            with the smallest peak, and "plain" continues without a plan. Updates made before then
            are kept; they equal those of the plain loop.
        levers: Changes to the step, as for `lowtide run --lever`: "outputs", "loss head", "micro-batches=4".
        in_place: If False, no gradient is written over the one that it is computed from.
        retry: If True, a step that runs out of memory is repeated once, under the plan with the smallest peak, with
            bit-identical results. If memory runs out again, the error has the explanation of `lowtide explain`.
        progress: If False, neither lines nor bars are written to stderr; the log named "lowtide" has all lines.

    Returns:
        A context manager, which holds the plans and the verdict.

    Raises:
        BudgetError: If the budget is not an amount of memory, or is one for a GPU and the model is on another device.
        Infeasible: If no plan fits. Raised from the optimizer's step, as are the errors below.
        OverBudget: If the measured peaks stay above the budget.
        RehearsalError: If the steps can't be rehearsed.
        LowtideError: If another such block runs in this process, or the model already has a plan.

    Example:
        >>> import torch, lowtide
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> with lowtide.within("90%", progress=False) as run:
        ...     for _ in range(4):
        ...         model(torch.ones(128, 64)).square().mean().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> run.verdict.within_budget
        True
    """
    check_on_infeasible(on_infeasible)
    if isinstance(levers, str):
        levers = (levers,)
    _check_trained(model)
    check_on_device(budget, None if model is None else find_device(model), budget_for)
    say = tell if progress else note
    fitting = StepFitter(
        budget,
        say,
        tuple(map(parse_script_lever, levers)),
        budget_for=budget_for,
        in_place=in_place,
        on_infeasible=on_infeasible,
        takes_turns=model is None,
        retry=retry,
        progress=progress,
    )
    return Run(fitting, model, say)


def _check_trained(model: Any) -> None:
    if model is None:
        return
    check_is_module(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise LowtideError(
            f"no parameter of this {type(model).__name__} requires a gradient: it has no training steps. Give the "
            "model that is trained, or leave model out."
        )
