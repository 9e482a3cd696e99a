"""Convolutions: cuDNN chooses an algorithm, by heuristics that depend on the card, and that takes a workspace.

What is known is where none is taken, and what the common algorithms need. Kernels for tensor cores work on
channels-last tensors: others are converted, into the workspace. In single precision there are kernels for either
layout (`..._f32_nchwkcrs_nchw_...`), so that it may be none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide.foresight.behaviours.behaviour import Behaviour, Inside
from lowtide.foresight.device.current import capability

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten

ROWS = (
    Behaviour(
        name="depthwise convolution",
        does="a kernel of torch's own without a workspace, unless in half precision",
        source="aten/src/ATen/native/Convolution.cpp: use_cudnn_depthwise, torch 2.13",
    ),
    Behaviour(
        name="convolution",
        does="cuDNN's workspace: in half precision copies of what is not channels-last, in single precision perhaps",
        source="NVIDIA, Convolutional Layers User's Guide: tensor layouts in memory, NCHW vs NHWC",
        exact=False,
    ),
)

HALF = (torch.float16, torch.bfloat16)

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _forward(args: Any, kwargs: Any, made: list[Tensor]) -> list[Inside]:
    x, weight = args[:2]
    return _workspace(x, weight, made[0], groups=args[8])


def _backward(args: Any, kwargs: Any, made: list[Tensor]) -> list[Inside]:
    """For the input's gradient, then for the weight's: one at a time, with the same three tensors."""
    gradient, x, weight = args[:3]
    return _workspace(x, weight, gradient, groups=args[9])


def _workspace(x: Tensor, weight: Tensor, out: Tensor, groups: int) -> list[Inside]:
    if groups > 1 and groups == x.shape[1] and x.dtype is torch.float32:
        return []
    copies = sum(t.numel() * t.element_size() for t in (x, weight, out) if not _is_channels_last(t))
    expected = copies if x.dtype in HALF and capability()[0] >= 7 else 0
    return [Inside(expected, 0, max(copies, 2 * out.numel() * out.element_size()))]


def _is_channels_last(tensor: Tensor) -> bool:
    layout = _CHANNELS_LAST.get(tensor.dim())
    return layout is not None and tensor.is_contiguous(memory_format=layout)


INSIDE = {aten.convolution.default: _forward, aten.convolution_backward.default: _backward}
