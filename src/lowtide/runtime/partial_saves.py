"""Saved tensors that backward needs in part only: their shape, or their signs.

A pooling layer saves its input only for the input's shape. A ReLU saves its result to know which elements were above 0,
for which one bit each is enough (Jain et al., Gist, ISCA 2018, doi 10.1109/ISCA.2018.00070). If no other node saved the
result, as is the case before a pooling layer, no recompute is needed.

A pack hook is not told which node saves a tensor. A ReLU saves its own result if the result's node has yet to save one.
An input that was saved for its shape is recognized later, when the call returns the output of the node that saved it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from lowtide._torch.nodes import SAVED, has_yet_to_save
from lowtide._torch.tensors import is_plain
from lowtide.planner.address_nodes import INDICES, MASK, SHAPE, SIGNS
from lowtide.runtime.bitmask import FROM_BITS, pack_mask, pack_signs
from lowtide.runtime.recipes import CannotRecompute, Recipe
from lowtide.runtime.recompute import Recompute
from lowtide.runtime.saved_values import Handle, Value, peek
from lowtide.runtime.small_integers import FROM_OFFSETS, pack_indices

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
    """Return True if `tensor` is being saved by the node that computed it, and backward of that node reads only its
    signs (ReLU).
    """
    node = tensor.grad_fn
    return node is not None and node.name() in READS_SIGNS and has_yet_to_save(node, SAVED + "result")


def find_input_saved_for_shape(result: Any) -> Handle | None:
    """Return the handle on the saved input of the node that made `result`, if backward reads only the input's shape.

    Returns None otherwise.
    """
    node = getattr(result, "grad_fn", None)
    if node is None or node.name() not in READS_SHAPE:
        return None
    held = peek(node, SAVED + "self")
    return held if isinstance(held, Handle) else None


def packed(kind: str, tensor: Tensor) -> Value:
    """Return a Value that holds only the part of `tensor` that backward needs; `kind` is a key of `PACKINGS`.

    Raises CannotRecompute, with the reason, if that is impossible.
    """
    recipe, constants = PACKINGS[kind]
    is_whole = kind in (MASK, INDICES)
    value = Value(maker=Recompute(recipe, (), None, constants(tensor), tensor.stride() if is_whole else None))
    value.is_partial = not is_whole
    return value


def _pack_shape(tensor: Tensor) -> dict[str, Any]:
    if not is_plain(tensor):
        raise CannotRecompute(f"it is a {type(tensor).__name__} of layout {tensor.layout}")
    like = {"dtype": tensor.dtype, "device": tensor.device}
    return {"shape": tensor.shape, "stride": tensor.stride(), "plain": tensor.is_contiguous(), **like}


def _restore_shape(
    *, shape: torch.Size, stride: tuple[int, ...], plain: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a tensor with this shape, dtype and device whose elements do not matter.

    With `plain`, it is a single number, expanded. Otherwise it has the strides `stride`, and takes memory: strides of 0
    would hide the order of permuted dimensions.
    """
    if plain:
        return torch.zeros((), dtype=dtype, device=device).expand(shape)
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


FROM_SIGNS: Final = replace(FROM_BITS, node=SIGNS)

FROM_SHAPE: Final = Recipe(
    node=SHAPE,
    function=_restore_shape,
    operands=(),
    lists=frozenset(),
    optional=frozenset(),
    constants=("shape", "stride", "plain", "dtype", "device"),
    several=False,
)

PACKINGS: Final[dict[str, tuple[Recipe, Callable[[Tensor], dict[str, Any]]]]] = {
    MASK: (FROM_BITS, pack_mask),
    INDICES: (FROM_OFFSETS, pack_indices),
    SIGNS: (FROM_SIGNS, pack_signs),
    SHAPE: (FROM_SHAPE, _pack_shape),
}
"""For each packing, by its name in plans: the recipe that unpacks the tensor, and the function that packs it."""
