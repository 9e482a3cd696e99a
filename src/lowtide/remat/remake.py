"""One node's output, remade from a recipe: its operands are found at pack time and held as handles."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch import SAVED, any_autocast, is_plain, output_metadata, saved_slot
from lowtide.remat import values
from lowtide.remat.layout import contiguous_stride, laid_out
from lowtide.remat.recipes import FILLED, OUTPUT_CONSTANTS, RECIPES, CannotRemake, Recipe
from lowtide.remat.values import Handle, Value, register, registered

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node

__all__ = ["MAX_CHAIN", "Builder", "CannotRemake", "Owners", "Remake"]

MAX_CHAIN = 32
"""Nodes that one remake may go through before it meets a value that somebody holds."""

Owners = dict[int, tuple[torch.nn.Module, ...]]
"""`id` of a parameter -> the modules that own it."""


class Remake:
    """A pending run of a recipe. As long as it is pending its operands know that somebody waits for them."""

    __slots__ = ("certain", "constants", "operands", "places", "recipe", "stride")

    def __init__(
        self,
        recipe: Recipe,
        arguments: list[Handle | list[Handle | None] | None],
        constants: dict[str, Any],
        stride: tuple[int, ...] | None,
    ) -> None:
        self.recipe = recipe
        self.constants = constants
        self.stride = stride
        """What the result's strides must be; None where nobody looks at it with a geometry of its own."""
        flat: list[Handle | None] = []
        places: list[int | slice] = []
        for argument in arguments:
            places.append(slice(len(flat), len(flat) + len(argument)) if isinstance(argument, list) else len(flat))
            flat.extend(argument if isinstance(argument, list) else [argument])
        self.operands = tuple(flat)
        self.places = tuple(places)
        self.certain = stride is not None or (
            "out_stride" not in constants and all(handle is None or certain(handle.value) for handle in flat)
        )
        """Whether the strides of the result are those of the true tensor."""

    def make(self, value: Value) -> Tensor:
        """Run the recipe; the result stays if somebody waits for it."""
        tensors = [None if operand is None else operand.get() for operand in self.operands]
        if values.probe is not None:
            values.probe.making(self)
        with plain():
            made = self.recipe.function(*(tensors[place] for place in self.places), **self.constants)
            result = made[value.output] if isinstance(made, tuple) else made
            if self.stride is not None:
                result = laid_out(result, self.stride)
        if values.probe is not None:
            values.probe.made(self, (result,))
        value.arrive(result)
        return result


def certain(value: Value) -> bool:
    """Whether a value that is kept or made again has the strides of the true tensor."""
    return not isinstance(value.maker, Remake) or value.maker.certain


def plain() -> contextlib.AbstractContextManager[Any]:
    """Neither gradients nor autocast: what was recorded is run again as it was, whatever surrounds backward."""
    if not torch.is_grad_enabled() and not any_autocast():
        return _NOTHING
    stack = contextlib.ExitStack()
    stack.enter_context(torch.no_grad())
    if any_autocast():
        for device in ("cpu", torch._C._get_accelerator().type):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


_NOTHING = contextlib.nullcontext()


