"""Additive masks of attention that runs without a fused kernel (`attention.cpp` of torch 2.13).

Attention adds the mask to its scores in C++; the sum is not saved, and its node does not record the mask. So
`OperandCapture` holds the mask of a call while attention runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch

from lowtide._torch.nodes import get_output_metadata, sequence_number
from lowtide.runtime.operand_capture import CaptureSite, here
from lowtide.runtime.recipes import Recipe
from lowtide.runtime.recompute import Recompute
from lowtide.runtime.saved_values import Handle, Value

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node


def find_added_mask(node: Node, name: str) -> tuple[CaptureSite, Value] | None:
    """Return the additive mask of attention if `node` adds it to the scores as its operand `name`; else None.

    The mask is returned as the site where it was captured and a Value that holds or recomputes it.
    """
    attention = here.attention
    if attention is None or (node.name(), name) != ("AddBackward0", "other"):
        return None
    if sequence_number(node) < attention.first:
        return None
    scores = get_output_metadata(node, 0)
    if attention.mask is None:
        constants = {"shape": scores.shape[-2:], "dtype": scores.dtype, "device": scores.device}
        return attention.place, Value(maker=Recompute(_CAUSAL, (), None, constants, None))
    mask = attention.mask.tensor
    if mask is None or mask.dtype != torch.bool:
        return attention.place, attention.mask
    return attention.place, Value(
        maker=Recompute(_AS_NUMBERS, (Handle(attention.mask),), None, {"dtype": scores.dtype}, None)
    )


def _causal(*, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, -torch.inf, dtype=dtype, device=device).triu_(1)


def _as_numbers(mask: Tensor, *, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask.logical_not(), -torch.inf)


def _make_mask_recipe(function: Callable[..., Tensor], operands: tuple[str, ...], constants: tuple[str, ...]) -> Recipe:
    return Recipe(
        node="AttentionMask",
        function=function,
        operands=operands,
        lists=frozenset(),
        optional=frozenset(),
        constants=constants,
        several=False,
    )


_CAUSAL: Final = _make_mask_recipe(_causal, (), ("shape", "dtype", "device"))
_AS_NUMBERS: Final = _make_mask_recipe(_as_numbers, ("mask",), ("dtype",))
