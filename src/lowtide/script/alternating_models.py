"""Models that take turns, such as the two of a GAN, or actor and critic: one is updated between the other's updates."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lowtide._torch.optim import list_parameters
from lowtide.runtime.fsdp_scopes import list_own_parameters
from lowtide.script.calling_code import find_caller_optimizers

if TYPE_CHECKING:
    from torch.optim import Optimizer

PATIENCE = 6
"""Number of updates to wait for another optimizer in the script's variables to step: a critic may run ahead."""


_Gradient = tuple[weakref.ref[Tensor], int]
"""A parameter's gradient, and the number of writes to it."""


class AlternatingModels:
    """Weak references to models that are trained in turns with the detected model, such as a GAN's two models."""

    def __init__(self) -> None:
        self._called: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._updated: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._awaited: dict[int, list[_Gradient | None]] = {}
        """Gradients at a model's last call, by the model's id, if no backward pass has gone through that call yet."""
        self._joined: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Models taken as one."""
        self._n_waits = 0
        """Number of further updates after which steps may begin anywhere."""

    def called(self, module: nn.Module) -> None:
        """Record that the script has called `module` in training: a backward pass through the call should follow."""
        self._called[id(module)] = module
        self._awaited[id(module)] = [_gradient(p) for p in module.parameters()]

    def join(self, models: Iterable[nn.Module]) -> None:
        """Treat `models` as one model from now on: a step then begins only after backward has run through the calls of
        all of these models.
        """
        self._joined.update(models)
        self._n_waits = PATIENCE if self._awaits_backward() else 0

    def count_update(self) -> None:
        """Count an optimizer's update; models with new gradients no longer wait for a backward pass."""
        self._awaited = {
            key: at_call
            for key, module in self._called.items()
            if (at_call := self._awaited.get(key)) is not None and not _has_new_gradient(module, at_call)
        }
        self._n_waits = self._n_waits - 1 if self._n_waits and self._awaits_backward() else 0

    @property
    def are_in_step(self) -> bool:
        """Return True if backward has not yet run through an earlier call, so that the next call begins no step."""
        return self._n_waits > 0

    def _awaits_backward(self) -> bool:
        return any(id(model) in self._awaited for model in self._joined)

    def note_others_update(self, parameters: set[int]) -> None:
        """Record that an optimizer has updated the parameters with these ids, which belong to other models."""
        models = [m for m in self._called.values() if parameters & parameter_ids(m)]
        self._updated.update({id(module): module for module in models})

    def find_updated_others(self) -> list[nn.Module]:
        """Return the other models that were updated since this model's last update."""
        return list(self._updated.values())

    def begin(self) -> None:
        """Forget the recorded updates, because another model is trained from now on."""
        self._updated.clear()


def _gradient(parameter: nn.Parameter) -> _Gradient | None:
    gradient = parameter.grad if parameter.is_leaf else None
    return None if gradient is None else (weakref.ref(gradient), gradient._version)


def _has_new_gradient(module: nn.Module, at_call: list[_Gradient | None]) -> bool:
    gradients = zip(map(_gradient, module.parameters()), at_call, strict=False)
    return any(now and not (before and before[0]() is now[0]() and before[1] == now[1]) for now, before in gradients)


def caller_has_other_optimizers(model: nn.Module) -> bool:
    """Return True if the script's variables hold an optimizer of other parameters, even one that has not stepped."""
    mine = parameter_ids(model)
    return any(held and not held & mine for held in map(collect_held_ids, find_caller_optimizers()))


def ids(objects: Iterable[object]) -> set[int]:
    """Return the ids of the objects."""
    return {id(obj) for obj in objects}


def parameter_ids(model: nn.Module) -> set[int]:
    """Return the ids of the model's parameters as optimizers hold them; a sharded parameter counts as its shard."""
    return ids(list_own_parameters(model))


def collect_held_ids(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters that an optimizer updates."""
    return ids(list_parameters(optimizer))
