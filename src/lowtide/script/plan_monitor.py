"""Monitor a script's steps under a plan: measure their peak, and check the bits that backward reads."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide.memory.measure import make_recorder
from lowtide.profiler.other_memory import with_others
from lowtide.profiler.peak_margin import peak_of
from lowtide.runtime.fingerprint import find_device
from lowtide.runtime.static_memory import static_bytes
from lowtide.script.repeat_step import StepRepeater
from lowtide.script.step_listener import StepListener
from lowtide.state.process_group import n_with_new_buckets
from lowtide.units import format_bytes, format_ratio, format_time

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.api.apply import Applied
    from lowtide.planner.records import Plan, Static
    from lowtide.utils.amounts import BudgetFor

_PASSED_OVER = (
    "another model is trained now, without a plan: a plan is for one model object. Run each in its own process, or "
    "call lowtide.fit in the script"
)

IN_PROCESSES = (
    "Call lowtide.fit(model, step, batch) in the function that each process runs, or have the processes started from "
    "outside: torchrun --no-python --nproc-per-node N lowtide run ... SCRIPT."
)

_NOT_REPEATED = (
    "a step that runs out of memory will not be repeated: the model is compiled as a whole, and there is no plan with "
    "a smaller peak to repeat the step under. Give a smaller budget, or compile repeated blocks instead, each in its "
    "place: `block.compile()`"
)


class InForce:
    """The plan in force on the trained model, if any."""

    def __init__(self) -> None:
        self.applied: Applied | None = None
        """The plan on the model, while steps are observed."""
        self._given_up: Applied | None = None
        """The plan on a model that was given up, until hooks may be changed."""
        self._released: weakref.ref[Applied] | None = None
        """The plan that stays in force after the last observed step: it lives as long as the model."""

    def remove(self) -> None:
        """Remove the plan in force, if any, and so restore the model."""
        if self.applied is not None:
            self.applied.remove()
            self.applied = None

    def give_up(self) -> None:
        """Mark the plan in force for removal by `remove_given_up`, where its hooks must not be removed, as in an
        optimizer's hook.
        """
        if self.applied is not None:
            self._given_up, self.applied = self.applied, None
        self._released = None

    def remove_given_up(self) -> None:
        """Remove the plan that `give_up` has marked, if any."""
        if self._given_up is not None:
            self._given_up.remove()
            self._given_up = None

    def release(self) -> None:
        """Replace the reference to plan and model by a weak one; the plan stays in force."""
        if self.applied is not None:
            self._released, self.applied = weakref.ref(self.applied), None

    def held(self) -> Applied | None:
        """Return the plan in force; None if there is none, or if its model was freed."""
        return self.applied if self._released is None else self._released()

    def resume(self) -> Applied | None:
        """Refer to the released plan again, and return it; return None if the plan was freed with its model."""
        if self._released is not None and (applied := self._released()) is not None:
            self.applied, self._released = applied, None
        return self.applied

    def remove_all(self) -> None:
        """Remove all plans, including a released one, and so restore their models."""
        self.remove_given_up()
        self.resume()
        self.remove()
        self._released = None


class Repeats:
    """Counter of the steps that ran out of memory under a plan and were repeated, which is done only on request."""

    def __init__(self, say: Callable[[str], None], *, are_asked_for: bool) -> None:
        self.n = 0
        """Number of steps that ran out of memory and were repeated."""
        self._say, self._are_asked_for = say, are_asked_for

    def guard(self, model: nn.Module, applied: Applied) -> None:
        """Repeat each step of `model` that runs out of memory under the plan `applied`, if repeats were requested."""
        if not self._are_asked_for:
            return
        if applied.plan.graphs:  # compiled calls of a model must not pass through a wrapper
            self._say(_NOT_REPEATED)
        else:
            applied.also(StepRepeater(model, applied, self._say, self._count).remove)

    def _count(self) -> None:
        self.n += 1


@dataclass(slots=True)
class MeasuredSteps:
    """Steps that were measured under one plan."""

    is_planned: bool = False
    """True if this step's batch has the size that the plan is for."""
    n_planned: int = 0
    """Number of steps on batches of the plan's size that were within the budget."""
    n_others: int = 0
    """Number of steps on batches of other sizes."""
    most_bytes: int = 0
    """Largest peak of the steps on batches of other sizes."""

    def put_in_words(self) -> str:
        """Return a message which says that no batch of the plan's size was measured."""
        largest = "no peak was measured"
        if self.most_bytes:
            largest = f"the largest measured peak is {format_bytes(self.most_bytes)}"
        steps = "1 step" if self.n_others == 1 else f"{self.n_others} steps"
        return f"in {steps} under the plan no batch had the size that the plan is for: {largest}"


