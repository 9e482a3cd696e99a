"""A step of a script under a plan: its peak, and whether its backward reads the bits that were saved."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from lowtide.identity import place_of, static_bytes
from lowtide.memory.events import Timeline
from lowtide.memory.measuring import recorder_for
from lowtide.rehearsal.left import with_left
from lowtide.script.callers import models_at_hand

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.applying import Applied


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
