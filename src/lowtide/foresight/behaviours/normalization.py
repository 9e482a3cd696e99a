"""Norms: one kernel each, which keeps one or two numbers for a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide.foresight.behaviours.behaviour import Behaviour, Inside

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
        does="cuDNN's kernel for contiguous batches; what it reserves for channels-last ones is up to a bit an element",
        source="aten/src/ATen/native/cudnn/BatchNorm.cpp, torch 2.13",
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


KERNELS = {"_fused_rms_norm": _rms_norm}
INSIDE = {aten.native_layer_norm_backward.default: _layer_norm_backward}
