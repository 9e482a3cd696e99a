"""A step of a script under a plan: its peak, and whether its backward reads the bits that were saved.

And what is said where such steps don't come.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from lowtide.identity import place_of, static_bytes
from lowtide.memory.events import Timeline
from lowtide.memory.measuring import recorder_for
from lowtide.rehearsal.left import with_left
from lowtide.script.callers import models_at_hand
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.applying import Applied

PASSED_OVER = (
    "another model is trained now, without a plan: a plan is for one model object, the first that was trained. Run "
    "each in a process of its own, or call lowtide.fit in the script"
)


def outgrown(more_bytes: int) -> str:
    """What is said of another optimizer, whose state is `more_bytes` larger than that of the one in the plan."""
    return (
        f"another optimizer updates the model from here on, and has {format_bytes(more_bytes)} more state than is in "
        "the plan: the peak may be above the budget. Run what comes before in a process of its own, or call "
        "lowtide.fit in the script"
    )


class Measured:
    """A step that begins now. Raises RehearsalError where its memory can't be recorded, ReplayMismatch in backward."""

    def __init__(self, model: nn.Module, batch: Any, optimizers: tuple[Optimizer, ...], applied: Applied) -> None:
        self._static, self._addresses = static_bytes(model, batch, optimizers, models_at_hand())
        self._stack = contextlib.ExitStack()
        self._recorder = self._stack.enter_context(recorder_for(place_of(model)))
        self._stack.enter_context(applied.checked(self._recorder.mark))

    def peak_bytes(self) -> int:
        """The most that there was at once, now that the step is over; what was there before it included."""
        self.leave()
        there = with_left(self._static, self._addresses, self._recorder)
        return there.total + Timeline(self._recorder.stream).peak_bytes

    def leave(self) -> None:
        """End it, wherever it is. May be called again."""
        self._stack.close()


def smaller_only(n_steps: int, most_bytes: int) -> str:
    """What is said of a plan that got no batch of its size. `most_bytes`: the largest measured peak, 0 if none was."""
    said = f"the largest measured peak is {format_bytes(most_bytes)}" if most_bytes else "no peak was measured"
    return f"in {n_steps} steps under the plan no batch was of the size it is for: {said}"
