"""Path to the operands of a recompute, by position, so that steps of equal structure do not search for operands again.

The builder (`recompute_builder.py`) searches for each operand: in the node's slots, on its edges, among captured
operands. A path remembers where the builder found each: "slot `self`", "edge 0". The next step follows the path and
checks at each turn that the node is of the same kind and has the same kind of operand there; if not, the builder
searches again. Constants, versions and values are always read from the current step's node.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lowtide._torch.nodes import RAW_SAVED, SAVED, get_output_metadata, node_metadata
from lowtide.runtime.operand_capture import CAPTURED_OPERANDS, NUMBERS, CaptureSite, find_captured_operand
from lowtide.runtime.operand_lookup import AS_RECORDED, OperandLookup, are_same, find_leaf_behind, signed
from lowtide.runtime.recompute import Recompute
from lowtide.runtime.recompute_chain import start_chained
from lowtide.runtime.saved_values import KEYS, NO_NODE, Handle, Value, native, unpack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn
    from torch.autograd.graph import Node

    from lowtide.runtime.recipes import Recipe
    from lowtide.runtime.recompute_builder import Builder

ABSENT: Final = 0
"""Kind of Turn without an operand: the recipe is called with None, because a certain constant is true."""
SLOT: Final = 1
"""Kind of Turn to an operand that the node has saved."""
EDGE: Final = 2
"""Kind of Turn to an operand that the node on an input edge computed, and that a handle holds."""
LEAF: Final = 3
"""Kind of Turn to an operand that is the leaf tensor on an input edge."""
FURTHER: Final = 4
"""Kind of Turn to an operand that the node on an input edge computed, and that is recomputed as well."""
CAPTURED: Final = 5
"""Kind of Turn to an operand that is a captured tensor, which autograd does not record."""


class Turn(NamedTuple):
    """Place of one operand in a `RecomputePath`; `kind` is one of the constants above, `name` the recipe's
    parameter.
    """

    kind: int
    name: str
    empty: str = ""
    """Attribute of a slot that has to be empty, because the builder would take its content first."""
    edge: int = 0
    path: RecomputePath | None = None


class RecomputePath:
    """Places at which one node's operands and constants were found, so that later steps find them without a search."""

    __slots__ = ("computed", "kind", "numbers", "owned", "places", "recipe", "recorded", "table", "turns")

    def __init__(
        self, recipe: Recipe, kind: str, turns: tuple[Turn, ...], places: dict[str, int | slice] | None
    ) -> None:
        self.recipe, self.turns = recipe, turns
        self.kind = kind
        """Name of the node."""
        self.recorded: list[tuple[str, str]] = []
        """Constants that the node records, with its attributes."""
        self.computed: tuple[str, ...] = recipe.computed
        self.owned: list[tuple[str, int, int, tuple[nn.Module, ...]]] = []
        """Constants of modules: the name, the edge of their parameter, its `id`, and the modules that own it."""
        self.numbers: list[str] = []
        """Captured operands that are numbers."""
        self.places = places
        """For each parameter of the recipe its positions among the operands, as in `Recompute`."""
        self.table: tuple[Any, ...] | None = None
        """The path as the compiled hooks read it (`Column` in hot_path.cpp); None if they can't follow it."""

    def follow(self, builder: Builder, node: Node, output: int, like: Tensor | None) -> Value | None:
        """Return a Value that recomputes the output of `node` from operands at the recorded places.

        Returns None if a place has another kind of content than when the path was recorded.
        """
        # one function, because each Python call would cost host time for each recomputed tensor in each step
        recipe = self.recipe
        if recipe.device is not None and get_output_metadata(node, output).device.type != recipe.device:
            return None
        constants: dict[str, Any] = {}
        for name, attribute in self.recorded:
            constant = getattr(node, attribute)
            constants[name] = constant if type(constant) in AS_RECORDED else signed(constant)
        for name, wanted in recipe.when.items():
            if constants.get(name, wanted) != wanted:
                return None
        edges = node.next_functions
        sites: frozenset[CaptureSite] = frozenset()
        operands: list[Handle | None] = []
        for kind, name, empty, edge, path in self.turns:
            if empty and ((slot := getattr(node, empty)).data is not None or slot.unpack_hook is not None):
                return None
            if kind == EDGE:
                upstream, number = edges[edge]
                if upstream is None or number >= len(KEYS):
                    return None
                reference = node_metadata(upstream).get(KEYS[number])
                if reference is None or (value := reference()) is None:
                    return None
                operands.append(Handle(value))
            elif kind == SLOT:
                if (handle := in_slot(builder, node, name)) is None:
                    return None
                operands.append(handle)
            elif kind == LEAF:
                leaf = getattr(edges[edge][0], "variable", None)
                if leaf is None:
                    return None
                operands.append(Handle(builder.owners.relied_on.hold_leaf(leaf)))
            elif kind == FURTHER:
                upstream, number = edges[edge]
                if upstream is None or path is None or upstream.name() != path.kind or number >= len(KEYS):
                    return None
                reference = node_metadata(upstream).get(KEYS[number])
                if reference is not None and reference() is not None:
                    return None
                further = path.follow(builder, upstream, number, None)
                if further is None:
                    return None
                operands.append(Handle(further))
            elif kind == CAPTURED:
                if (captured := find_captured_operand(node, name)) is None or isinstance(captured[1], NUMBERS):
                    return None
                sites |= {captured[0]}
                operands.append(Handle(captured[1] if isinstance(captured[1], Value) else Value(captured[1])))
            else:
                if not constants[recipe.unless[name]]:
                    return None
                operands.append(None)
        for name in self.numbers:
            if (captured := find_captured_operand(node, name)) is None or not isinstance(captured[1], NUMBERS):
                return None
            sites |= {captured[0]}
            constants[name] = captured[1]
        if (self.owned or self.computed) and not self.look_up(builder, node, output, like, constants):
            return None
        stride = None if like is None else like.stride()
        if recipe.expression is None:
            maker = Recompute(recipe, tuple(operands), self.places, constants, stride, sites)
        else:
            maker = start_chained(recipe, tuple(operands), self.places, constants, stride, sites, node, output)
        value = Value(maker=maker, output=output)
        value.is_intermediate = like is None
        node_metadata(node)[KEYS[output]] = weakref.ref(value)  # as `register`
        return value

    def look_up(
        self, builder: Builder, node: Node, output: int, like: Tensor | None, constants: dict[str, Any]
    ) -> bool:
        """Add the constants that modules own, and those that are computed, to `constants`.

        Returns False if another parameter is in the recorded place, or if its modules have different constants.
        """
        for name, edge, key, modules in self.owned:
            if find_leaf_behind(node.next_functions[edge][0]) != key:
                return False
            owned = [it for module in modules if (it := getattr(module, name, None)) is not None]
            if not owned or not all(are_same(it, owned[0]) for it in owned):
                return False
            constants[name] = owned[0]
        if self.computed:
            source = OperandLookup(builder, node, self.recipe, output, like, 0)
            for name in self.computed:
                constants[name] = source.constant(name)
        return True


