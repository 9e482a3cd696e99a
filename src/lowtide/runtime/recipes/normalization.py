"""Norms. Statistics are recomputed from the input; running statistics are not updated twice.

Another implementation of batch norm takes the statistics that the node saved: one pass over the input, not two.

Layer norm and RMS norm do not record their eps, nor does group norm since torch 2.14. It is read from the module that
owns the weight. Without such a module, eps values in common use are tried, until one gives exactly the statistics that
the node saved: the output depends on eps only through the statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from lowtide.runtime.recipes.registry import aten, recipe

SAVED_STATISTICS: Final = "saved statistics"
"""Name of the implementation of batch norm that takes the statistics from the node."""

EPS_IN_USE = (1e-5, 1e-6, 1e-12, 1e-8, 1e-7, 1e-3)


def compute_with_matching_eps(rstd: Tensor, op: Callable[[float | None], Tensor], *eps: float | None) -> Tensor:
    """Find the first `eps` for which the last result of `op(eps)`, the reciprocal deviation, equals `rstd`; return the
    first result of the same call.

    Raises RuntimeError if no `eps` does, or if `rstd` is rounded to 16 bits.
    """
    if rstd.dtype not in (torch.float32, torch.float64):
        raise RuntimeError(f"its eps is not recorded, and its statistics are rounded to {rstd.dtype}")
    for candidate in eps:
        results = op(candidate)
        if torch.allclose(results[-1], rstd, rtol=0, atol=0, equal_nan=True):
            return results[0]
    raise RuntimeError(f"its eps is none of {eps}")


@recipe("NativeLayerNormBackward0", edges={"input": 0, "weight": 1, "bias": 2}, owner="weight")
def layer_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    result2: Tensor,
    *,
    normalized_shape: tuple[int, ...],
    eps: float | None,
) -> Tensor:
    def op(eps: float | None) -> Tensor:
        return aten.native_layer_norm(input, normalized_shape, weight, bias, eps)

    return compute_with_matching_eps(result2, op, *EPS_IN_USE) if eps is None else op(eps)[0]


@recipe(
    "NativeLayerNormBackward0",
    edges={"input": 0, "weight": 1, "bias": 2},
    owner="weight",
    device="cuda",
    implementation="saved statistics in one Triton kernel",
)
def layer_norm_in_triton(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    result1: Tensor,
    result2: Tensor,
    *,
    normalized_shape: tuple[int, ...],
) -> Tensor:
    """Recompute layer norm from its saved statistics; on CUDA, where Triton is installed."""
    from lowtide.runtime.kernels.layer_norm import layer_norm_from_statistics

    return layer_norm_from_statistics(input, weight, bias, result1, result2, math.prod(normalized_shape))


@recipe("FusedRmsNormBackward0", edges={"input": 0, "weight": 1}, owner="weight", device="cuda")
def rms_norm(
    input: Tensor, weight: Tensor | None, result1: Tensor, *, normalized_shape: tuple[int, ...], eps: float | None
) -> Tensor:
    """Recompute fused RMS norm. On a CPU, RMS norm runs as several operators, each with its own recipe."""

    def op(eps: float | None) -> Tensor:
        return aten._fused_rms_norm(input, normalized_shape, weight, eps)

    return compute_with_matching_eps(result1, op, None, *EPS_IN_USE) if eps is None else op(eps)[0]


@recipe(
    "NativeGroupNormBackward0", edges={"input": 0, "weight": 1, "bias": 2}, owner="weight", together={"bias": "weight"}
)
def group_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    result2: Tensor,
    *,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float | None,
) -> Tensor:
    def op(eps: float | None) -> Tensor:
        return aten.native_group_norm(input, weight, bias, N, C, HxW, group, eps)

    return compute_with_matching_eps(result2, op, *EPS_IN_USE) if eps is None else op(eps)[0]


@recipe(
    "NativeBatchNormBackward0",
    edges={"input": 0, "weight": 1, "bias": 2},
    owner="weight",
    together={"bias": "weight"},
    unless={"running_mean": "training", "running_var": "training"},
)
def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *,
    training: bool,
    eps: float,
) -> Tensor:
    """Recompute batch norm or instance norm. In training the batch's own statistics are used."""
    return torch.native_batch_norm(input, weight, bias, running_mean, running_var, training, 0.0, eps)[0]


_IN_TRAINING: dict[str, Any] = dict(
    edges={"input": 0, "weight": 1, "bias": 2},
    owner="weight",
    together={"bias": "weight"},
    when={"training": True},
    device="cuda",
)
"""Arguments of `recipe` for the batch norms of GPU libraries, which run in training only."""


@recipe("CudnnBatchNormBackward0", **_IN_TRAINING)
def cudnn_batch_norm(input: Tensor, weight: Tensor, bias: Tensor | None, *, epsilon: float) -> Tensor:
    """Recompute cuDNN's batch norm, which CUDA uses in training only."""
    return aten.cudnn_batch_norm(input, weight, bias, None, None, True, 0.0, epsilon)[0]


@recipe("MiopenBatchNormBackward0", **_IN_TRAINING)
def miopen_batch_norm(input: Tensor, weight: Tensor, bias: Tensor | None, *, epsilon: float) -> Tensor:
    """Recompute batch norm in training, on ROCm."""
    return aten.miopen_batch_norm(input, weight, bias, None, None, True, 0.0, epsilon)[0]


def from_statistics(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    """Compute a batch norm's output from its saved statistics.

    On a CPU the result is rounded as by torch's kernel, which multiplies and adds at once. In a model with 16-bit
    parameters the saved statistics are rounded, so a rehearsal finds other bits, and this implementation is not used.
    """
    if input.is_cuda:
        return torch.batch_norm_elemt(input, weight, bias, mean, invstd, eps)
    shape = (1, -1, *[1] * (input.dim() - 2))
    scale = invstd if weight is None else invstd * weight
    shift = torch.addcmul(torch.zeros_like(mean) if bias is None else bias, mean, scale, value=-1)
    return torch.addcmul(shift.view(shape), input.to(scale.dtype), scale.view(shape)).to(input.dtype)


@recipe(
    "NativeBatchNormBackward0",
    edges={"input": 0, "weight": 1, "bias": 2},
    owner="weight",
    together={"bias": "weight"},
    when={"training": True},
    implementation=SAVED_STATISTICS,
)
def batch_norm_from_statistics(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, result1: Tensor, result2: Tensor, *, eps: float
) -> Tensor:
    return from_statistics(input, weight, bias, result1, result2, eps)


@recipe("CudnnBatchNormBackward0", **_IN_TRAINING, implementation=SAVED_STATISTICS)
def cudnn_batch_norm_from_statistics(
    input: Tensor, weight: Tensor, bias: Tensor | None, result1: Tensor, result2: Tensor, *, epsilon: float
) -> Tensor:
    return from_statistics(input, weight, bias, result1, result2, epsilon)


@recipe("WeightNormInterfaceBackward0", edges={"v": 0, "g": 1})
def weight_norm(v: Tensor, g: Tensor, *, dim: int) -> Tensor:
    return aten._weight_norm_interface(v, g, dim)[0]
