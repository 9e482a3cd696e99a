"""Search for the operands from which a recipe can recompute a tensor that is being saved."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from lowtide._torch.distributed import get_own_part, is_wrapping
from lowtide._torch.nodes import get_output_metadata
from lowtide._torch.tensors import find_parts, get_storage_id, is_plain
from lowtide.runtime.fsdp_scopes import find_units
from lowtide.runtime.operand_capture import NUMBERS
from lowtide.runtime.operand_lookup import AS_RECORDED, OperandLookup, signed
from lowtide.runtime.recipes import IMPLEMENTATIONS, RECIPES, CannotRecompute, Recipe
from lowtide.runtime.recompute import Recompute, in_order
from lowtide.runtime.recompute_chain import start_chained
from lowtide.runtime.recompute_path import RecomputePath, describe
from lowtide.runtime.saved_values import Handle, Value, register, registered

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node

    from lowtide.runtime.tensor_writers import ReliedOn

_UNRECORDED: Final = object()

MAX_CHAIN = 32
"""Largest number of nodes that one recompute may visit before it reaches a held value."""


class ParameterOwners:
    """Lookup of the modules that own a parameter of a model."""

    def __init__(self, model: torch.nn.Module, relied_on: ReliedOn) -> None:
        self._model = model
        self.relied_on = relied_on
        self.sharded = bool(find_units(model.modules()))
        """True if parameters may be different tensors while a module runs."""
        self._owners: dict[int, tuple[torch.nn.Module, ...]] = {}
        self._find_owners()

    def of(self, parameter: int) -> tuple[torch.nn.Module, ...]:
        """Return the modules that own the parameter of this `id`; none if there is no such parameter."""
        if self.sharded and parameter and parameter not in self._owners:
            self._find_owners()
        return self._owners.get(parameter, ())

    def is_gathered(self, value: Value, tensor: Tensor) -> bool:
        """Return True if `tensor`, the saved tensor of `value`, is a parameter that FSDP2 frees after forward.

        If tensor parallelism distributes the parameter, too, autograd saves its transpose, recognized by its storage.
        """
        if value.leaf or not (self.sharded and is_wrapping(type(tensor))):
            return self.sharded and bool(value.leaf)
        held = {get_storage_id(part) for p in self._model.parameters() for part in find_parts(p)}
        return get_storage_id(get_own_part(tensor)) in held

    def _find_owners(self) -> None:
        owners: dict[int, tuple[torch.nn.Module, ...]] = {}
        for module in self._model.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    owners[id(parameter)] = (*owners.get(id(parameter), ()), module)
        self._owners |= owners


@functools.cache
def creates_new(node: str) -> bool:
    """Return True if the output of a node of this name is a new tensor, not an input that the operator wrote to."""
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", re.sub(r"Backward\d*$", "", node)).lower()
    return name in _RARELY_IN_PLACE or not hasattr(torch.ops.aten, f"{name}_")


_RARELY_IN_PLACE = frozenset({"addmm", "baddbmm", "addmv"})
"""Nodes of operators that may be in place but rarely are: linear layers call them out of place."""


class Builder:
    """Builder of recomputes. For each recipe, it searches for the operands.

    They may be on the node, on its input edges, among operands captured in forward, or on a parameter's module.
    """

    __slots__ = ("describes", "implementations", "length", "owners", "paths")

    def __init__(self, owners: ParameterOwners) -> None:
        self.owners = owners
        self.implementations: Mapping[str, str] = {}
        """Name of the recipe's implementation, for each kind of node for which it is not the first one."""
        self.length = 0
        """Number of nodes visited."""
        self.describes = False
        self.paths: dict[Value, RecomputePath | None] = {}
        """Path to the operands of each Value that the latest call of `recompute_with_path` has made."""

    def recompute_with_path(self, node: Node, output: int, like: Tensor) -> tuple[Value, RecomputePath | None]:
        """Return the Value that `recompute` returns, and the path to its operands; None if a path can't describe
        them.
        """
        self.describes = True
        try:
            value = self.recompute(node, output, like)
            return value, self.paths.get(value)  # the forward of another thread may have cleared the paths
        finally:
            self.describes = False
            self.paths.clear()

    def recompute(self, node: Node, output: int, like: Tensor | None = None, depth: int = 0) -> Value:
        """Return a Value that recomputes an output of `node` by a recipe.

        `like` is the original output, if available: the result gets its strides. Without `like`, the result is only an
        intermediate of other recomputes, maybe with other strides (see `certain`). `depth` is the number of edges from
        the saved tensor's node to `node`. Raises CannotRecompute, with the reason, if that is impossible.
        """
        self.length += 1
        kind = node.name()
        recipe = self.find_recipe(kind)
        if like is None and recipe is not None and recipe.expression is None:
            recipe = RECIPES[kind]  # other implementations are audited on saved tensors only
        if recipe is None:
            raise CannotRecompute(f"no recipe for {kind}")
        if output and not recipe.several:
            raise CannotRecompute(f"no recipe for output {output} of {kind}")
        if recipe.device is not None and recipe.device != (device := get_output_metadata(node, output).device.type):
            raise CannotRecompute(f"no recipe for {kind} on {device}")
        if depth > MAX_CHAIN:
            raise CannotRecompute(f"more than {MAX_CHAIN} nodes in a row save nothing")
        if like is not None:
            if not is_plain(like):
                raise CannotRecompute(f"it is a {type(like).__name__} of layout {like.layout}")
            if like._version and creates_new(kind):
                raise CannotRecompute("it was written to without autograd after it was computed")
            if like.storage_offset():
                raise CannotRecompute("it does not start at the beginning of its storage")
        source = OperandLookup(self, node, recipe, output, like, depth)
        for name, wanted in recipe.when.items():
            if source.constant(name) != wanted:
                raise CannotRecompute(f"{kind} with {name}={source.constant(name)} is not recomputed")
        constants: dict[str, Any] = {}
        for name, attribute in recipe.recorded:
            constant = getattr(node, attribute, _UNRECORDED)
            if type(constant) not in AS_RECORDED:
                constant = source.constant(name) if constant is _UNRECORDED else signed(constant)
            constants[name] = constant
        for name in recipe.computed:
            constants[name] = source.constant(name)
        arguments: dict[str, Handle | list[Handle | None] | None] = {}
        for name, attribute in recipe.saved:
            if name in recipe.unless and constants[recipe.unless[name]]:
                arguments[name] = None
                continue
            data = getattr(getattr(node, attribute, None), "data", None)
            if type(data) is Handle and not data.value.is_partial:
                arguments[name] = self.owners.relied_on.hold_slot(data)
                continue
            operand = source.operands(name) if name in recipe.lists else source.operand(name)
            if isinstance(operand, NUMBERS):
                constants[name] = operand
            else:
                arguments[name] = operand
        stride = None if like is None else like.stride()
        operands, places = in_order(recipe, arguments)
        sites = source.captured_sites
        if recipe.expression is None:
            recompute = Recompute(recipe, operands, places, constants, stride, sites)
        else:
            recompute = start_chained(recipe, operands, places, constants, stride, sites, node, output)
        if self.owners.sharded:
            recompute.sharded = tuple(h for h in recompute.operands if h is not None and h.value.leaf)
        value = Value(maker=recompute, output=output)
        value.is_intermediate = like is None
        if self.describes:
            self.paths[value] = describe(self, node, recipe, arguments, constants, places)
        register(node, output, value)
        return value

    def find_recipe(self, kind: str) -> Recipe | None:
        """Return the recipe for nodes of `kind`, as `implementations` chooses it; None if there is none."""
        name = self.implementations.get(kind) if self.implementations else None
        return RECIPES.get(kind) if name is None else IMPLEMENTATIONS[kind][name]

    def find_edge_value(self, edge: tuple[Node | None, int], depth: int) -> Value | None:
        """Return the Value of the forward tensor that an input edge stands for; None if that needs no gradient.

        If no handle holds the tensor, the Value recomputes it, which may raise CannotRecompute.
        """
        node, output = edge
        if node is None:
            return None
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            return self.owners.relied_on.hold_leaf(leaf)
        there = registered(node, output)
        if there is None:
            return self.recompute(node, output, depth=depth + 1)
        if there.places is not None:
            there.need()
        return there
