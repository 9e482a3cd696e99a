"""Pooling. Maxima are gathered by their saved indices."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.runtime.recipes.registry import aten, recipe


@recipe(
    "AdaptiveMaxPool2DBackward0", "FractionalMaxPool2DBackward0", "MaxPool2DWithIndicesBackward0", edges={"self": 0}
)
def max_pool2d(self: Tensor, result1: Tensor) -> Tensor:
    """Recompute max pooling in one or two dimensions from `result1`, the saved indices of the maxima."""
    return self.flatten(-2).gather(-1, result1.flatten(-2)).view(result1.shape)


@recipe(
    "AdaptiveMaxPool3DBackward0", "FractionalMaxPool3DBackward0", "MaxPool3DWithIndicesBackward0", edges={"self": 0}
)
def max_pool3d(self: Tensor, result1: Tensor) -> Tensor:
    return self.flatten(-3).gather(-1, result1.flatten(-3)).view(result1.shape)


@recipe("AvgPool2DBackward0", edges={"self": 0})
def avg_pool2d(
    self: Tensor,
    *,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """Recompute average pooling in one or two dimensions."""
    return aten.avg_pool2d(self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


@recipe("AvgPool3DBackward0", edges={"self": 0})
def avg_pool3d(
    self: Tensor,
    *,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    return aten.avg_pool3d(self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


@recipe("AdaptiveAvgPool2DBackward0", edges={"self": 0})
def adaptive_avg_pool2d(self: Tensor, *, out_shape: torch.Size) -> Tensor:
    return aten._adaptive_avg_pool2d(self, out_shape[-2:])


@recipe("AdaptiveAvgPool3DBackward0", edges={"self": 0})
def adaptive_avg_pool3d(self: Tensor, *, out_shape: torch.Size) -> Tensor:
    return aten._adaptive_avg_pool3d(self, out_shape[-3:])
