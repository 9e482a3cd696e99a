"""Models that take turns, as the two of a GAN or an actor and a critic: one is updated between updates of the other."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from lowtide.script.calling_code import optimizers_at_hand

if TYPE_CHECKING:
    from torch.optim import Optimizer

PATIENCE = 6
"""Updates in which an optimizer that is at hand may step for the first time. A critic may be ahead of its generator."""


class AlternatingModels:
    """Which others take turns with the model. Nobody is held."""

    def __init__(self) -> None:
        self._called: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._updated: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()

    def called(self, module: nn.Module) -> None:
        """A module is called by nobody, in training."""
        self._called[id(module)] = module

    def others_updated(self, parameters: set[int]) -> None:
        """Parameters that are not the model's were updated; by their ids."""
        found = [m for m in self._called.values() if any(id(p) in parameters for p in m.parameters())]
        self._updated.update({id(module): module for module in found})

    def model_updated(self) -> list[nn.Module]:
        """The model was updated. Gives the others that were since it was last."""
        return list(self._updated.values())

    def begin(self) -> None:
        """It is another model from here on."""
        self._updated.clear()


def others_at_hand(model: nn.Module) -> bool:
    """Whether an optimizer is at hand, perhaps yet to step, that updates something else than the model."""
    mine = ids(model.parameters())
    return any(held and not held & mine for held in map(held_by, optimizers_at_hand()))


def ids(parameters: Iterable[nn.Parameter]) -> set[int]:
    """Of the objects that they are."""
    return {id(p) for p in parameters}


def held_by(optimizer: Optimizer) -> set[int]:
    """The ids of the parameters that it updates."""
    return ids(p for group in optimizer.param_groups for p in group["params"])
