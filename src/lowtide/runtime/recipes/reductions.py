"""Sums, means and other reductions. Their results are small, but recomputes of larger tensors need them."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.runtime.recipes.registry import aten, recipe


@recipe("SumBackward0", edges={"self": 0})
def sum_all(self: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    return torch.sum(self, dtype=out_dtype)


@recipe("SumBackward1", edges={"self": 0})
def sum(self: Tensor, *, dim: tuple[int, ...] | None, keepdim: bool, out_dtype: torch.dtype) -> Tensor:
    return torch.sum(self, dim, keepdim, dtype=out_dtype)


@recipe("MeanBackward0", edges={"self": 0})
def mean_all(self: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    return torch.mean(self, dtype=out_dtype)


@recipe("MeanBackward1", edges={"self": 0})
def mean(self: Tensor, *, dim: tuple[int, ...] | None, keepdim: bool, out_dtype: torch.dtype) -> Tensor:
    return torch.mean(self, dim, keepdim, dtype=out_dtype)


@recipe("VarBackward0", edges={"self": 0})
def var(self: Tensor, *, dim: tuple[int, ...] | None, correction: float | None, keepdim: bool) -> Tensor:
    return torch.var(self, dim, correction=correction, keepdim=keepdim)


@recipe("StdBackward0", edges={"self": 0})
def std(self: Tensor, *, dim: tuple[int, ...] | None, correction: float | None, keepdim: bool) -> Tensor:
    return torch.std(self, dim, correction=correction, keepdim=keepdim)


@recipe("VarMeanBackward0", edges={"self": 0})
def var_mean(
    self: Tensor, *, dim: tuple[int, ...] | None, correction: float | None, keepdim: bool
) -> tuple[Tensor, ...]:
    return torch.var_mean(self, dim, correction=correction, keepdim=keepdim)


@recipe("StdMeanBackward0", edges={"self": 0})
def std_mean(
    self: Tensor, *, dim: tuple[int, ...] | None, correction: float | None, keepdim: bool
) -> tuple[Tensor, ...]:
    return torch.std_mean(self, dim, correction=correction, keepdim=keepdim)


@recipe("AmaxBackward0", edges={"self": 0})
def amax(self: Tensor, *, dim: tuple[int, ...], keepdim: bool) -> Tensor:
    return torch.amax(self, dim, keepdim)


@recipe("AminBackward0", edges={"self": 0})
def amin(self: Tensor, *, dim: tuple[int, ...], keepdim: bool) -> Tensor:
    return torch.amin(self, dim, keepdim)


@recipe("LogsumexpBackward0", edges={"self": 0})
def logsumexp(self: Tensor, *, dim: tuple[int, ...], keepdim: bool) -> Tensor:
    return torch.logsumexp(self, dim, keepdim)


@recipe("LinalgVectorNormBackward0", edges={"self": 0})
def vector_norm(
    self: Tensor, *, ord: float, dim: tuple[int, ...] | None, keepdim: bool, out_dtype: torch.dtype
) -> Tensor:
    return aten.linalg_vector_norm(self, ord, dim, keepdim, dtype=out_dtype)


@recipe("CumsumBackward0", edges={"self": 0}, device="cpu")
def cumsum(self: Tensor, *, dim: int, out_dtype: torch.dtype) -> Tensor:
    """Recompute `cumsum`, except on CUDA, where it may differ from run to run."""
    return torch.cumsum(self, dim, dtype=out_dtype)
