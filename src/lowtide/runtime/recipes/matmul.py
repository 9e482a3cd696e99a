"""Matrix products: bit-exact when recomputed, but expensive, so plans recompute them last."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.runtime.recipes.registry import aten, recipe


@recipe("AddmmBackward0", edges={"bias": 0, "mat1": 1, "mat2": 2}, owner="mat2", expensive=True)
def addmm(bias: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float, alpha: float) -> Tensor:
    return torch.addmm(bias, mat1, mat2, beta=beta, alpha=alpha)


@recipe("MmBackward0", edges={"self": 0, "mat2": 1}, expensive=True)
def mm(self: Tensor, mat2: Tensor) -> Tensor:
    return torch.mm(self, mat2)


@recipe("BmmBackward0", edges={"self": 0, "mat2": 1}, expensive=True)
def bmm(self: Tensor, mat2: Tensor) -> Tensor:
    return torch.bmm(self, mat2)


@recipe("BaddbmmBackward0", edges={"self": 0, "batch1": 1, "batch2": 2}, expensive=True)
def baddbmm(self: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float, alpha: float) -> Tensor:
    return torch.baddbmm(self, batch1, batch2, beta=beta, alpha=alpha)


@recipe("MvBackward0", edges={"self": 0, "vec": 1}, expensive=True)
def mv(self: Tensor, vec: Tensor) -> Tensor:
    return torch.mv(self, vec)


@recipe("AddmvBackward0", edges={"self": 0, "mat": 1, "vec": 2}, expensive=True)
def addmv(self: Tensor, mat: Tensor, vec: Tensor, *, beta: float, alpha: float) -> Tensor:
    return torch.addmv(self, mat, vec, beta=beta, alpha=alpha)


@recipe("GroupedMmBackward0", edges={"self": 0, "mat2": 1}, expensive=True)
def grouped_mm(self: Tensor, mat2: Tensor, offs: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
    """Recompute grouped matrix products, one for each expert."""
    return aten._grouped_mm(self, mat2, offs, None, out_dtype)
