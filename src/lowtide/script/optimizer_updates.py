"""Updates by optimizers of torch, and those that a step still waits for."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from lowtide.script.alternating_models import held_by
from lowtide.script.line_search import Search

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

MOST_UNUSED: Final = 4
"""Number of updates by others after which an optimizer no longer counts if they have updated its parameters."""


class OptimizerUpdates:
    """The optimizers that have stepped, and their updates: in the step in progress, and before.

    Weak references: an optimizer that the program has replaced steps no more, and its state is to be freed.
    """

    def __init__(self) -> None:
        self.n = 0
        """Number of updates so far."""
        self.last: dict[int, int] = {}
        """Number of updates so far, at the last update by each optimizer, by its id."""
        self.optimizers: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        """Optimizers that have updated parameters and are alive, by id."""
        self._updated: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        """Parameters that optimizers held at their first update, by id."""
        self.in_step: dict[int, Optimizer] = {}
        """Optimizers that have updated parameters in the step in progress, by id."""
        self._searches: dict[int, Search] = {}
        """Updates in progress, by optimizer id: they may call the model."""

    def begin(self, optimizer: Optimizer) -> None:
        """Begin an update."""
        self._searches[id(optimizer)] = Search(optimizer)

    def end(self, optimizer: Optimizer) -> None:
        """Count an update that is over."""
        self.n += 1
        self.last[id(optimizer)] = self.n
        self._searches.pop(id(optimizer), None)
        self.add(optimizer)

    def add(self, optimizer: Optimizer) -> None:
        """Know `optimizer` from now on."""
        if id(optimizer) not in self.optimizers:
            self.optimizers[id(optimizer)] = optimizer
            self._updated.update({id(p): p for group in optimizer.param_groups for p in group["params"]})

    @property
    def are_in_progress(self) -> bool:
        """Return True within an update."""
        return bool(self._searches)

    def search(self) -> Search | None:
        """Return the update in progress that evaluates the model several times, if any; each evaluation is a step."""
        return next((search for search in self._searches.values() if search.evaluates_often), None)

    def parameters_in_step(self) -> set[int]:
        """Return the ids of the parameters that were updated in the step in progress."""
        return {p for optimizer in self.in_step.values() for p in held_by(optimizer)}

    def leave_others(self, mine: set[int]) -> None:
        """Forget updates of parameters other than `mine`, given by id: the steps of the other models are over."""
        self.in_step = {key: o for key, o in self.in_step.items() if mine & held_by(o)}

    def are_of(self, mine: set[int]) -> bool:
        """Return True if an optimizer of the parameters `mine` has ever stepped."""
        return any(key in self._updated for key in mine)

    def are_complete(self, mine: set[int], updated: set[int]) -> bool:
        """Return True if every optimizer that is alive and known to update the parameters `mine` has done so in this
        step.

        `updated` has the ids of all parameters that were updated in it, also by hand.
        """
        if not self.in_step:
            return False
        for key, optimizer in self.optimizers.items():
            held = mine & held_by(optimizer)
            if not held or key in self.in_step:
                continue
            is_replaced = self.n - self.last.get(key, self.n) > MOST_UNUSED and held <= updated
            if not is_replaced:  # by another optimizer of the same parameters
                return False
        return True

    def restart(self, optimizers: Iterable[Optimizer]) -> None:
        """Know only `optimizers` from now on."""
        self.optimizers.clear()
        self._updated.clear()
        for optimizer in optimizers:
            self.add(optimizer)

    def forget(self) -> None:
        """Know no optimizer any longer."""
        self.restart(())
        self.in_step.clear()
        self._searches.clear()
