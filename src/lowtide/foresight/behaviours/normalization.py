"""Norms: one kernel each, which keeps one or two numbers for a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide.foresight.behaviours.behaviour import Behaviour, Inside, is_channels_last
from lowtide.foresight.device.current import unbounded

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten

ROWS = (
    Behaviour(
        name="RMS norm",
        does="one kernel that saves its input and one number a row; the CPU composes it of five operators",
        source="aten/src/ATen/native/native_functions.yaml: _fused_rms_norm, torch 2.13",
    ),
    Behaviour(
        name="layer norm",
        does="mean and inverse deviation in single precision also for half precision",
        source="torch/_decomp/decompositions.py: native_layer_norm, torch 2.13",
    ),
    Behaviour(
        name="layer norm, backward",
        does="partial sums of the gradients of weight and bias",
        source="aten/src/ATen/native/cuda/layer_norm_kernel.cu: LayerNormBackwardKernelImplInternal, torch 2.13",
        exact=False,
    ),
    Behaviour(
        name="batch norm",
        does="cuDNN's kernel: for channels-last batches one that keeps a reserve of cuDNN's choice for backward, and "
        "takes a workspace; counted as none, and said",
        source="aten/src/ATen/native/cudnn/BatchNorm.cpp: getCudnnBatchNormMode, cudnn_batch_norm, "
        "_get_cudnn_batch_norm_reserve_space_size, torch at commit d7572ba2e934",
        exact=False,
    ),
)

_MOST_PARTIAL_ROWS = 128


class _RmsNorm(torch.autograd.Function):
    """aten::_fused_rms_norm."""

    @staticmethod
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
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        for_input = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        for_weight = torch.empty_like(weight) if ctx.needs_input_grad[2] else None
        return for_input, None, for_weight, None


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Any:
    return _RmsNorm.apply(x, shape, weight, eps)  # type: ignore[no-untyped-call]


def _layer_norm_backward(args: Any, kwargs: Any, made: list[Tensor]) -> list[Inside]:
    width = 1
    for size in args[2]:
        width *= size
    return [Inside(0, 0, 2 * _MOST_PARTIAL_ROWS * width * 4)]


def _batch_norm(args: Any, kwargs: Any, made: list[Tensor]) -> list[Inside]:
    """Nothing that is known; cuDNN says what it reserves on a card only, and documents no bound."""
    x, training = args[0], args[5]
    if training and is_channels_last(x):
        unbounded.setdefault(
            "aten::cudnn_batch_norm", "aten::cudnn_batch_norm: what cuDNN reserves for channels-last batches"
        )
    return []


KERNELS = {"_fused_rms_norm": _rms_norm}
INSIDE = {
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_batch_norm.default: _batch_norm,
}
