"""Check, after the last observed step, that the planned model is still the one trained."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lowtide.script.alternating_models import held_by, ids

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.script.step_listener import StepListener


class PostPlanMonitor:
    """A monitor that tells the listener once if another model is trained; it holds only weak references."""

    def __init__(self, listener: StepListener, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        self._listener = listener
        self.model = weakref.ref(model)
        self._modules = [weakref.ref(module) for module in model.modules()]
        mine = ids(model.parameters())
        self._known = {id(o): weakref.ref(o) for o in optimizers if mine & held_by(o)}
        """Optimizers of the model, including those that were first observed after the plan was made."""

    def optimizers(self) -> list[Optimizer]:
        """Return the model's optimizers that are alive."""
        return [optimizer for known in self._known.values() if (optimizer := known()) is not None]

    def knows(self, optimizer: Optimizer) -> bool:
        """Return True if an optimizer is known to be the model's."""
        known = self._known.get(id(optimizer))
        return known is not None and known() is optimizer

    def updated(self, optimizer: Optimizer) -> None:
        """Note a step of an optimizer that is not known."""
        if not self._modules:
            return
        modules = [module for reference in self._modules if (module := reference()) is not None]
        if any(held_by(optimizer) & ids(module.parameters(recurse=False)) for module in modules):
            self._known[id(optimizer)] = weakref.ref(optimizer)
        else:
            self._modules.clear()
            self._listener.passes_over()
