"""What is enough of a saved tensor for who reads it: of some the shape, of some which elements are positive.

A pooling layer saves its input to know how large it was. A ReLU saves its result to know where it was above 0: for that
a bit is enough (Jain et al., Gist, ISCA 2018, doi 10.1109/ISCA.2018.00070). If nobody else saved the result, which is
so before a pooling layer, there is nothing to be made again.

Only the node itself says who reads what, so it is asked: a result is saved when its own node has not got one yet, and
an input is let go of when the call that it was saved in returns what that node made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from lowtide._torch.nodes import SAVED, has_yet_to_save
from lowtide._torch.tensors import is_plain
from lowtide.planner.address_nodes import MASK, SHAPE, SIGNS
from lowtide.runtime.bitmask import FROM_BITS, bits_of, signs_of
from lowtide.runtime.recipes import CannotRecompute, Recipe
from lowtide.runtime.recompute import Recompute
from lowtide.runtime.saved_values import Handle, Value, peek

if TYPE_CHECKING:
    from torch import Tensor

READS_SHAPE: Final = frozenset(
    {
        "AdaptiveAvgPool2DBackward0",
        "AdaptiveAvgPool3DBackward0",
        "AdaptiveMaxPool2DBackward0",
        "AdaptiveMaxPool3DBackward0",
        "AvgPool2DBackward0",
        "AvgPool3DBackward0",
        "MaxPool2DWithIndicesBackward0",
        "MaxPool3DWithIndicesBackward0",
        "ReflectionPad1DBackward0",
        "ReflectionPad2DBackward0",
        "ReflectionPad3DBackward0",
        "ReplicationPad1DBackward0",
        "ReplicationPad2DBackward0",
        "ReplicationPad3DBackward0",
    }
)
"""Nodes that save `self` and read its sizes, its type and its order of dimensions (derivatives.yaml of torch 2.13)."""

READS_SIGNS: Final = frozenset({"ReluBackward0"})
"""Nodes that save their `result` and pass on the gradient where it is not at most 0 (`threshold_backward`)."""


def saves_signs(tensor: Tensor) -> bool:
    """Whether `tensor`, which is being saved, is saved by the node that made it, for its signs."""
    node = tensor.grad_fn
    return node is not None and node.name() in READS_SIGNS and has_yet_to_save(node, SAVED + "result")


def saved_for_shape(result: Any) -> Handle | None:
    """The claim on a tensor of which backward reads only the shape, if `result` is what a node made that saved one."""
    node = getattr(result, "grad_fn", None)
    if node is None or node.name() not in READS_SHAPE:
        return None
    held = peek(node, SAVED + "self")
    return held if isinstance(held, Handle) else None


def packed(kind: str, tensor: Tensor) -> Value:
    """What is enough of `tensor` for who reads it. Raises CannotRecompute, saying why that can't be."""
    recipe, constants = PACKINGS[kind]
    value = Value(maker=Recompute(recipe, {}, constants(tensor), tensor.stride() if kind == MASK else None))
    value.partial = kind != MASK
    return value


def _shape_of(tensor: Tensor) -> dict[str, Any]:
    if not is_plain(tensor):
        raise CannotRecompute(f"it is a {type(tensor).__name__} of layout {tensor.layout}")
    like = {"dtype": tensor.dtype, "device": tensor.device}
    return {"shape": tensor.shape, "stride": tensor.stride(), "plain": tensor.is_contiguous(), **like}


def _no_values(
    *, shape: torch.Size, stride: tuple[int, ...], plain: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor of that shape. Only one whose dimensions are in another order has memory: strides of 0 would hide it."""
    if plain:
        return torch.zeros((), dtype=dtype, device=device).expand(shape)
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


FROM_SIGNS: Final = replace(FROM_BITS, node=SIGNS)

FROM_SHAPE: Final = Recipe(
    node=SHAPE,
    function=_no_values,
    operands=(),
    lists=frozenset(),
    optional=frozenset(),
    constants=("shape", "stride", "plain", "dtype", "device"),
    several=False,
)

PACKINGS: Final[dict[str, tuple[Recipe, Callable[[Tensor], dict[str, Any]]]]] = {
    MASK: (FROM_BITS, bits_of),
    SIGNS: (FROM_SIGNS, signs_of),
    SHAPE: (FROM_SHAPE, _shape_of),
}
"""By what plans have in the place of an autograd node: a recipe, and what it takes of a tensor."""
