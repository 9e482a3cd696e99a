"""Lookup of the operands and constants of a recipe, the function that recomputes the output of an autograd node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from lowtide._torch.nodes import RAW_SAVED, SAVED, get_output_metadata, get_saved_slot
from lowtide.runtime.attention_scores import find_added_mask
from lowtide.runtime.operand_capture import NUMBERS, CaptureSite, Number, find_captured_operand
from lowtide.runtime.recipes import FILLED, OUTPUT_CONSTANTS, CannotRecompute, Recipe
from lowtide.runtime.saved_fields import changed_in_place
from lowtide.runtime.saved_values import Handle, Value, unpack
from lowtide.runtime.view_geometry import compute_contiguous_stride

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node

    from lowtide.runtime.recompute_builder import Builder
    from lowtide.runtime.tensor_writers import ReliedOn


class OperandLookup:
    """Lookup of the operands and constants with which `recipe` recomputes an output of `node`.

    They are looked up on the node, on its input edges, and on the modules that own its parameter.
    """

    __slots__ = ("_edges", "builder", "captured_sites", "depth", "like", "node", "output", "recipe")

    def __init__(
        self, builder: Builder, node: Node, recipe: Recipe, output: int, like: Tensor | None, depth: int
    ) -> None:
        self.builder, self.node, self.recipe, self.depth = builder, node, recipe, depth
        self.output, self.like = output, like
        self._edges: tuple[tuple[Node | None, int], ...] | None = None
        self.captured_sites: frozenset[CaptureSite] = frozenset()
        """Sites of the captured operands that the recompute needs."""

    @property
    def relied_on(self) -> ReliedOn:
        return self.builder.owners.relied_on

    @property
    def edges(self) -> tuple[tuple[Node | None, int], ...]:
        """Return the node's input edges."""
        if self._edges is None:  # torch makes the list at each access
            self._edges = self.node.next_functions
        return self._edges

    def operand(self, name: str) -> Handle | Number | None:
        slot = getattr(self.node, RAW_SAVED + name, None)
        if slot is not None:
            data = slot.data
            if isinstance(data, Handle):
                if not data.value.is_partial:
                    return self.relied_on.hold_slot(data)
            elif data is not None and slot.unpack_hook is None:
                # autograd holds the tensor without a hook: read it as backward will
                try:
                    own = getattr(self.node, SAVED + name)
                except RuntimeError as error:
                    raise CannotRecompute(str(error)) from None
                return self.relied_on.hold_slot(own)
            elif (saved := self.saved(name)) is not None:
                return self.relied_on.hold_slot(saved)
        edge = self.recipe.edges.get(name)
        if edge is not None:
            if self._edges is None:
                self._edges = self.node.next_functions
            value = self.builder.find_edge_value(self._edges[edge], self.depth)
            if value is not None:
                return Handle(value)
        captured = find_captured_operand(self.node, name) or find_added_mask(self.node, name)
        if captured is not None:
            place, what = captured
            self.captured_sites |= {place}
            return what if isinstance(what, NUMBERS) else Handle(what if isinstance(what, Value) else Value(what))
        owned = self.owned(name)
        if isinstance(owned, torch.Tensor):
            return Handle(self.relied_on.hold_leaf(owned))
        if self.absent(name):
            return None
        raise CannotRecompute(f"{self.node.name()} does not record {name}")

    def operands(self, name: str) -> list[Handle | None]:
        """Return the operands for the recipe's parameter `name`, a list of tensors, such as the inputs of `cat`.

        They are tensors that the node saved, or the tensors on all its input edges. Raises CannotRecompute if some of
        them are in neither place.
        """
        saved = self.saved(name)
        if saved is not None:
            return [None if item is None else self.relied_on.hold_slot(item) for item in saved]
        wanted, edges = self.recipe.edges.get(name), [edge for edge in self.edges if edge[0] is not None]
        if wanted == FILLED and len(edges) < len(self.edges):
            dim = self.constant("dim")
            filled = sum(read_edge_shape(edge)[dim] for edge in edges) == self.constant("out_shape")[dim]
        else:
            filled = wanted is not None and len(edges) == len(self.edges)
        if not filled:
            raise CannotRecompute(f"{self.node.name()} does not record the inputs that need no gradient")
        return [
            Handle(value) for edge in edges if (value := self.builder.find_edge_value(edge, self.depth)) is not None
        ]

    def constant(self, name: str) -> Any:
        if name in OUTPUT_CONSTANTS:
            if name == "out_stride":
                return (
                    compute_contiguous_stride(self.constant("out_shape")) if self.like is None else self.like.stride()
                )
            return getattr(get_output_metadata(self.node, self.output), name.removeprefix("out_"))
        if self.recipe.read_off and name in self.recipe.read_off:
            try:
                return self.recipe.read_off[name](None if self.like is None else self.like.detach(), self)
            except RuntimeError as error:
                raise CannotRecompute(f"{name} of {self.node.name()} can't be determined: {error}") from None
        try:
            return signed(getattr(self.node, SAVED + name))
        except AttributeError:
            owned = self.owned(name)
            if owned is None and name not in self.recipe.optional:
                raise CannotRecompute(f"{self.node.name()} does not record {name}") from None
            return owned

    def saved(self, name: str) -> Any:
        """Return the tensor that the node saved as `name`, or None: a handle, a tensor, or a tuple of these."""
        slot = getattr(self.node, RAW_SAVED + name, None)
        if slot is None:
            return None
        content = tuple(map(ours, slot)) if isinstance(slot, tuple) else ours(slot)
        if content is _AUTOGRAD_S or (isinstance(content, tuple) and any(item is _AUTOGRAD_S for item in content)):
            return self.read_unhooked_tensor(name)
        return content

    def read_unhooked_tensor(self, name: str) -> Any:
        """Return a saved tensor that passed no hook, in the form that backward will read. Raises CannotRecompute if it
        has been changed.
        """
        try:
            return getattr(self.node, SAVED + name)
        except RuntimeError as error:
            raise CannotRecompute(str(error)) from None

    def absent(self, name: str) -> bool:
        """Return True if the operator was called without its optional tensor `name`."""
        partner = self.recipe.together.get(name)
        if partner is None or name not in self.recipe.optional:
            return name in self.recipe.optional
        if get_saved_slot(self.node, SAVED + partner) is not None:
            return self.saved(partner) is None
        sizes = self.constant(partner)
        return not sizes or not any(sizes)  # (0,) means no bias

    def owned(self, name: str) -> Any:
        """Return the attribute `name` of the modules that own the recipe's parameter; None if they have none, or
        different ones.
        """
        if self.recipe.owner is None:
            return None
        modules = self.builder.owners.of(self.parameter(self.recipe.owner))
        attributes = [attribute for module in modules if (attribute := getattr(module, name, None)) is not None]
        return attributes[0] if attributes and all(are_same(other, attributes[0]) for other in attributes) else None

    def parameter(self, name: str) -> int:
        """Return the `id` of the parameter that is the operand `name`; 0 if the operand is no parameter."""
        edge = self.recipe.edges.get(name)
        if edge is not None and (leaf := find_leaf_behind(self.edges[edge][0])):
            return leaf
        handle = self.saved(name)  # a frozen parameter that Lowtide's hook has seen
        if not isinstance(handle, Handle):
            return 0
        handle.value.need()
        return handle.value.leaf


