"""Sums over many rows: several thread blocks first write partial sums to scratch memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide.estimator.cuda.ops.op_registry import Behaviour, ScratchBlock, cuda_op

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten

_PARTIAL_SUMS = Behaviour(
    name="reduction",
    does="partial results of at most 8 MiB if few results are computed from many elements",
    source="aten/src/ATen/native/cuda/Reduce.cuh: ReduceConfig.global_memory_size, torch 2.13",
    exact=False,
)

_MOST = 8 * 2**20
_FEW = 2**16


@cuda_op(aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default, of=_PARTIAL_SUMS)
def _reduction(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    elements, n_results = args[0].numel(), results[0].numel()
    if n_results > _FEW or elements < 64 * n_results:
        return []
    return [ScratchBlock(0, 0, min(_MOST, elements * 4))]
