"""Monitor steps of a script under a plan: their peak, and the bits that backward reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lowtide.memory.measure import recorder_for
from lowtide.profiler.other_memory import with_others
from lowtide.profiler.peak_margin import peak_of
from lowtide.runtime.fingerprint import place_of
from lowtide.runtime.static_memory import static_bytes
from lowtide.script.repeat_step import StepRepeater
from lowtide.script.step_listener import StepListener
from lowtide.state.process_group import n_with_new_buckets
from lowtide.units import format_bytes, format_time

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.api.apply import Applied
    from lowtide.planner.records import Static
    from lowtide.utils.amounts import BudgetFor

_PASSED_OVER = (
    "another model is trained now, without a plan: a plan is for one model object, the first that was trained. Run "
    "each in its own process, or call lowtide.fit in the script"
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


class PlanMonitor(StepListener):
    """A plan in force on the model, whose steps are measured."""

    def __init__(self, say: Callable[[str], None], *, retry: bool = False) -> None:
        """Begin without a plan. With `retry`, a step that runs out of memory under a plan is repeated once."""
        self.done = False
        self.n_repeated = 0
        """Number of steps that ran out of memory and were repeated."""
        self._say, self._retry = say, retry
        self._applied: Applied | None = None
        self._to_remove: Applied | None = None
        """The plan in force on a model that was given up."""
        self._open: Measured | None = None
        self._is_planned = False
        """True if this step's batch has the size that the plan is for."""
        self._n_others = 0
        """Number of measured steps on batches of other sizes."""
        self._most = 0
        """Largest measured peak in bytes of steps on batches of other sizes."""

    def begins(self, model: nn.Module, batch: Any, optimizers: tuple[Optimizer, ...]) -> None:
        """Remove the plan from a model that was given up."""
        if self._to_remove is not None:
            self._to_remove.remove()
            self._to_remove = None

    def gives_up(self, model: nn.Module) -> None:
        """Forget `model`, which is not the trained one, and its measurements."""
        PlanMonitor.leaves(self)  # this changes no hooks
        if self._applied is not None:
            # removed in the next step, because no hooks may be removed here
            self._to_remove, self._applied = self._applied, None
        self.done, self._n_others, self._most = False, 0, 0

    def starts_processes(self) -> None:
        """Report that processes of `torch.multiprocessing.spawn` are not watched."""
        self._say(f"torch.multiprocessing.spawn starts processes, which train without a plan. {IN_PROCESSES}")

    def takes(self, step_ms: float) -> None:
        """Report the mean time of a step under the plan."""
        self._say(f"a step under the plan takes {format_time(step_ms)}")

    def passes_over(self) -> None:
        """Report that the trained model runs without a plan."""
        self._say(_PASSED_OVER)

    def lets_go(self) -> None:
        """Release the model; the plan stays in force."""
        self._applied = None

    def leaves(self) -> None:
        """End recordings that are for one step only; the plan stays."""
        if self._open is not None:
            self._open.leave()
            self._open = None

    def _guard(self, model: nn.Module, applied: Applied) -> None:
        """Repeat steps of `model` that run out of memory while the plan is in force, if `retry` is set."""
        if not self._retry:
            return
        if applied.plan.graphs:  # and because a model whose calls are compiled must not have a wrapper in front
            self._say(_NOT_REPEATED)
        else:
            applied.also(StepRepeater(model, applied, self._say, self._has_repeated).remove)

    def _has_repeated(self) -> None:
        self.n_repeated += 1

    def _say_smaller_only(self) -> None:
        """Report that no batch of the plan's size came."""
        largest = f"the largest measured peak is {format_bytes(self._most)}" if self._most else "no peak was measured"
        steps = "1 step" if self._n_others == 1 else f"{self._n_others} steps"
        self._say(f"in {steps} under the plan no batch had the size that the plan is for: {largest}")


class Measured:
    """A recording of the step that begins now.

    Raises RehearsalError if its memory can't be recorded, ReplayMismatch in backward.
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
    ) -> None:
        """Begin; compare the bits that backward reads if `is_checked`."""
        self._static, self._addresses = static_bytes(model, batch, optimizers)
        self._model, self._n_with_new_buckets = model, n_with_new_buckets(model.modules())
        self._budget_for = budget_for
        self._stack = contextlib.ExitStack()
        self._recorder = self._stack.enter_context(recorder_for(place_of(model)))
        if is_checked:
            self._stack.enter_context(applied.checked())

    def peak_bytes(self) -> int:
        """Return the peak of the finished step, including memory from before the step."""
        self.leave()
        return peak_of(self._static, self._addresses, self._recorder, self._budget_for)

    @property
    def static(self) -> Static:
        """The memory that was in use when the finished step began."""
        return with_others(self._static, self._addresses, self._recorder)

    @property
    def is_usual(self) -> bool:
        """Return False if DistributedDataParallel replaced its buckets: the recorder misses the old ones' end."""
        return self._n_with_new_buckets == n_with_new_buckets(self._model.modules())

    def leave(self) -> None:
        """End the recording at any point. Repeated calls do nothing."""
        self._stack.close()