class PlanMonitor(StepListener):
    """A listener that holds the plan in force on the trained model, and measures steps under it."""

    def __init__(self, say: Callable[[str], None], *, retry: bool = False) -> None:
        """Begin without a plan. With `retry`, a step that runs out of memory under a plan is repeated once."""
        self.done = False
        self.repeats = Repeats(say, are_asked_for=retry)
        self._say = say
        self._in_force = InForce()
        self._open: Measured | None = None
        self._measured = MeasuredSteps()
        self._timed_plan: Plan | None = None
        """The plan whose steps were timed last."""
        self._step_ms: float | None = None
        """Mean time of a step under that plan; None until it is measured."""

    @property
    def plan_in_force(self) -> Plan | None:
        """The plan that steps run under; None before there is one."""
        raise NotImplementedError

    def on_step_begin(self, model: nn.Module, batch: Any, optimizers: tuple[Optimizer, ...]) -> None:
        """Remove the plan from a model that is no longer trained: hooks may be changed here."""
        self._in_force.remove_given_up()

    def on_model_replaced(self, model: nn.Module) -> None:
        """Forget `model`, which is not the trained model, and its measurements."""
        PlanMonitor.on_stop(self)  # this changes no hooks
        self._in_force.give_up()
        self.done, self._measured = False, MeasuredSteps()

    def on_processes_start(self) -> None:
        """Report that processes of `torch.multiprocessing.spawn` are not watched."""
        self._say(f"torch.multiprocessing.spawn starts processes, which train without a plan. {IN_PROCESSES}")

    def step_ms_under(self, plan: Plan) -> float | None:
        """Return the mean time of a step under `plan`; None until it is measured."""
        return self._step_ms if plan is self._timed_plan else None

    def on_timed(self, step_ms: float) -> None:
        """Record and report the mean time of a step under the plan."""
        self._timed_plan, self._step_ms = self.plan_in_force, step_ms
        extra_ms = 0.0 if (plan := self.plan_in_force) is None else plan.predicted.extra_ms
        share = f", {format_ratio(extra_ms / step_ms)} of it added by the plan, as predicted" if extra_ms else ""
        self._say(f"a step under the plan takes {format_time(step_ms)}{share}")

    def on_unplanned_model(self) -> None:
        """Report that the trained model runs without a plan."""
        self._say(_PASSED_OVER)

    def on_release(self) -> None:
        """Drop the reference to the model; the plan stays in force."""
        self._in_force.release()

    def on_stop(self) -> None:
        """End the recording of the current step, if any; the plan stays in force."""
        if self._open is not None:
            self._open.leave()
            self._open = None


class Measured:
    """A recording of a step under a plan, which begins with the step.

    Raises RehearsalError if the step's memory can't be recorded, and ReplayMismatch in backward if a replayed tensor
    has other bits than the saved one.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        optimizers: tuple[Optimizer, ...],
        applied: Applied,
        budget_for: BudgetFor = "requested",
        *,
        is_checked: bool = True,
        with_coming: bool = True,
    ) -> None:
        """Begin to record; if `is_checked`, compare the tensors that backward reads with the saved ones, bit by bit.

        With `with_coming`, the memory before the step includes history that L-BFGS will allocate in later steps.
        """
        self._static, self._addresses = static_bytes(model, batch, optimizers, with_coming=with_coming)
        self._model, self._n_with_new_buckets = model, n_with_new_buckets(model.modules())
        self._budget_for = budget_for
        self._stack = contextlib.ExitStack()
        self._recorder = self._stack.enter_context(make_recorder(find_device(model)))
        self._checked = self._stack.enter_context(applied.checked()) if is_checked else None

    def peak_bytes(self) -> int:
        """Return the peak of the finished step, including memory from before the step."""
        self.leave()
        return peak_of(self._static, self._addresses, self._recorder, self._budget_for)

    @property
    def static(self) -> Static:
        """The memory that was in use when the finished step began."""
        return with_others(self._static, self._addresses, self._recorder)

    @property
    def creates_graph(self) -> bool:
        """True if a backward pass with `create_graph=True` has read recomputed tensors in a checked step."""
        return self._checked is not None and self._checked.creates_graph

    @property
    def is_usual(self) -> bool:
        """Return True unless DistributedDataParallel replaced its buckets: the recorder does not see that the old ones
        are freed.
        """
        return self._n_with_new_buckets == n_with_new_buckets(self._model.modules())

    def leave(self) -> None:
        """End the recording at any point. Repeated calls do nothing."""
        self._stack.close()