def find_leaf_behind(node: Node | None) -> int:
    """Return the `id` of the leaf tensor from which `node` makes a view, such as `weight` for `weight.t()`; else 0."""
    while node is not None and not hasattr(node, "variable"):
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return 0 if node is None else id(node.variable)


AS_RECORDED: Final = frozenset({bool, float, type(None)})
"""Types of constants that need no conversion by `signed`."""
_AUTOGRAD_S: Final = object()
"""Marker for a tensor that no hook saw: reading it from the node checks its version, and runs nothing."""


def ours(slot: Any) -> Any:
    """Return the content of a saved tensor's slot: a handle, a tensor, or the marker `_AUTOGRAD_S`.

    Returns None for an empty slot, and for a tensor that is kept only in part (its shape or its signs). Raises
    CannotRecompute if other hooks packed the tensor, which would otherwise look like an empty slot.
    """
    data = slot.data
    if isinstance(data, Handle):
        return None if data.value.is_partial else data
    hook = slot.unpack_hook
    if hook is None:
        return None if data is None else _AUTOGRAD_S
    if hook is unpack and isinstance(data, tuple):
        tensor, version = data
        if tensor._version != version:
            raise CannotRecompute(changed_in_place(tensor, version))
        return tensor
    raise CannotRecompute("its inputs were packed by other hooks, or have been freed")


def are_same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, torch.Tensor) and bool(one == other))


def read_edge_shape(edge: tuple[Node | None, int]) -> torch.Size:
    """Return the shape of the forward tensor that an edge of the autograd graph stands for."""
    node, output = edge
    assert node is not None
    leaf = getattr(node, "variable", None)
    shape: torch.Size = get_output_metadata(node, output).shape if leaf is None else leaf.shape
    return shape


def signed(constant: Any) -> Any:
    """Convert a constant of a node to a signed number: autograd shows a negative dimension as an unsigned one of 64
    bits. Numbers in tuples are converted, too.
    """
    if isinstance(constant, tuple):
        return tuple([item if type(item) is int and item < 2**63 else signed(item) for item in constant])
    return constant - 2**64 if type(constant) is int and constant >= 2**63 else constant
