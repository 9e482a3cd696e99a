"""Batch norm over several processes: `SyncBatchNorm` runs CUDA operators for which torch has no fake kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide.estimator.cuda.ops.op_registry import Behaviour, ScratchBlock, cuda_op, is_channels_last

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten

_SOURCE = "aten/src/ATen/native/cuda/Normalization.cu: {}, torch 2.13"

_RESULTS = Behaviour(
    name="synchronized batch norm",
    does="statistics in single precision, one number per channel; results have the input's layout",
    source=_SOURCE.format("batch_norm_stats_cuda, batch_norm_elemt_cuda, batch_norm_backward_reduce_cuda"),
)
_STAGING = Behaviour(
    name="synchronized batch norm, channels-last",
    does="partial statistics of at most 128 thread blocks per channel",
    source=_SOURCE.format("flexible_launch_configs, batch_norm_stats_channels_last_cuda_template"),
    exact=False,
)

_MOST_BLOCKS = 128


def _statistics(x: Tensor) -> Tensor:
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    return x.new_empty(x.shape[1], dtype=dtype)


@cuda_op(aten.batch_norm_stats.default, of=_RESULTS, part="results")
def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _statistics(x), _statistics(x)


@cuda_op(aten.batch_norm_gather_stats_with_counts.default, of=_RESULTS, part="results")
def _gathered_stats(x: Tensor, *statistics: Any) -> tuple[Tensor, Tensor]:
    return _statistics(x), _statistics(x)


@cuda_op(aten.batch_norm_elemt.default, of=_RESULTS, part="results")
def _normed(x: Tensor, *parameters: Any) -> Tensor:
    return torch.empty_like(x)


@cuda_op(aten.batch_norm_backward_reduce.default, of=_RESULTS, part="results")
def _reduced(
    gradient: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *wanted: bool
) -> tuple[Tensor | None, ...]:
    like_weight = mean if weight is None else weight
    of_input, of_weight, of_bias = wanted
    return (
        *(torch.empty_like(mean) if of_input else None for _ in range(2)),
        torch.empty_like(like_weight) if of_weight else None,
        torch.empty_like(like_weight) if of_bias else None,
    )


@cuda_op(aten.batch_norm_backward_elemt.default, of=_RESULTS, part="results")
def _gradient(gradient: Tensor, x: Tensor, *statistics: Any) -> Tensor:
    return torch.empty_like(x)


@cuda_op(aten.batch_norm_stats.default, of=_STAGING)
def _stats_scratch(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    return _make_partial_block(args[0], 4)


@cuda_op(aten.batch_norm_backward_reduce.default, of=_STAGING)
def _reduced_scratch(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    return _make_partial_block(args[1], 2)


def _make_partial_block(x: Tensor, n_each: int) -> list[ScratchBlock]:
    """Return the scratch block for a channels-last input: `n_each` partial statistics per channel and thread block."""
    if is_channels_last(x) is None:
        return []
    most = n_each * x.shape[1] * _MOST_BLOCKS * _statistics(x).element_size()
    return [ScratchBlock(most, 0, most)]
