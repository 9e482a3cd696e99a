"""Views, which take no memory: the base tensor is recomputed and viewed again.

A saved view is held as its base tensor and a geometry, so these recipes are for views in the middle of a recompute.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.runtime.recipes.registry import aten, recipe


@recipe("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", edges={"self": 0}, alias=True)
def view(self: Tensor, *, out_shape: torch.Size) -> Tensor:
    return self.reshape(out_shape)


@recipe("AliasBackward0", edges={"self": 0}, alias=True)
def alias(self: Tensor) -> Tensor:
    return self.detach()


@recipe("TBackward0", "TBackward1", edges={"self": 0}, alias=True)
def t(self: Tensor) -> Tensor:
    return self.t()


@recipe("TransposeBackward0", "TransposeBackward1", edges={"self": 0}, alias=True)
def transpose(self: Tensor, *, dim0: int, dim1: int) -> Tensor:
    return self.transpose(dim0, dim1)


@recipe("PermuteBackward0", edges={"self": 0}, alias=True)
def permute(self: Tensor, *, dims: tuple[int, ...]) -> Tensor:
    return self.permute(dims)


@recipe("ExpandBackward0", edges={"self": 0}, alias=True)
def expand(self: Tensor, *, out_shape: torch.Size) -> Tensor:
    return self.expand(out_shape)


@recipe("UnsqueezeBackward0", "UnsqueezeBackward1", edges={"self": 0}, alias=True)
def unsqueeze(self: Tensor, *, dim: int) -> Tensor:
    return self.unsqueeze(dim)


@recipe("SqueezeBackward0", "SqueezeBackward3", edges={"self": 0}, alias=True)
def squeeze(self: Tensor) -> Tensor:
    return self.squeeze()


@recipe("SqueezeBackward1", "SqueezeBackward2", "SqueezeBackward4", "SqueezeBackward5", edges={"self": 0}, alias=True)
def squeeze_dim(self: Tensor, *, dim: int | tuple[int, ...]) -> Tensor:
    return self.squeeze(dim)


@recipe("SelectBackward0", edges={"self": 0}, alias=True)
def select(self: Tensor, *, dim: int, index: int) -> Tensor:
    return self.select(dim, index)


@recipe("SliceBackward0", edges={"self": 0}, alias=True)
def slice(self: Tensor, *, dim: int, start: int | None, end: int | None, step: int) -> Tensor:
    return aten.slice(self, dim, start, end, step)


@recipe("SplitBackward0", edges={"self": 0}, alias=True)
def split(self: Tensor, *, split_size: int, dim: int) -> tuple[Tensor, ...]:
    """Recompute `split` and `chunk`."""
    return torch.split(self, split_size, dim)


@recipe("SplitWithSizesBackward0", edges={"self": 0}, alias=True)
def split_with_sizes(self: Tensor, *, split_sizes: tuple[int, ...], dim: int) -> tuple[Tensor, ...]:
    return torch.split(self, list(split_sizes), dim)


@recipe("UnbindBackward0", edges={"self": 0}, alias=True)
def unbind(self: Tensor, *, dim: int) -> tuple[Tensor, ...]:
    return self.unbind(dim)


@recipe("DiagonalBackward0", edges={"self": 0}, alias=True)
def diagonal(self: Tensor, *, offset: int, dim1: int, dim2: int) -> Tensor:
    return self.diagonal(offset, dim1, dim2)


@recipe("UnfoldBackward0", edges={"self": 0}, alias=True)
def unfold(self: Tensor, *, dimension: int, size: int, step: int) -> Tensor:
    return self.unfold(dimension, size, step)


@recipe("ViewAsComplexBackward0", edges={"self": 0}, alias=True)
def view_as_complex(self: Tensor) -> Tensor:
    return torch.view_as_complex(self)


@recipe("ViewAsRealBackward0", edges={"self": 0}, alias=True)
def view_as_real(self: Tensor) -> Tensor:
    return torch.view_as_real(self)
