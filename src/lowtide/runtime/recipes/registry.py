"""The table of all recipes, and the decorator that adds a recipe. docs/recipes.md explains both with an example.

A recipe is a function that recomputes an autograd node's output from the node's inputs. Its parameters have the names
of the node's own saved attributes (`_saved_mat1` -> `mat1`):

    @recipe("AddmmBackward0", edges={"bias": 0, "mat1": 1, "mat2": 2}, owner="mat2", expensive=True)
    def addmm(bias: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float, alpha: float) -> Tensor:
        return torch.addmm(bias, mat1, mat2, beta=beta, alpha=alpha)

If an input can't be found, the tensor is kept: nothing is guessed. Before a recipe is used, its result is compared with
the true tensor, bit by bit, on the user's model and device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, get_type_hints

import torch
from torch import Tensor

from lowtide._torch.nodes import RAW_SAVED, SAVED

Function = Callable[..., Tensor | tuple[Tensor, ...]]


class Aten(Protocol):
    """Type of `torch.ops.aten` in recipes: each operator is declared to return a single tensor.

    An operator with several results really returns a tuple of tensors; a recipe selects one by its index, such as
    `[0]`.
    """

    def __getattr__(self, name: str) -> Callable[..., Tensor]: ...


aten: Aten = torch.ops.aten


class Source(Protocol):
    """View of an autograd node, passed to the functions in `read_off`. `OperandLookup` implements it."""

    def constant(self, name: str) -> Any:
        """Return the constant `name`. Raises CannotRecompute if the node does not record it."""


class CannotRecompute(Exception):
    """Exception with the reason why a saved tensor has to be kept; never raised to users."""


class TooSmall(CannotRecompute):
    """Exception for a tensor that is kept because packing it would save too little memory, as in a small batch."""


EVERY: Final = -1
"""Index that stands for all input edges, for a list of tensors: `edges={"tensors": EVERY}`."""

FILLED: Final = -2
"""Like EVERY, but inputs without an edge are allowed if they are empty, which the output's length along `dim` shows."""

OUT: Final = "out"
"""Name of the parameter of recipes that can write their result over an operand."""

OUTPUT_CONSTANTS: Final = frozenset({"out_shape", "out_dtype", "out_device", "out_stride"})
"""Constants that describe the output itself."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A function that recomputes the output of one kind of autograd node, and the places of the function's arguments.

    The decorator `recipe` explains the fields.
    """

    node: str
    function: Function
    operands: tuple[str, ...]
    lists: frozenset[str]
    optional: frozenset[str]
    constants: tuple[str, ...]
    several: bool
    edges: Mapping[str, int] = field(default_factory=dict)
    owner: str | None = None
    together: Mapping[str, str] = field(default_factory=dict)
    when: Mapping[str, Any] = field(default_factory=dict)
    unless: Mapping[str, str] = field(default_factory=dict)
    read_off: Mapping[str, Callable[[Tensor | None, Source], Any]] = field(default_factory=dict)
    expensive: bool = False
    alias: bool = False
    device: str | None = None
    into: bool = False
    expression: Callable[..., str] | None = None
    """Text of the operator in a kernel for a chain of recomputes (`chains.py`); None if a chain can't contain it."""
    recorded: tuple[tuple[str, str], ...] = field(init=False)
    """Constants that the node may record, each with the node's attribute for it."""
    computed: tuple[str, ...] = field(init=False)
    """Constants that no node records."""
    saved: tuple[tuple[str, str], ...] = field(init=False)
    """Operands, with the node's attributes for their slots."""

    def __post_init__(self) -> None:
        computed = tuple(name for name in self.constants if name in OUTPUT_CONSTANTS or name in self.read_off)
        recorded = tuple((name, SAVED + name) for name in self.constants if name not in computed)
        saved = tuple((name, RAW_SAVED + name) for name in self.operands)
        for name, table in (("computed", computed), ("recorded", recorded), ("saved", saved)):
            object.__setattr__(self, name, table)


RECIPES: dict[str, Recipe] = {}
"""Recipes by the name of the autograd node."""

IMPLEMENTATIONS: dict[str, dict[str, Recipe]] = {}
"""Other implementations of recipes, by node and by name: used only where an audit found them exact and faster."""


def recipe(
    *nodes: str,
    edges: Mapping[str, int] | None = None,
    owner: str | None = None,
    together: Mapping[str, str] | None = None,
    when: Mapping[str, Any] | None = None,
    unless: Mapping[str, str] | None = None,
    read_off: Mapping[str, Callable[[Tensor | None, Source], Any]] | None = None,
    expensive: bool = False,
    alias: bool = False,
    device: str | None = None,
    implementation: str = "",
) -> Callable[[Function], Function]:
    """Register a function as the recipe of the autograd nodes `nodes`, or as another implementation of their recipes.

    A positional parameter is a tensor, or `list[Tensor]`. Its argument is the tensor that the node saved under the
    parameter's name; if there is none, the value on the input edge in `edges`; if that edge needs no gradient, a
    captured operand; else the attribute of that name of the module that owns the node's parameter `owner`. A parameter
    annotated `Tensor | None` may be absent.

    A keyword-only parameter is a constant: recorded by the node under that name, or an attribute of the owning module;
    or one of `out_shape`, `out_dtype`, `out_device`, `out_stride`, which describe the output; or the result of a
    function in `read_off`. A constant annotated `... | None` may be absent.

    A keyword-only `out: Tensor | None = None` says that the result may be written over an operand, which is passed as
    `out`. Nothing else holds that operand, and it has the result's shape, strides and dtype.

    A function annotated to return `tuple[Tensor, ...]` returns all outputs of its node; one annotated to return
    `Tensor`, the first output.

    Args:
        nodes: Names of the autograd nodes.
        edges: For each tensor, the index of its input edge; `EVERY` or `FILLED` for a list of tensors.
        owner: Name of the operand that is a parameter of a module, whose attributes may be read.
        together: For an optional tensor, an attribute of the node: the tensor may be absent only if the attribute is
            absent too (for a convolution's bias, its sizes).
        when: Constants that must have these values; other nodes are not recomputed.
        unless: Operands that are None if the named constant is true.
        read_off: For each constant that is not recorded, a function of the output (None if it is not available) and the
            node.
        expensive: The recipe runs a matrix product, a convolution or attention.
        alias: The result is a view of the first operand.
        device: The only type of device that has the node.
        implementation: Name of another way to compute the same bits. A rehearsal runs each implementation on the user's
            model and device, drops those that are not exact there, and chooses the fastest.

    Returns:
        A decorator that registers a function and returns it unchanged.
    """

    def register(function: Function) -> Function:
        parameters = inspect.signature(function).parameters.values()
        hints = {name: str(hint) for name, hint in get_type_hints(function).items()}
        for node in nodes:
            table = IMPLEMENTATIONS.setdefault(node, {}) if implementation else RECIPES
            key = implementation or node
            assert key not in table, f"two recipes for {node}"
            table[key] = Recipe(
                node=node,
                function=function,
                operands=tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY),
                lists=frozenset(p.name for p in parameters if hints[p.name].startswith("list[")),
                optional=frozenset(p.name for p in parameters if hints[p.name].endswith("| None")),
                constants=tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != OUT),
                several=hints["return"].startswith("tuple["),
                edges=dict(edges or {}),
                owner=owner,
                together=dict(together or {}),
                when=dict(when or {}),
                unless=dict(unless or {}),
                read_off=dict(read_off or {}),
                expensive=expensive,
                alias=alias,
                device=device,
                into=any(p.name == OUT for p in parameters),
            )
        return function

    return register
