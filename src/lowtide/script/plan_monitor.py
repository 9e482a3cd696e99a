"""Steps of a script under a plan: their peak, and whether their backward reads the bits that were saved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lowtide.memory.measure import recorder_for
from lowtide.memory.memory_timeline import Timeline
from lowtide.profiler.other_memory import with_others
from lowtide.runtime.fingerprint import place_of, static_bytes
from lowtide.script.step_listener import StepListener
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.api.apply import Applied

_PASSED_OVER = (
    "another model is trained now, without a plan: a plan is for one model object, the first that was trained. Run "
    "each in a process of its own, or call lowtide.fit in the script"
)


class PlanMonitor(StepListener):
    """Who has a plan in force on the model, and measures steps under it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.done = False
        self._say = say
        self._applied: Applied | None = None
        self._gone: Applied | None = None
        """In force on a model that was given up."""
        self._open: Measured | None = None
        self._is_planned = False
        """Whether this step is on a batch of the size that the plan is for."""
        self._n_others = 0
        """Steps on other batches."""
        self._most = 0
        """The largest peak that was measured in those."""

    def begins(self, model: nn.Module, batch: Any, optimizers: tuple[Optimizer, ...]) -> None:
        """Take out what is in force on a model that was given up."""
        if self._gone is not None:
            self._gone.remove()
            self._gone = None

    def gives_up(self, model: nn.Module) -> None:
        """That model is not the one, and nothing was measured."""
        PlanMonitor.leaves(self)  # which changes no hooks
        if self._applied is not None:
            self._gone, self._applied = self._applied, None  # until the next step: here no hooks may be removed
        self.done, self._n_others, self._most = False, 0, 0

    def passes_over(self) -> None:
        """Say that there is no plan for what is trained."""
        self._say(_PASSED_OVER)

    def lets_go(self) -> None:
        """The plan stays in force; nobody here holds the model any longer."""
        self._applied = None

    def leaves(self) -> None:
        """End what is in force for a step only; the plan stays."""
        if self._open is not None:
            self._open.leave()
            self._open = None

    def _say_smaller_only(self) -> None:
        """Of a plan that got no batch of its size."""
        found = f"the largest measured peak is {format_bytes(self._most)}" if self._most else "no peak was measured"
        steps = "1 step" if self._n_others == 1 else f"{self._n_others} steps"
        self._say(f"in {steps} under the plan no batch was of the size it is for: {found}")


class Measured:
    """A step that begins now. Raises RehearsalError where its memory can't be recorded, ReplayMismatch in backward."""

    def __init__(self, model: nn.Module, batch: Any, optimizers: tuple[Optimizer, ...], applied: Applied) -> None:
        self._static, self._addresses = static_bytes(model, batch, optimizers)
        self._stack = contextlib.ExitStack()
        self._recorder = self._stack.enter_context(recorder_for(place_of(model)))
        self._stack.enter_context(applied.checked())

    def peak_bytes(self) -> int:
        """The most that there was at once, now that the step is over; what was there before it included."""
        self.leave()
        there = with_others(self._static, self._addresses, self._recorder)
        return there.total + Timeline(self._recorder.stream).peak_bytes

    def leave(self) -> None:
        """End it, wherever it is. May be called again."""
        self._stack.close()
