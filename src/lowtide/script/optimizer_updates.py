"""Updates by optimizers of torch."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lowtide._torch.optim import list_parameters
from lowtide.script.line_search import Search

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


class OptimizerUpdates:
    """The optimizers that have stepped, and their updates.

    Optimizers are held by weak references, so that the state of one that the program has replaced can be freed.
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
        self._searches: dict[int, Search] = {}
        """Updates in progress, by optimizer id: they may call the model."""

    def begin(self, optimizer: Optimizer) -> None:
        """Record that a step of `optimizer` begins."""
        self._searches[id(optimizer)] = Search(optimizer)

    def end(self, optimizer: Optimizer) -> None:
        """Count a step of `optimizer` that is over."""
        self.n += 1
        self.last[id(optimizer)] = self.n
        self._searches.pop(id(optimizer), None)
        self.add(optimizer)

    def add(self, optimizer: Optimizer) -> None:
        """Record that `optimizer` has stepped, and that its parameters were updated."""
        if id(optimizer) not in self.optimizers:
            self.optimizers[id(optimizer)] = optimizer
            self._updated.update({id(p): p for p in list_parameters(optimizer)})

    @property
    def are_in_progress(self) -> bool:
        """Return True while an optimizer steps."""
        return bool(self._searches)

    def search(self) -> Search | None:
        """Return the update in progress that evaluates the model several times, if any; each evaluation is a step."""
        return next((search for search in self._searches.values() if search.evaluates_often), None)

    def are_of(self, mine: set[int]) -> bool:
        """Return True if an optimizer that has stepped holds a parameter whose id is in `mine`."""
        return any(key in self._updated for key in mine)

    def restart(self, optimizers: Iterable[Optimizer]) -> None:
        """Forget all optimizers except `optimizers`."""
        self.optimizers.clear()
        self._updated.clear()
        for optimizer in optimizers:
            self.add(optimizer)

    def forget(self) -> None:
        """Forget all optimizers, and updates in progress."""
        self.restart(())
        self._searches.clear()
