"""Norms: each runs as one kernel, which saves one or two numbers for each row or group."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch

from lowtide.estimator.cuda.current_gpu import emulates, to_gpu, unbounded
from lowtide.estimator.cuda.ops.op_registry import (
    Behaviour,
    ScratchBlock,
    copies,
    cuda_kernel,
    cuda_op,
    is_channels_last,
)

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten

_LAYER_NORM_FILE = "aten/src/ATen/native/cuda/layer_norm_kernel.cu: {}, torch of 2025, since 2.7"

Behaviour(
    name="RMS norm",
    does="one kernel that saves its input and one number per row; the CPU composes it of five operators",
    source="aten/src/ATen/native/native_functions.yaml: _fused_rms_norm, torch 2.13",
)
Behaviour(
    name="layer norm",
    does="saves mean and reciprocal deviation in single precision, also for half precision",
    source="torch/_decomp/decompositions.py: native_layer_norm, torch 2.13",
)
_LAYER_NORM_LAYOUT = Behaviour(
    name="layer norm, layout",
    does="copies tensors that are not contiguous, the input before any result is allocated; results are contiguous",
    source=_LAYER_NORM_FILE.format("layer_norm_cuda, layer_norm_backward_cuda, LayerNormBackwardKernelImpl"),
)
_LAYER_NORM_BACKWARD = Behaviour(
    name="layer norm, backward",
    does="beyond 65,536 short rows, one partial sum per 32 rows for the gradients of weight and bias",
    source=_LAYER_NORM_FILE.format("LaunchGammaBetaBackwardCUDAKernel"),
    exact=False,
)
_GROUP_NORM = Behaviour(
    name="group norm",
    does="one or two numbers per channel of each example, and in half precision per group",
    source="aten/src/ATen/native/cuda/group_norm_kernel.cu: GroupNormKernelImplInternal, "
    "GroupNormBackwardKernelImplInternal, torch at commit 0081abf78c45",
)
_BATCH_NORM = Behaviour(
    name="batch norm",
    does="cuDNN's kernel in training, except for bfloat16, two-dimensional inputs and norms without weights. For "
    "channels-last batches it saves a reserve for backward and takes a workspace, both of a size that cuDNN "
    "chooses: counted as 0 bytes, with a note",
    source="aten/src/ATen/native/cudnn/BatchNorm.cpp: getCudnnBatchNormMode, cudnn_batch_norm, "
    "_get_cudnn_batch_norm_reserve_space_size, torch at commit d7572ba2e934",
    exact=False,
)
_BATCH_NORM_BACKWARD = Behaviour(
    name="batch norm, backward",
    does="cuDNN's kernel copies a gradient whose layout differs from the input's, torch's own does not; both return "
    "the input's layout",
    source="aten/src/ATen/native/cudnn/BatchNorm.cpp: cudnn_batch_norm_backward, torch at commit d7572ba2e934; "
    "aten/src/ATen/native/Normalization.cpp: _select_batch_norm_backend, _batch_norm_impl_index_backward, "
    "aten/src/ATen/native/cuda/Normalization.cu: batch_norm_backward_cuda, torch of 2025",
)

_MANY_ROWS = 64 * 1024
_ROWS_EACH = 32
_COLUMNS_EACH = 32
_MOST_BLOCKS = 64 * 1024 // 2
_MOST_EXAMPLES = 880_801
_MOST_MULTIPROCESSORS = 192
"""Largest number of multiprocessors of any GPU; groups of columns are few below half that number."""


class _RmsNorm(torch.autograd.Function):
    """Replacement for aten::_fused_rms_norm on fake tensors."""

    @staticmethod
    @emulates("aten::_fused_rms_norm")
    def forward(
        ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
    ) -> tuple[Tensor, Tensor]:
        rows = (*x.shape[: x.dim() - len(shape)], *[1] * len(shape))
        dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        out, rstd = torch.empty_like(x), torch.empty(rows, dtype=dtype, device=x.device)
        ctx.save_for_backward(x, weight, rstd)
        ctx.mark_non_differentiable(rstd)
        return out, rstd

    @staticmethod
    @emulates("aten::_fused_rms_norm_backward")
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        for_input = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        for_weight = torch.empty_like(weight) if ctx.needs_input_grad[2] else None
        return for_input, None, for_weight, None


@cuda_kernel("_fused_rms_norm")
def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Any:
    return _RmsNorm.apply(to_gpu(x), shape, weight, eps)  # type: ignore[no-untyped-call]


@cuda_op(aten.native_layer_norm.default, of=_LAYER_NORM_LAYOUT)
def _layer_norm(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    return copies(args[0], first=True)


@cuda_op(aten.native_layer_norm_backward.default, of=_LAYER_NORM_BACKWARD)
def _layer_norm_backward(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    gradient, x, shape = args[:3]
    return [*copies(x, first=True), *copies(gradient), *_list_partial_sums(x, prod(shape), sum(args[7][1:]))]


def _list_partial_sums(x: Tensor, width: int, n_gradients: int) -> list[ScratchBlock]:
    """Return the blocks of partial sums for the gradients of weight and bias, one for each of `n_gradients`.

    Kernels need such blocks only for many short rows of `width` elements, and not on a GPU with few multiprocessors, so
    the lower bound is 0 bytes.
    """
    rows, columns = x.numel() // max(width, 1), -(-width // _COLUMNS_EACH)
    if rows <= _MANY_ROWS or width // _COLUMNS_EACH >= _MOST_MULTIPROCESSORS // 2:
        return []
    n_bytes = min(_MOST_BLOCKS // columns, -(-rows // _ROWS_EACH)) * width * x.element_size()
    return [ScratchBlock(n_bytes, 0, n_bytes)] * n_gradients


@cuda_op(aten.native_group_norm.default, of=_GROUP_NORM)
def _group_norm(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    """Return the scratch blocks of group norm.

    For a half-precision input the kernel stores the mean and deviation of each group in float32. With a weight or bias
    and images of more than one pixel, it also stores a scale and a shift for each channel.
    """
    x, weight, bias, examples, channels, pixels, groups = args[:7]
    itemsize = 8 if x.dtype is torch.float64 else 4
    inside = [ScratchBlock.exactly(examples * groups * itemsize)] * 2 if x.element_size() < itemsize else []
    if pixels > 1 and not (weight is None and bias is None):
        inside += [ScratchBlock.exactly(examples * channels * itemsize)] * 2
    return inside


@cuda_op(aten.native_group_norm_backward.default, of=_GROUP_NORM)
def _group_norm_backward(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    """Return the scratch blocks of group norm's backward, in float32, or float64 for a float64 input.

    They hold two sums for each channel of each example. If the input needs a gradient, they also hold two numbers for
    each group and, with a weight, one for each channel. Images of one pixel need only the numbers for each group.
    """
    x, weight = args[1], args[4]
    examples, channels, pixels, groups, wanted = args[5:10]
    itemsize = 8 if x.dtype is torch.float64 else 4
    channel, group = (ScratchBlock.exactly(examples * n * itemsize) for n in (channels, groups))
    if pixels == 1:
        return [group, group] if wanted[0] else []
    return [channel, channel, *([group, group, *[channel] * (weight is not None)] if wanted[0] else [])]


def _runs_on_cudnn(x: Tensor, weight: Tensor | None, training: bool) -> bool:
    """Return True if cuDNN runs a batch norm or its backward: only in training, with weights, and not in bfloat16."""
    if weight is None or torch.bfloat16 in (x.dtype, weight.dtype) or not training:
        return False
    mixed = x.dtype is not torch.float16 or weight.dtype is torch.float32
    return mixed and x.dim() >= 3 and x.shape[0] <= _MOST_EXAMPLES and x.numel() < 2**31 - 1


@cuda_op(aten.native_batch_norm.default, of=_BATCH_NORM)
def _batch_norm(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    """Return no blocks, but note that the size of cuDNN's reserve is unknown.

    Only a GPU reports that size, and cuDNN documents no bound.
    """
    x, weight, training = args[0], args[1], args[5]
    if _runs_on_cudnn(x, weight, training) and is_channels_last(x):
        unbounded.setdefault(
            "aten::cudnn_batch_norm", "aten::cudnn_batch_norm: what cuDNN reserves for channels-last batches"
        )
    return []


@cuda_op(aten.native_batch_norm_backward.default, of=_BATCH_NORM_BACKWARD)
def _batch_norm_backward(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    gradient, x, weight = args[:3]
    if not _runs_on_cudnn(x, weight, args[7]):
        return []
    return copies(gradient, layout=is_channels_last(x) or torch.contiguous_format, first=True)


@cuda_op(aten.native_layer_norm_backward.default, of=_LAYER_NORM_LAYOUT, part="layout")
def _lay_out_layer_norm(args: Any, out: Any) -> Any:
    return tuple(None if t is None else t.contiguous() for t in out)


@cuda_op(aten.native_batch_norm_backward.default, of=_BATCH_NORM_BACKWARD, part="layout")
def _lay_out_batch_norm(args: Any, out: Any) -> Any:
    x, weight, training = args[1], args[2], args[7]
    if out[0] is None:
        return out
    if training and not _runs_on_cudnn(x, weight, training):
        return (torch.empty_like(x), *out[1:])
    layout = (is_channels_last(x) if training else None) or torch.contiguous_format
    return (out[0].contiguous(memory_format=layout), *out[1:])
