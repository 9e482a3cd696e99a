"""All behaviours, stand-in kernels and scratch rules for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lowtide.estimator.cuda.ops import (
    attention,
    autocast,
    convolution,
    dropout,
    normalization,
    optimizers,
    reductions,
    softmax,
)
from lowtide.estimator.cuda.ops import attention_flash as flash
from lowtide.estimator.cuda.ops import attention_mem_efficient as efficient
from lowtide.estimator.cuda.ops import indexing as lookup
from lowtide.estimator.cuda.ops import matmul as products
from lowtide.estimator.cuda.ops import pooling as resampling
from lowtide.estimator.cuda.ops import rnn as recurrent

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.estimator.cuda.ops.op_record import Behaviour, ScratchBlock

BEHAVIOURS: tuple[Behaviour, ...] = (
    *attention.ROWS,
    *flash.ROWS,
    *efficient.ROWS,
    *normalization.ROWS,
    *softmax.ROWS,
    *dropout.ROWS,
    *autocast.ROWS,
    *products.ROWS,
    *convolution.ROWS,
    *resampling.ROWS,
    *recurrent.ROWS,
    *lookup.ROWS,
    *reductions.ROWS,
    *optimizers.ROWS,
)

KERNELS: dict[str, Callable[..., Any]] = {**attention.KERNELS, **normalization.KERNELS, **recurrent.KERNELS}
"""Kernels by operator name, for autograd on the GPU."""

SHAPES: dict[Any, Callable[..., Any]] = {**recurrent.SHAPES}
"""Functions that return the results of operators that torch can't run on fake tensors."""

LAYOUTS: dict[Any, Callable[[Any, Any], Any]] = {
    **convolution.LAYOUTS,
    **normalization.LAYOUTS,
    **softmax.LAYOUTS,
}
"""(args, results) -> the results in CUDA's memory layout, by operator."""

ORDER: dict[Any, tuple[int, ...]] = {**dropout.ORDER}
"""Allocation order of an operator's results, where it differs from their own order."""

ON_HOST: dict[Any, range] = {**efficient.ON_HOST}
"""Results of an operator that are on the host."""

INSIDE: dict[Any, Callable[[Any, Any, list[Tensor]], list[ScratchBlock]]] = {
    **flash.INSIDE,
    **efficient.INSIDE,
    **normalization.INSIDE,
    **softmax.INSIDE,
    **products.INSIDE,
    **convolution.INSIDE,
    **resampling.INSIDE,
    **lookup.INSIDE,
    **reductions.INSIDE,
}
"""(args, kwargs, results) -> the scratch blocks of an operator, by operator."""
