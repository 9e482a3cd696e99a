"""What is looked at when nothing is left to do: whether the model that it was done for is still the one trained."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lowtide._torch import parts_of
from lowtide.identity import tensors_in
from lowtide.script.turns import held_by, ids

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.script.crew import Crew


class Afterwards:
    """Tells the crew once if another model is trained, and once if the model's optimizers have more state by then.

    Nobody is held.
    """

    def __init__(self, crew: Crew, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        self._crew = crew
        self._modules = [weakref.ref(module) for module in model.modules()]
        mine = ids(model.parameters())
        self._known = weakref.WeakSet(o for o in optimizers if mine & held_by(o))
        """The model's optimizers, those that were seen since included."""
        self._state_bytes = _state_bytes(self._known) if self._known else None
        """None if there was none of them, or more has been said."""

    def updated(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        if not self._modules or optimizer in self._known:
            return
        there = [module for reference in self._modules if (module := reference()) is not None]
        if any(held_by(optimizer) & ids(module.parameters(recurse=False)) for module in there):
            self._known.add(optimizer)
            if self._state_bytes is not None and (more_bytes := _state_bytes(self._known) - self._state_bytes) > 0:
                self._state_bytes = None
                self._crew.outgrows(more_bytes)
        else:
            self._modules.clear()
            self._crew.passes_over()


def _state_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Of the tensors in their state, but for counters."""
    found = (t for o in optimizers for entry in o.state.values() for t in tensors_in(entry) if t.dim())
    return sum(part.nbytes for tensor in found for part in parts_of(tensor))
