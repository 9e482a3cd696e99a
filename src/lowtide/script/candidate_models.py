"""Modules that are called beside the model: from when on one of them is trained in its place."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from lowtide.script.alternating_models import held_by, ids

if TYPE_CHECKING:
    from torch.optim import Optimizer


class CandidateModels:
    """Other modules that were called by nobody, in training, since the model was. Nobody is held."""

    def __init__(self) -> None:
        self._called: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._n_updates: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._left: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Models that were given up for such others: models that take turns are not taken in turn."""

    def called(self, module: nn.Module) -> None:
        """A module is called that is not the model's."""
        self._called[id(module)] = module

    def updated(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        held = held_by(optimizer)
        if any(held & ids(module.parameters()) for module in self._called.values()):
            self._n_updates[optimizer] = self._n_updates.get(optimizer, 0) + 1

    def trained(self) -> tuple[list[nn.Module], list[Optimizer]]:
        """Those that the model's place is due to, for they were trained for two steps by now, and what updates them."""
        optimizers = [optimizer for optimizer, n in self._n_updates.items() if n > 1]
        updated = {p for optimizer in optimizers for p in held_by(optimizer)}
        modules = [module for module in self._called.values() if updated & ids(module.parameters())]
        return ([], []) if any(module in self._left for module in modules) else (modules, optimizers)

    def leave(self, model: nn.Module) -> None:
        """`model` is given up for them."""
        self._left.update(model.modules())
        self.forget()

    def forget(self) -> None:
        """The model is called: there was nobody since."""
        self._called.clear()
        self._n_updates.clear()
