"""Views take no memory: what is behind them is remade, and looked at again."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.remat.recipes.registry import recipe


@recipe("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", edges={"x": 0}, alias=True)
def view(x: Tensor, *, out_shape: torch.Size) -> Tensor:
    return x.view(out_shape)


@recipe("TBackward0", edges={"x": 0}, alias=True)
def t(x: Tensor) -> Tensor:
    return x.t()


@recipe("TransposeBackward0", edges={"x": 0}, alias=True)
def transpose(x: Tensor, *, dim0: int, dim1: int) -> Tensor:
    return x.transpose(dim0, dim1)


@recipe("PermuteBackward0", edges={"x": 0}, alias=True)
def permute(x: Tensor, *, dims: tuple[int, ...]) -> Tensor:
    return x.permute(dims)


@recipe("ExpandBackward0", edges={"x": 0}, alias=True)
def expand(x: Tensor, *, out_shape: torch.Size) -> Tensor:
    return x.expand(out_shape)


@recipe("UnsqueezeBackward0", edges={"x": 0}, alias=True)
def unsqueeze(x: Tensor, *, dim: int) -> Tensor:
    return x.unsqueeze(dim)


@recipe("CloneBackward0", edges={"x": 0})
def clone(x: Tensor, *, out_stride: tuple[int, ...]) -> Tensor:
    """A copy, of which autograd does not say with what strides: only where the copy itself was at hand."""
    return torch.empty_strided(x.shape, out_stride, dtype=x.dtype, device=x.device).copy_(x)
