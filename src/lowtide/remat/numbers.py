"""The numbers that operators are given, noted while a call of a module runs.

autograd does not record a number that is added to a tensor, subtracted from it or put in its place, by `where` or
`masked_fill`, and no edge leads to it. How can it be known for certain, in each step anew, as a schedule may change it?

- Read it off: a result minus its operand, compared everywhere. The operand is mostly remade itself and no longer there
  when the result is saved; to make it again in forward, or to hold it until then, costs what the plan is to save.
- Remember what the rehearsal saw, and compare some elements of each step. That is a guess.
- Be told. A `TorchFunctionMode` is shown each operator that Python calls, with its arguments: about 1.5 us an operator
  (`x + 1` takes 3), and no element is read.

So the audit has such a mode in force all the time, marks what it could remake only thanks to it (NUMBERS), and a plan
puts it in force only in the calls where it remakes that. What it did not see (operators called from C++, as in scripted
modules) is kept. A note counts for a node only if the node's other edges are those of the operator's other operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowtide._torch import node_metadata
from lowtide.remat.recipes import RECIPES

if TYPE_CHECKING:
    from torch.autograd.graph import Node

Number = bool | int | float | complex

_BINARY = ("self", "other")
_FILLED = ("self", "mask", "value")
_OPERANDS: dict[Callable[..., Any], tuple[str, ...]] = {
    torch.add: _BINARY,
    torch.Tensor.add: _BINARY,  # also +
    torch.Tensor.add_: _BINARY,  # also +=
    torch.sub: _BINARY,
    torch.Tensor.sub: _BINARY,
    torch.Tensor.sub_: _BINARY,
    torch.rsub: _BINARY,
    torch.Tensor.__rsub__: _BINARY,
    torch.where: ("condition", "self", "other"),
    torch.Tensor.where: ("self", "condition", "other"),
    torch.masked_fill: _FILLED,
    torch.Tensor.masked_fill: _FILLED,
    torch.Tensor.masked_fill_: _FILLED,
}
"""Operators whose numbers autograd does not record, and the names of their operands as in its nodes."""


class Noted(NamedTuple):
    """What one operator was given."""

    call: str
    """The module call in which that was."""
    numbers: dict[str, Number | Tensor]
    """By the operand's name; a tensor of one element as a copy, for nobody but the operator would notice a change."""


class Numbers(TorchFunctionMode):
    """In force, each operator's numbers are noted at its node."""

    def __init__(self, call: Callable[[], str]) -> None:
        """`call` says which module call is running."""
        super().__init__()
        self._call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = None if torch.compiler.is_compiling() else _OPERANDS.get(func)
        operands = {} if names is None else _by_name(names, args, kwargs)
        numbers = {name: operand for name, operand in operands.items() if _is_number(operand)}
        if not numbers:
            return func(*args, **kwargs)
        edges = {name: _edge(operand) for name, operand in operands.items()}
        out = func(*args, **kwargs)
        node = out.grad_fn if isinstance(out, Tensor) else None
        if node is not None and _is_of(node, edges):
            copies = {name: it.detach().clone() if isinstance(it, Tensor) else it for name, it in numbers.items()}
            node_metadata(node)["lowtide", "numbers"] = Noted(self._call(), copies)
        return out


def noted(node: Node) -> Noted | None:
    """What was noted at a node."""
    found: Noted | None = node_metadata(node).get(("lowtide", "numbers"))
    return found


def _edge(operand: object) -> tuple[Any, int] | None:
    """Where gradients of an operand go: the node and output that it came from, a leaf itself, nowhere."""
    if not isinstance(operand, Tensor) or not operand.requires_grad:
        return None
    return (operand if operand.grad_fn is None else operand.grad_fn, operand.output_nr)


def _is_of(node: Node, edges: dict[str, tuple[Any, int] | None]) -> bool:
    """Whether a node is that of an operator with operands that had these edges, and not of something around it."""
    recipe = RECIPES.get(node.name())
    if recipe is None:
        return False
    for name, index in recipe.edges.items():
        upstream, output = node.next_functions[index]
        found = None if upstream is None else (getattr(upstream, "variable", upstream), output)
        expected = edges.get(name)
        if (found is None) != (expected is None):
            return False
        if found is not None and expected is not None and (found[0] is not expected[0] or found[1] != expected[1]):
            return False
    return True


def _is_number(operand: object) -> bool:
    if isinstance(operand, Tensor):
        return operand.numel() == 1 and not operand.requires_grad
    return isinstance(operand, Number)


def _by_name(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """An operator's operands; nothing if they are not given as expected."""
    given = dict(zip(names, args, strict=False)) | {name: it for name, it in kwargs.items() if name != "alpha"}
    return given if len(args) <= len(names) and given.keys() == set(names) else {}