class Builder:
    """Finds what a recipe needs: on the node, on its input edges, or on the module that owns its parameter."""

    __slots__ = ("owners",)

    def __init__(self, owners: Owners) -> None:
        self.owners = owners

    def remake(self, node: Node, output: int, like: Tensor | None = None, depth: int = 0) -> Value:
        """A value that a recipe makes from what is upstream of it. Raises CannotRemake, saying why.

        `like` is the output itself where it is at hand: the result will have its strides. Without it the value is only
        passed through by the remakes of others; it is registered if its strides are certain all the same.
        """
        found = RECIPES.get(node.name())
        if found is None:
            raise CannotRemake(f"no recipe for {node.name()}")
        if output and not found.several:
            raise CannotRemake(f"no recipe for output {output} of {node.name()}")
        if found.device is not None and found.device != (device := output_metadata(node, output).device.type):
            raise CannotRemake(f"no recipe for {node.name()} on {device}")
        if depth > MAX_CHAIN:
            raise CannotRemake(f"more than {MAX_CHAIN} nodes in a row hold nothing")
        if like is not None and not is_plain(like):
            raise CannotRemake(f"it is a {type(like).__name__} of layout {like.layout}")
        if like is not None and like.storage_offset():
            raise CannotRemake("it does not begin where its storage does")
        source = _Source(self, node, found, output, like, depth)
        for name, wanted in found.when.items():
            if source.constant(name) != wanted:
                raise CannotRemake(f"{node.name()} with {name}={source.constant(name)} is not made again")
        constants = {name: source.constant(name) for name in found.constants}
        operands = [source.operands(name) if name in found.lists else source.operand(name) for name in found.operands]
        remake = Remake(found, operands, constants, None if like is None else like.stride())
        value = Value(maker=remake, output=output)
        if remake.certain:
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

    __slots__ = ("builder", "depth", "like", "node", "output", "recipe")

    def __init__(
        self, builder: Builder, node: Node, recipe: Recipe, output: int, like: Tensor | None, depth: int
    ) -> None:
        self.builder, self.node, self.recipe, self.depth = builder, node, recipe, depth
        self.output, self.like = output, like

    def operand(self, name: str) -> Handle | None:
        saved = self.saved(name)
        if saved is not None:
            return claim(saved)
        edge = self.recipe.edges.get(name)
        if edge is not None:
            value = self.builder.on_edge(self.node.next_functions[edge], self.depth)
            if value is not None:
                return Handle(value)
        owned = self.owned(name)
        if isinstance(owned, torch.Tensor):
            return Handle(Value(owned.detach()))
        if self.absent(name):
            return None
        raise CannotRemake(f"{self.node.name()} does not record {name}")

    def operands(self, name: str) -> list[Handle | None]:
        """A list of tensors: as saved, or what flowed along every input edge."""
        saved = self.saved(name)
        if saved is not None:
            return [None if item is None else claim(item) for item in saved]
        wanted, edges = self.recipe.edges.get(name), [edge for edge in self.node.next_functions if edge[0] is not None]
        if wanted == FILLED and len(edges) < len(self.node.next_functions):
            dim = self.constant("dim")
            filled = sum(shape_on(edge)[dim] for edge in edges) == self.constant("out_shape")[dim]
        else:
            filled = wanted is not None and len(edges) == len(self.node.next_functions)
        if not filled:
            raise CannotRemake(f"{self.node.name()} does not record the inputs that need no gradient")
        return [Handle(value) for edge in edges if (value := self.builder.on_edge(edge, self.depth)) is not None]

    def constant(self, name: str) -> Any:
        if name in OUTPUT_CONSTANTS:
            if name == "out_stride":
                return contiguous_stride(self.constant("out_shape")) if self.like is None else self.like.stride()
            return getattr(output_metadata(self.node, self.output), name.removeprefix("out_"))
        if name in self.recipe.read_off:
            try:
                return self.recipe.read_off[name](None if self.like is None else self.like.detach(), self)
            except RuntimeError as error:
                raise CannotRemake(f"{name} of {self.node.name()} can't be read off: {error}") from None
        try:
            return signed(getattr(self.node, SAVED + name))
        except AttributeError:
            owned = self.owned(name)
            if owned is None and name not in self.recipe.optional:
                raise CannotRemake(f"{self.node.name()} does not record {name}") from None
            return owned

    def tensor(self, name: str) -> Tensor:
        saved = self.saved(name)
        found = None if saved is None else claim(saved)
        if found is None or not found.value.kept:
            raise CannotRemake(f"{self.node.name()} does not keep {name}")
        return found.get()

    def saved(self, name: str) -> Any:
        """What the node holds under `name`: a handle, a tensor, or a tuple of these; None if nothing (yet)."""
        slot = saved_slot(self.node, SAVED + name)
        return tuple(map(ours, slot)) if isinstance(slot, tuple) else None if slot is None else ours(slot)

    def absent(self, name: str) -> bool:
        """Whether the op was called without this optional tensor."""
        partner = self.recipe.together.get(name)
        if partner is None or name not in self.recipe.optional:
            return name in self.recipe.optional
        if saved_slot(self.node, SAVED + partner) is not None:
            return self.saved(partner) is None
        sizes = self.constant(partner)
        return not sizes or not any(sizes)  # of no bias: (0,)

    def owned(self, name: str) -> Any:
        """The attribute `name` of the modules that own the recipe's parameter, if they agree on it."""
        if self.recipe.owner is None:
            return None
        modules = self.builder.owners.get(self.parameter(self.recipe.owner), ())
        found = [attribute for module in modules if (attribute := getattr(module, name, None)) is not None]
        return found[0] if found and all(same(other, found[0]) for other in found) else None

    def parameter(self, name: str) -> int:
        """`id` of the parameter that is the operand `name`; 0 if it is none."""
        found = self.saved(name)
        if isinstance(found, Handle) and found.value.leaf:
            return found.value.leaf
        edge = self.recipe.edges.get(name)
        node = None if edge is None else self.node.next_functions[edge][0]
        while node is not None and not hasattr(node, "variable"):  # through the views of a weight: `weight.t()`
            node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
        return 0 if node is None else id(node.variable)


def ours(slot: Any) -> Handle | Tensor | None:
    """What is in a node's slot. Raises CannotRemake if other hooks packed it: that would pass for nothing."""
    data: Handle | Tensor | None = slot.data
    if not isinstance(data, Handle) and slot.unpack_hook is not None:
        raise CannotRemake("it was made from what other hooks have packed, or what has been freed")
    return data


def claim(saved: Handle | Tensor) -> Handle:
    """A handle of our own on what a node holds."""
    if isinstance(saved, Handle):
        return Handle(saved.value, saved.view)
    return Handle(Value(saved.detach() if saved.requires_grad else saved))  # a number must stay one, and so undetached


def same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, torch.Tensor) and bool(one == other))


def shape_on(edge: tuple[Node | None, int]) -> torch.Size:
    """Of the tensor that flowed along an edge."""
    node, output = edge
    assert node is not None
    leaf = getattr(node, "variable", None)
    shape: torch.Size = output_metadata(node, output).shape if leaf is None else leaf.shape
    return shape


def signed(constant: Any) -> Any:
    """Autograd shows a negative dimension as an unsigned 64-bit number; undo that. Works inside tuples."""
    if isinstance(constant, tuple):
        return tuple(signed(item) for item in constant)
    return constant - 2**64 if type(constant) is int and constant >= 2**63 else constant
