"""Parameters outside modules, such as a prompt, that are trained through a frozen model."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from lowtide._torch.optim import list_parameters
from lowtide.runtime.composite_model import CompositeModel, join_models
from lowtide.script.alternating_models import ids, parameter_ids

if TYPE_CHECKING:
    from torch.optim import Optimizer


class PromptTuning:
    """Weak references to frozen and evaluated modules that were called before the trained model is known."""

    def __init__(self) -> None:
        self._frozen: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._in_evaluation: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __contains__(self, module: nn.Module) -> bool:
        """Return True if `module` was recorded as a frozen module."""
        return id(module) in self._frozen

    def frozen(self, module: nn.Module) -> None:
        """Record a call of a module without trainable parameters, given a tensor that is trained."""
        self._frozen[id(module)] = module

    def evaluated(self, module: nn.Module) -> None:
        """Record a call, in evaluation mode, of a module with trainable parameters."""
        self._in_evaluation.add(module)

    def forget(self) -> None:
        """Forget all calls once the model is known."""
        self._frozen.clear()
        self._in_evaluation.clear()

    def updated(self, optimizer: Optimizer) -> CompositeModel | None:
        """Join the frozen modules and the parameters that `optimizer` updated, such as a prompt, into one model.

        Return None if no frozen module was called, or if the parameters belong to modules.
        """
        updated = [p for p in list_parameters(optimizer) if p.grad is not None]
        in_modules = {p for module in self._in_evaluation for p in parameter_ids(module)}
        if not self._frozen or not updated or ids(updated) & in_modules:
            return None
        return CompositeModel([join_models([*self._frozen.values()])], updated)
