"""Convolutions: workspaces of algorithms that cuDNN chooses by heuristics that depend on the GPU.

The layout of the result, the cases without a workspace, and the needs of common algorithms are known. Kernels for
tensor cores work on channels-last tensors: others are converted, into the workspace. Single precision has kernels for
either layout (`..._f32_nchwkcrs_nchw_...`), so the workspace may be empty. On Hopper, cuDNN 9.19 was observed to run
channels-last kernels also in single precision if TF32 is allowed, except for 1 x 1 convolutions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide.estimator.cuda.current_gpu import capability
from lowtide.estimator.cuda.ops.op_registry import Behaviour, ScratchBlock, copies, cuda_op, is_channels_last

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten

_LAYOUT = Behaviour(
    name="convolution, layout",
    does="results and gradients are channels-last if the input or the weight is; the other tensors are copied to that"
    " layout",
    source="torch/include/ATen/native/ConvUtils.h: cudnn_conv_suggest_memory_format, torch 2.13; "
    "aten/src/ATen/native/Convolution.cpp: determine_backend_memory_format, use_cudnn_depthwise, "
    "convolution_backward; aten/src/ATen/native/cudnn/ConvShared.cpp, torch at commit 02f095500106",
)
Behaviour(
    name="depthwise convolution",
    does="torch's own kernel without a workspace, unless in half precision or channels-last",
    source="aten/src/ATen/native/Convolution.cpp: use_cudnn_depthwise, torch 2.13",
)
_WORKSPACE = Behaviour(
    name="convolution",
    does="a workspace that cuDNN chooses: copies of tensors that are not channels-last in half precision, and in TF32"
    " on 9.x; otherwise it may be empty",
    source="NVIDIA, Convolutional Layers User's Guide: tensor layouts in memory, NCHW vs NHWC; "
    "tests/estimator/data/cudnn_h200.json, measured on an H200 with cuDNN 9.19",
    exact=False,
)

HALF = (torch.float16, torch.bfloat16)

MOST_TIMES, MOST_MORE = 3, 9 * 2**20
"""Upper bound of a workspace: MOST_TIMES the bytes of input, weight and output together, plus MOST_MORE bytes.

The largest of 144 workspaces measured on an H200 is 2.8 times the bytes of input, weight and output. Small
convolutions, whose sums are split, need up to 8.4 MB.
"""


def _layout(x: Tensor, weight: Tensor) -> torch.memory_format | None:
    if x.dtype is torch.float64:
        return None
    return is_channels_last(x) or is_channels_last(weight)


def _lay_out(out: Any, layout: torch.memory_format | None) -> Any:
    if layout is None or out is None or out.dim() not in (4, 5):
        return out
    return torch.empty_like(out, memory_format=layout)


@cuda_op(aten.convolution.default, of=_LAYOUT, part="layout")
def _lay_out_forward(args: Any, out: Any) -> Any:
    return _lay_out(out, _layout(*args[:2]))


@cuda_op(aten.convolution_backward.default, of=_LAYOUT, part="layout")
def _lay_out_backward(args: Any, out: Any) -> Any:
    layout = _layout(*args[1:3])
    return (*(_lay_out(gradient, layout) for gradient in out[:2]), out[2])


@cuda_op(aten.convolution.default, of=_WORKSPACE)
def _forward(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    """Return the scratch blocks of a convolution: copies of input and weight, and cuDNN's workspace.

    A tensor is copied if it is not contiguous in the result's memory format; the input's copy is allocated before the
    result.
    """
    x, weight = args[:2]
    layout = _layout(x, weight) or torch.contiguous_format
    copied = [*copies(x, layout=layout, first=True), *copies(weight, layout=layout)]
    return [*copied, *_workspace(x, weight, results[0], groups=args[8])]


@cuda_op(aten.convolution_backward.default, of=_WORKSPACE)
def _backward(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    """Return the scratch blocks of a convolution's backward: copies of its arguments, and cuDNN's workspace.

    The kernels run in channels-last if input or weight is channels-last, else in the contiguous format. The result's
    gradient and the weight are copied if they are not contiguous in that format, and so is the input if the weight's
    gradient is needed. The input's copy is allocated before the gradients that backward returns, and so is the
    gradient's, if the kernels run in channels-last or the gradient is channels-last.
    """
    gradient, x, weight = args[:3]
    layout = _layout(x, weight) or torch.contiguous_format
    copied = copies(x, layout=layout, first=True) if args[10][1] else []
    other = layout is not torch.contiguous_format or is_channels_last(gradient) is not None
    copied += copies(gradient, layout=layout, first=other)
    return [*copied, *copies(weight, layout=layout), *_workspace(x, weight, gradient, groups=args[9])]


def _workspace(x: Tensor, weight: Tensor, out: Tensor, groups: int) -> list[ScratchBlock]:
    layout = _layout(x, weight)
    if groups > 1 and groups == x.shape[1] and x.dtype is torch.float32 and layout is None:
        return []
    three = sum(t.nbytes for t in (x, weight, out))
    transposed = 0 if layout else sum(t.nbytes for t in (x, weight, out) if is_channels_last(t) is None)
    return [ScratchBlock(transposed if _on_tensor_cores(x, weight) else 0, 0, MOST_TIMES * three + MOST_MORE)]


def _on_tensor_cores(x: Tensor, weight: Tensor) -> bool:
    """Return True if cuDNN is expected to run a tensor-core kernel, which needs channels-last tensors."""
    if x.dtype in HALF:
        return capability()[0] >= 7
    in_tf32 = x.dtype is torch.float32 and torch.backends.cudnn.allow_tf32
    return in_tf32 and capability()[0] >= 9 and any(size > 1 for size in weight.shape[2:])
