"""Copies: casts, clones, and copies into another tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.runtime.recipes.registry import recipe


@recipe("ToCopyBackward0", edges={"self": 0})
def to_copy(self: Tensor, *, out_dtype: torch.dtype, out_device: torch.device) -> Tensor:
    """Recompute a cast, such as autocast's copies of activations and of weights."""
    return self.to(device=out_device, dtype=out_dtype, copy=True)


@recipe("CloneBackward0", edges={"self": 0})
def clone(self: Tensor, *, out_stride: tuple[int, ...]) -> Tensor:
    """Recompute a clone, or `contiguous`, whose memory format autograd does not record."""
    return torch.empty_strided(self.shape, out_stride, dtype=self.dtype, device=self.device).copy_(self)


@recipe("torch::autograd::CopyBackwards", edges={"src": 1})
def copy_(
    src: Tensor, *, out_shape: torch.Size, out_stride: tuple[int, ...], out_dtype: torch.dtype, out_device: torch.device
) -> Tensor:
    """Recompute a copy that overwrites all elements of another tensor."""
    return torch.empty_strided(out_shape, out_stride, dtype=out_dtype, device=out_device).copy_(src)
