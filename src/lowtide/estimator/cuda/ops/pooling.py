"""Pooling and upsampling: each kernel reads one memory format, and tensors in another format are copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide.estimator.cuda.ops.op_registry import Behaviour, ScratchBlock, copies, cuda_op, is_channels_last

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten

_FILES = "aten/src/ATen/native/cuda/{}, torch of 2022 and later"

_POOLING = Behaviour(
    name="pooling",
    does="copies an input that is not contiguous in its layout, and a gradient whose layout differs from the input's",
    source=_FILES.format("DilatedMaxPool2d.cu, AveragePool2d.cu, AdaptiveAveragePooling.cu"),
)
_UPSAMPLING = Behaviour(
    name="upsampling",
    does="copies tensors that are not contiguous in their layout",
    source=_FILES.format("UpSampleNearest2d.cu, UpSampleBilinear2d.cu"),
)


_UPSAMPLED = (
    *(aten.upsample_nearest2d.default, aten.upsample_nearest2d_backward.default),
    *(aten._upsample_nearest_exact2d.default, aten._upsample_nearest_exact2d_backward.default),
    *(aten.upsample_bilinear2d.default, aten.upsample_bilinear2d_backward.default),
)


def _layout(tensor: Tensor) -> torch.memory_format:
    return is_channels_last(tensor) or torch.contiguous_format


@cuda_op(*_UPSAMPLED, of=_UPSAMPLING)
@cuda_op(aten.max_pool2d_with_indices.default, aten.avg_pool2d.default, aten._adaptive_avg_pool2d.default, of=_POOLING)
def _copy_input(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    return copies(args[0], layout=_layout(args[0]))


@cuda_op(aten.max_pool2d_with_indices_backward.default, aten.avg_pool2d_backward.default, of=_POOLING)
def _copy_input_and_gradient(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    """Return the blocks for copies of the input and of the result's gradient, if they are not contiguous.

    For a channels-last input, the gradient is copied if it is not channels-last.
    """
    gradient, x = args[:2]
    return copies(x, gradient, layout=_layout(x))


@cuda_op(aten._adaptive_avg_pool2d_backward.default, of=_POOLING)
def _copy_gradient(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    """Return the block for a copy of the result's gradient, if that gradient is not contiguous.

    For a channels-last input there is no copy, because the channels-last kernel reads any memory format.
    """
    gradient, x = args[:2]
    return [] if is_channels_last(x) else copies(gradient)
