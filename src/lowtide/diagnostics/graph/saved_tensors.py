"""Tensors that an autograd node keeps, read from its saved variables. Nothing is unpacked or recomputed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide._torch.nodes import find_saved_slots
from lowtide._torch.operators import list_tensor_arguments
from lowtide._torch.pytree import tree_leaves
from lowtide._torch.tensors import base_of, find_parts, get_storage_id
from lowtide.diagnostics.graph.graph_records import Kept
from lowtide.runtime.saved_values import Handle

if TYPE_CHECKING:
    from torch.autograd.graph import Node as Function

_ATTRIBUTES = re.compile(r"[a-z_]\w*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SavedSlot:
    """One tensor that an autograd node keeps, and the name under which it is saved, such as `mat1`."""

    name: str
    tensor: Tensor
    packed: str = ""

    def kept(self, parameters: frozenset[int]) -> Kept:
        storage = get_storage_id(self.tensor)
        base = base_of(self.tensor)
        is_parameter = isinstance(self.tensor if base is None else base, nn.Parameter) or storage in parameters
        return Kept(
            name=self.name,
            shape=read_shape(self.tensor),
            dtype=str(self.tensor.dtype).removeprefix("torch."),
            bytes=storage_bytes(self.tensor),
            storage=storage or id(self.tensor),
            parameter=is_parameter,
            packed=self.packed,
        )


def saved_by(function: Function) -> Iterator[SavedSlot]:
    """Yield all tensors that a node keeps: saved tensors, tensors inside packed objects, and attributes of a ctx."""
    for name, slot in find_saved_slots(function):
        data = slot.data
        if isinstance(data, Tensor) and slot.unpack_hook is None:
            yield SavedSlot(name, data)
        elif data is not None:
            for tensor in _find_visible_tensors(data):
                yield SavedSlot(name, tensor, packed=type(data).__name__)
    if issubclass(type(function), torch.autograd.function.BackwardCFunction):
        for name, attribute in vars(function).items():
            yield from (SavedSlot(f"ctx.{name}", leaf) for leaf in tree_leaves(attribute) if isinstance(leaf, Tensor))


def _find_visible_tensors(packed: Any) -> Iterator[Tensor]:
    """Yield the tensors visible in the object that a pack hook returned."""
    if isinstance(packed, Handle):
        packed = packed.value.tensor
    yield from (leaf for leaf in tree_leaves(packed) if isinstance(leaf, Tensor))


def read_shape(tensor: Tensor) -> tuple[int, ...] | None:
    """Return a tensor's shape; None for nested tensors, which have several."""
    return None if tensor.is_nested else tuple(tensor.shape)


def storage_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's whole storage; for a sparse tensor, of the storages of its parts."""
    try:
        return tensor.untyped_storage().nbytes()
    except RuntimeError:
        return sum(part.untyped_storage().nbytes() for part in find_parts(tensor) if part is not tensor)


_RESULT = re.compile(r"(?:result|output|out)(\d*)")


def parse_output_index(name: str) -> int | None:
    """Return the output index in the name of a saved output: 1 for `result1`, 0 for `result`. None for other names."""
    match = _RESULT.fullmatch(name)
    return None if match is None else int(match[1] or 0)


@cache
def list_argument_names(node_name: str) -> tuple[tuple[str, ...], ...]:
    """Return the names of an operator's tensor arguments for each of its overloads, given its node's name.

    Example: `AddmmBackward0` is the node of `addmm`.
    """
    camel = re.sub(r"Backward\d*$", "", node_name)
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])", "_", camel).lower()
    if not _ATTRIBUTES.fullmatch(snake):  # custom Functions and nodes of C++ may have any name
        return ()
    return (*list_tensor_arguments(snake), *list_tensor_arguments(f"_{snake}"))
