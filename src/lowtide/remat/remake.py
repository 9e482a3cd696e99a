"""One node's output, remade from a recipe: its operands are found at pack time and held as handles."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch import SAVED, any_autocast, base_of, output_metadata
from lowtide.remat import values
from lowtide.remat.recipes import OUTPUT_CONSTANTS, RECIPES, Recipe
from lowtide.remat.values import Geometry, Handle, Value, peek, register, registered

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node

MAX_CHAIN = 32
"""Nodes that one remake may go through before it meets a value that somebody holds."""

Owners = dict[int, tuple[torch.nn.Module, ...]]
"""`id` of a parameter -> the modules that own it."""


class CannotRemake(Exception):
    """Why a value has to be kept; never leaves the package."""


class Remake:
    """A pending run of a recipe. As long as it is pending its operands know that somebody waits for them."""

    __slots__ = ("constants", "operands", "outputs", "recipe")

    def __init__(self, recipe: Recipe, operands: tuple[Handle | None, ...], constants: dict[str, Any]) -> None:
        self.recipe = recipe
        self.operands = operands
        self.constants = constants
        self.outputs: list[weakref.ref[Value]] = []

    def value(self, output: int) -> Value:
        """The value of one of the node's outputs."""
        value = Value(maker=self, output=output)
        self.outputs.append(weakref.ref(value))
        return value

    def make(self, value: Value) -> Tensor:
        """Run the recipe; every output that somebody waits for stays."""
        args = [None if operand is None else operand.get() for operand in self.operands]
        if values.probe is not None:
            values.probe.making(self)
        with plain():
            made = self.recipe.function(*args, **self.constants)
        outputs = made if isinstance(made, tuple) else (made,)
        if values.probe is not None:
            values.probe.made(self, outputs)
        for found in (reference() for reference in self.outputs):
            if found is not None:
                found.arrive(outputs[found.output])
        return outputs[value.output]


def plain() -> contextlib.AbstractContextManager[Any]:
    """Neither gradients nor autocast: what was recorded is run again as it was, whatever surrounds backward."""
    if not torch.is_grad_enabled() and not any_autocast():
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(torch.no_grad())
    if any_autocast():
        for device in ("cpu", torch._C._get_accelerator().type):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def producer(tensor: Tensor) -> tuple[Tensor, Node | None, int, Geometry | None]:
    """The base tensor behind views, the node that made it, which output it is, and the geometry of `tensor` in it."""
    base = base_of(tensor)
    if base is None or base.dtype != tensor.dtype or tensor.is_conj() or tensor.is_neg():
        return tensor, tensor.grad_fn, tensor.output_nr, None
    return base, base.grad_fn, base.output_nr, (tensor.size(), tensor.stride(), tensor.storage_offset())


class Builder:
    """Finds what a recipe needs: on the node, on its input edges, or on the module that owns its parameter."""

    __slots__ = ("owners",)

    def __init__(self, owners: Owners) -> None:
        self.owners = owners

    def remake(self, node: Node, output: int, like: Tensor | None = None, depth: int = 0) -> Value:
        """A registered value that a recipe makes from what is upstream of it. Raises CannotRemake, saying why.

        `like` is the output itself where it is at hand; only recipes that ask for `out_stride` need it.
        """
        found = RECIPES.get(node.name())
        if found is None:
            raise CannotRemake(f"no recipe for {node.name()}")
        if depth > MAX_CHAIN:
            raise CannotRemake(f"more than {MAX_CHAIN} nodes in a row hold nothing")
        source = _Source(self, node, found, depth)
        operands = tuple(source.operand(name) for name in found.operands)
        constants = {name: source.constant(name, output, like) for name in found.constants}
        value = Remake(found, operands, constants).value(output)
        register(node, output, value)
        return value

    def on_edge(self, edge: tuple[Node | None, int], depth: int) -> Value | None:
        """The value that flowed along an edge of the graph; None where the edge needs no gradient."""
        node, output = edge
        if node is None:
            return None
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            return Value(leaf.detach())
        return registered(node, output) or self.remake(node, output, depth=depth + 1)


class _Source:
    """Where one node's recipe gets its operands and constants from."""

    __slots__ = ("builder", "depth", "node", "recipe")

    def __init__(self, builder: Builder, node: Node, recipe: Recipe, depth: int) -> None:
        self.builder, self.node, self.recipe, self.depth = builder, node, recipe, depth

    def operand(self, name: str) -> Handle | None:
        found = self.saved(name)
        if isinstance(found, Handle):
            return Handle(found.value, found.view)
        if isinstance(found, torch.Tensor):  # saved past the hooks: a number (not to be detached), or in other hooks
            return Handle(Value(found.detach() if found.requires_grad else found))
        edge = self.recipe.edges.get(name)
        if edge is not None:
            value = self.builder.on_edge(self.node.next_functions[edge], self.depth)
            if value is not None:
                return Handle(value)
        owned = self.owned(name)
        if isinstance(owned, torch.Tensor):
            return Handle(Value(owned.detach()))
        if name in self.recipe.optional:
            return None
        raise CannotRemake(f"{self.node.name()} does not record {name}")

    def constant(self, name: str, output: int, like: Tensor | None) -> Any:
        if name in OUTPUT_CONSTANTS:
            if name == "out_stride":
                if like is None:
                    raise CannotRemake(f"the strides of an output of {self.node.name()} are not recorded")
                return like.stride()
            return getattr(output_metadata(self.node, output), name.removeprefix("out_"))
        try:
            return signed(getattr(self.node, SAVED + name))
        except AttributeError:
            owned = self.owned(name)
            if owned is None:
                raise CannotRemake(f"{self.node.name()} does not record {name}") from None
            return owned

    def saved(self, name: str) -> Any:
        """What the node saved under `name`; None if nothing, or if it is the very tensor that is being packed."""
        try:
            return peek(self.node, SAVED + name)
        except (AttributeError, RuntimeError):
            return None

    def owned(self, name: str) -> Any:
        """The attribute `name` of the modules that own the recipe's parameter, if they agree on it."""
        if self.recipe.owner is None:
            return None
        parameter = self.parameter(self.recipe.owner)
        found = [getattr(module, name) for module in self.builder.owners.get(parameter, ()) if hasattr(module, name)]
        return found[0] if found and all(other is found[0] or other == found[0] for other in found) else None

    def parameter(self, name: str) -> int:
        """`id` of the parameter that is the operand `name`; 0 if it is none."""
        found = self.saved(name)
        if isinstance(found, Handle) and found.value.leaf:
            return found.value.leaf
        edge = self.recipe.edges.get(name)
        node = None if edge is None else self.node.next_functions[edge][0]
        while node is not None and not hasattr(node, "variable"):  # through the views of a weight: `weight.t()`
            node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
        return 0 if node is None else id(node.variable)  # type: ignore[attr-defined]


def signed(constant: Any) -> Any:
    """Autograd shows a negative dimension as an unsigned 64-bit number; undo that. Works inside tuples."""
    if isinstance(constant, tuple):
        return tuple(signed(item) for item in constant)
    return constant - 2**64 if type(constant) is int and constant >= 2**63 else constant
