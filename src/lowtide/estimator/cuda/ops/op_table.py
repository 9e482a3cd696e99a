"""All behaviours, all kernels that stand for CUDA's, all that operators take inside."""

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
"""Operators by name, for autograd on the GPU."""

SHAPES: dict[Any, Callable[..., Any]] = {**recurrent.SHAPES}
"""What gives the results of operators that torch can't run on fake tensors."""

LAYOUTS: dict[Any, Callable[[Any, Any], Any]] = {
    **convolution.LAYOUTS,
    **normalization.LAYOUTS,
    **softmax.LAYOUTS,
}
"""(args, results) -> the results as they lie in memory, by operator."""

ORDER: dict[Any, tuple[int, ...]] = {**dropout.ORDER}
"""The order in which an operator allocates its results, where it is another one than theirs."""

ON_HOST: dict[Any, range] = {**efficient.ON_HOST}
"""Which of an operator's results are not on the GPU."""

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
"""(args, kwargs, results) -> the blocks that an operator takes inside, by operator."""
