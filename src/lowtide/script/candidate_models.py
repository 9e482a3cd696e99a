"""Detect when training has moved on from the model to other modules that the script calls."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from lowtide.script.alternating_models import collect_held_ids, parameter_ids

if TYPE_CHECKING:
    from torch.optim import Optimizer


class CandidateModels:
    """Weak references to modules that were called in training since the model's last call, and may replace it."""

    def __init__(self) -> None:
        self._called: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._n_updates: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._replaced: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Models that were replaced by other modules. They are not considered again, because models may take turns."""

    def called(self, module: nn.Module) -> None:
        """Record a call of a module that is not part of the model."""
        self._called[id(module)] = module

    def updated(self, optimizer: Optimizer) -> None:
        """Record a step of `optimizer`, if it updates modules that were called instead of the model."""
        held = collect_held_ids(optimizer)
        if any(held & parameter_ids(module) for module in self._called.values()):
            self._n_updates[optimizer] = self._n_updates.get(optimizer, 0) + 1

    def trained(self) -> tuple[list[nn.Module], list[Optimizer]]:
        """Return the modules that were trained for two steps, and so replace the model, with their optimizers."""
        optimizers = [optimizer for optimizer, n in self._n_updates.items() if n > 1]
        updated = {p for optimizer in optimizers for p in collect_held_ids(optimizer)}
        modules = [module for module in self._called.values() if updated & parameter_ids(module)]
        return ([], []) if any(module in self._replaced for module in modules) else (modules, optimizers)

    def leave(self, model: nn.Module) -> None:
        """Record that other modules replace `model`, so that its modules are not candidates again; forget the
        candidates.
        """
        self._replaced.update(model.modules())
        self.forget()

    def forget(self) -> None:
        """Forget modules that might have replaced the model, because the model was called again."""
        self._called.clear()
        self._n_updates.clear()