def in_slot(builder: Builder, node: Node, name: str) -> Handle | None:
    """Return a new handle on the tensor that a node saved as `name`.

    Returns None if the tensor is absent, kept in part only, changed since, or packed by other hooks.
    """
    slot = getattr(node, RAW_SAVED + name)
    data = slot.data
    if type(data) is Handle:
        return None if data.value.is_partial else builder.owners.relied_on.hold_slot(data)
    if data is None:
        return None
    if slot.unpack_hook is None:
        try:
            return builder.owners.relied_on.hold_slot(getattr(node, SAVED + name))
        except RuntimeError:  # the tensor has been written to
            return None
    if slot.unpack_hook is unpack and data[0]._version == data[1]:
        return builder.owners.relied_on.hold_slot(data[0])
    return None


def describe(
    builder: Builder,
    node: Node,
    recipe: Recipe,
    arguments: Mapping[str, Handle | list[Handle | None] | None],
    constants: Mapping[str, Any],
    places: dict[str, int | slice] | None,
) -> RecomputePath | None:
    """Return the path to the operands in `arguments`, which the builder has found; None if an operand is in a place
    that a path can't describe.
    """
    if recipe.lists or builder.owners.sharded:
        return None
    turns = []
    for name, attribute in recipe.saved:
        if name not in arguments:
            continue
        turn = find_turn(builder, node, recipe, name, attribute, arguments[name])
        if turn is None:
            return None
        turns.append(turn)
    path = RecomputePath(recipe, node.name(), tuple(turns), places)
    path.numbers = [name for name in recipe.operands if name not in arguments]
    for name, attribute in recipe.recorded:
        if hasattr(node, attribute):
            path.recorded.append((name, attribute))
            continue
        edge = None if recipe.owner is None else recipe.edges.get(recipe.owner)
        key = 0 if edge is None else find_leaf_behind(node.next_functions[edge][0])
        if edge is None or not key or constants[name] is None:
            return None
        path.owned.append((name, edge, key, builder.owners.of(key)))
    if not recipe.when.keys() <= {name for name, _ in path.recorded}:
        return None
    if any(number not in constants for number in path.numbers):
        return None
    has_table = recipe.device is None and recipe.expression is None
    if has_table and all(turn.path is None or turn.path.table is not None for turn in turns):
        recorded, when, numbers = tuple(path.recorded), tuple(recipe.when.items()), tuple(path.numbers)
        looks_up = bool(path.owned or path.computed)
        path.table = path.kind, recipe, recorded, when, path.turns, numbers, looks_up, places, recipe.into
    return path


def find_turn(
    builder: Builder,
    node: Node,
    recipe: Recipe,
    name: str,
    attribute: str,
    operand: Handle | list[Handle | None] | None,
) -> Turn | None:
    """Return the place where the builder has found one operand; None if a path can't describe the place."""
    slot = getattr(node, attribute, None)
    data, is_empty = None, True
    if slot is not None:
        data = slot.data
        is_empty = data is None and slot.unpack_hook is None
    if operand is None:
        return Turn(ABSENT, name) if name in recipe.unless else None
    if isinstance(operand, list):
        return None
    if not is_empty:
        is_other = isinstance(data, Handle) and data.value is not operand.value and data.value.output != NO_NODE
        return None if is_other else Turn(SLOT, name)
    empty = "" if slot is None else attribute
    edge = recipe.edges.get(name)
    upstream, number = (None, 0) if edge is None else node.next_functions[edge]
    if edge is not None and upstream is not None:
        if hasattr(upstream, "variable"):
            return Turn(LEAF, name, empty, edge)
        if number >= len(KEYS):
            return None
        if operand.value in builder.paths:
            path = builder.paths[operand.value]
            return None if path is None else Turn(FURTHER, name, empty, edge, path)
        return Turn(EDGE, name, empty, edge)
    captured = find_captured_operand(node, name)
    return Turn(CAPTURED, name, empty) if captured is not None and not isinstance(captured[1], NUMBERS) else None


if native is not None:
    native.lend(signed_constant=signed, in_slot=in_slot, noted_key=CAPTURED_OPERANDS, raw_saved=RAW_SAVED, saved=SAVED)
