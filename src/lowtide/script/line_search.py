"""Updates that evaluate the model many times, moving the parameters in between, such as those of L-BFGS."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lowtide._torch.optim import list_parameters

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Search:
    """A call of an optimizer's `step` that is in progress, and in which its closure evaluates the model."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.evaluates_often = isinstance(optimizer, torch.optim.LBFGS)
        """True if the number of evaluations depends on their results."""
        self._versions = self._written()

    def detect_move(self) -> bool:
        """Return True if the parameters were written to since this method was called last."""
        before, self._versions = self._versions, self._written()
        return before != self._versions

    def _written(self) -> list[int]:
        return [p._version for p in list_parameters(self.optimizer)]
