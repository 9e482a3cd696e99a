"""Updates that evaluate the model many times, moving the parameters in between, as those of L-BFGS."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Search:
    """An optimizer in the midst of an update."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.evaluates_often = isinstance(optimizer, torch.optim.LBFGS)
        """How many evaluations there are depends on what they give."""
        self._versions = self._written()

    def has_moved(self) -> bool:
        """Return True if the parameters have been written to since this was asked last."""
        before, self._versions = self._versions, self._written()
        return before != self._versions

    def _written(self) -> list[int]:
        return [p._version for group in self.optimizer.param_groups for p in group["params"]]
