"""Pooling and upsampling: kernels for either layout, with copies of tensors in neither or in the other one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide.estimator.cuda.ops.op_record import Behaviour, ScratchBlock, copies, is_channels_last

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten

_FILES = "aten/src/ATen/native/cuda/{}, torch of 2022 and later"

ROWS = (
    Behaviour(
        name="pooling",
        does="copies of an input that is not contiguous in its layout, and of gradients in another one than the input",
        source=_FILES.format("DilatedMaxPool2d.cu, AveragePool2d.cu, AdaptiveAveragePooling.cu"),
    ),
    Behaviour(
        name="upsampling",
        does="copies of what is not contiguous in its layout",
        source=_FILES.format("UpSampleNearest2d.cu, UpSampleBilinear2d.cu"),
    ),
)


def _layout(tensor: Tensor) -> torch.memory_format:
    return is_channels_last(tensor) or torch.contiguous_format


def _own(args: Any, kwargs: Any, made: list[Tensor]) -> list[ScratchBlock]:
    return copies(args[0], layout=_layout(args[0]))


def _pooled(args: Any, kwargs: Any, made: list[Tensor]) -> list[ScratchBlock]:
    """Return copies of the input and its gradient that are not in the input's layout."""
    gradient, x = args[:2]
    return copies(x, gradient, layout=_layout(x))


def _pooled_by_shape(args: Any, kwargs: Any, made: list[Tensor]) -> list[ScratchBlock]:
    """Return a copy of the gradient, unless the input is channels-last; that kernel reads gradients in any layout."""
    gradient, x = args[:2]
    return [] if is_channels_last(x) else copies(gradient)


_UPSAMPLED = (
    *(aten.upsample_nearest2d.default, aten.upsample_nearest2d_backward.default),
    *(aten._upsample_nearest_exact2d.default, aten._upsample_nearest_exact2d_backward.default),
    *(aten.upsample_bilinear2d.default, aten.upsample_bilinear2d_backward.default),
)

INSIDE = {
    **dict.fromkeys((aten.max_pool2d_with_indices.default, aten.avg_pool2d.default), _own),
    **dict.fromkeys((aten.max_pool2d_with_indices_backward.default, aten.avg_pool2d_backward.default), _pooled),
    aten._adaptive_avg_pool2d.default: _own,
    aten._adaptive_avg_pool2d_backward.default: _pooled_by_shape,
    **dict.fromkeys(_UPSAMPLED, _own),
}
