"""All behaviours, all kernels that stand for CUDA's, all that operators take inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lowtide.foresight.behaviours import (
    attention,
    autocast,
    convolution,
    dropout,
    lookup,
    normalization,
    optimizers,
    products,
    recurrent,
    reductions,
)

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.foresight.behaviours.behaviour import Behaviour, Inside

BEHAVIOURS: tuple[Behaviour, ...] = (
    *attention.ROWS,
    *normalization.ROWS,
    *dropout.ROWS,
    *autocast.ROWS,
    *products.ROWS,
    *convolution.ROWS,
    *recurrent.ROWS,
    *lookup.ROWS,
    *reductions.ROWS,
    *optimizers.ROWS,
)

KERNELS: dict[str, Callable[..., Any]] = {**attention.KERNELS, **normalization.KERNELS, **recurrent.KERNELS}
"""Operators by name, for autograd on the card."""

INSIDE: dict[Any, Callable[[Any, Any, list[Tensor]], list[Inside]]] = {
    **attention.INSIDE,
    **normalization.INSIDE,
    **convolution.INSIDE,
    **lookup.INSIDE,
    **reductions.INSIDE,
}
"""(args, kwargs, results) -> the blocks that an operator takes inside, by operator."""
