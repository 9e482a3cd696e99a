"""Matrix products: exact to redo, and what a plan pays for last."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.remat.recipes.registry import recipe


@recipe("AddmmBackward0", edges={"bias": 0, "mat1": 1, "mat2": 2}, owner="mat2", expensive=True)
def addmm(bias: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float, alpha: float) -> Tensor:
    return torch.addmm(bias, mat1, mat2, beta=beta, alpha=alpha)


@recipe("MmBackward0", edges={"self": 0, "mat2": 1}, expensive=True)
def mm(self: Tensor, mat2: Tensor) -> Tensor:
    return torch.mm(self, mat2)


@recipe("BmmBackward0", edges={"self": 0, "mat2": 1}, expensive=True)
def bmm(self: Tensor, mat2: Tensor) -> Tensor:
    return torch.bmm(self, mat2)
