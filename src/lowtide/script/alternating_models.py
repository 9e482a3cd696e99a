"""Models that take turns, such as the two of a GAN, or actor and critic: one is updated between the other's updates."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from lowtide.script.calling_code import caller_optimizers

if TYPE_CHECKING:
    from torch.optim import Optimizer

PATIENCE = 6
"""Number of updates to wait for another optimizer in the script's variables to step: a critic may run ahead."""


class AlternatingModels:
    """Models that take turns with the model, held by weak references."""

    def __init__(self) -> None:
        self._called: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._updated: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()

    def called(self, module: nn.Module) -> None:
        """Record that the script calls a module in training."""
        self._called[id(module)] = module

    def others_updated(self, parameters: set[int]) -> None:
        """Record an update of parameters, given by their ids, that are not the model's."""
        models = [m for m in self._called.values() if any(id(p) in parameters for p in m.parameters())]
        self._updated.update({id(module): module for module in models})

    def model_updated(self) -> list[nn.Module]:
        """Return the other models that were updated since this model's last update."""
        return list(self._updated.values())

    def begin(self) -> None:
        """Forget noted updates: another model is trained from now on."""
        self._updated.clear()


def caller_has_other_optimizers(model: nn.Module) -> bool:
    """Return True if the script's variables hold an optimizer of other parameters, even one that has not stepped."""
    mine = ids(model.parameters())
    return any(held and not held & mine for held in map(held_by, caller_optimizers()))


def ids(objects: Iterable[object]) -> set[int]:
    """Return the ids of the objects."""
    return {id(obj) for obj in objects}


def held_by(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters that an optimizer updates."""
    return ids(p for group in optimizer.param_groups for p in group["params"])
