"""The step in progress: the modules called in it, the optimizers that have stepped, and whether it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lowtide.script.alternating_models import collect_held_ids, parameter_ids
from lowtide.script.manual_updates import ManualUpdates
from lowtide.script.optimizer_updates import OptimizerUpdates

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

MOST_UNUSED: Final = 4
"""Number of updates by other optimizers after which an optimizer that has not stepped counts as replaced, if the others
update all of its parameters.
"""


class StepInProgress:
    """Module calls and parameter updates since the current step began; empty between two steps."""

    def __init__(self, updates: OptimizerUpdates, by_hand: ManualUpdates) -> None:
        self._updates, self._by_hand = updates, by_hand
        self.is_open = False
        self.is_late = False
        """True if updates were made inside backward: the step may be over when backward is."""
        self.called: dict[int, nn.Module] = {}
        """Modules that were called, by id."""
        self._optimizers: dict[int, Optimizer] = {}
        """Optimizers that have stepped, by id."""

    def stepped(self, optimizer: Optimizer) -> None:
        """Record that `optimizer` has stepped."""
        self._optimizers[id(optimizer)] = optimizer

    def leave_others(self, mine: set[int]) -> None:
        """Forget optimizers that hold none of the parameters with the ids `mine`, because such optimizers step for
        other models.
        """
        self._optimizers = {key: o for key, o in self._optimizers.items() if mine & collect_held_ids(o)}

    def trained(self) -> list[nn.Module]:
        """Return the modules that were called in this step and whose parameters were updated in it."""
        updated = self._updated()
        return [module for module in self.called.values() if updated & parameter_ids(module)]

    def has_unused_gradients(self) -> bool:
        """Return True if a parameter of a called module has a gradient and was not updated."""
        gradients = {id(p) for module in self.called.values() for p in module.parameters() if p.grad is not None}
        return bool(gradients - self._updated())

    def is_complete(self, model: nn.Module) -> bool:
        """Return True if every live optimizer that is known to update `model` has stepped in this step."""
        if not self._optimizers:
            return False
        updates, mine, updated = self._updates, parameter_ids(model), self._updated()
        for key, optimizer in updates.optimizers.items():
            held = mine & collect_held_ids(optimizer)
            if not held or key in self._optimizers:
                continue
            is_replaced = updates.n - updates.last.get(key, updates.n) > MOST_UNUSED and held <= updated
            if not is_replaced:  # by another optimizer of the same parameters
                return False
        return True

    def end(self) -> None:
        """End the step, and forget its calls and updates."""
        self.is_open = self.is_late = False
        self.forget()

    def forget(self) -> None:
        """Drop the references to called modules and optimizers, so that their memory can be freed."""
        self.called.clear()
        self._optimizers.clear()

    def _updated(self) -> frozenset[int]:
        """Return the ids of the parameters that optimizers or the script's own code updated in this step."""
        return self._by_hand.moved.union(*map(collect_held_ids, self._optimizers.values()))
