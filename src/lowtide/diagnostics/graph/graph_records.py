"""What a walk over an autograd graph finds: values, the nodes that made them, and what each node keeps.

Links lead upstream only, from a value to its producer and from a node to its inputs, so there are no reference cycles:
the autograd graph is let go of at the moment that the last of these objects is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide._torch.nodes import saved_slots
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node as Function


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One tensor that a node keeps until its backward has run."""

    name: str
    """The name that torch saves it under (`mat1`, `result`), or `ctx.x` for an attribute of a custom Function."""
    shape: tuple[int, ...] | None
    """None for nested tensors."""
    dtype: str
    bytes: int
    """Of its whole storage, of which it may be a small view."""
    storage: int
    """The same number for tensors that share memory."""
    parameter: bool
    """In memory anyway: part of a parameter, a buffer or another leaf that needs a gradient."""
    packed: str = ""
    """Type of what a saved-tensor hook made of it; it was not unpacked, so this may be one of several parts."""


class Value:
    """Data that flows along an edge: what a node computed, a leaf, or a constant."""

    __slots__ = ("_places", "dtype", "index", "name", "output", "producer", "requires_grad", "shape")

    def __init__(
        self,
        index: int,
        *,
        name: str = "",
        producer: Node | None = None,
        output: int = 0,
        shape: tuple[int, ...] | None = None,
        dtype: str = "",
        requires_grad: bool = True,
    ) -> None:
        self.index = index
        self.name = name
        """Of a parameter, of a tensor that was named to `graph`, or of a constant the argument it was. May be empty."""
        self.producer = producer
        """The node that computed it; None for leaves and constants."""
        self.output = output
        """Which of the producer's outputs it is."""
        self.shape = shape
        """None where autograd did not record it."""
        self.dtype = dtype
        self.requires_grad = requires_grad
        self._places: list[tuple[Any, str]] = []

    @property
    def is_leaf(self) -> bool:
        """Whether backward ends here: it has no producer."""
        return self.producer is None

    @property
    def tensor(self) -> Tensor | None:
        """Its data, if a leaf holds it or a node keeps it at this moment; else None. Never computes or unpacks it."""
        for function, slot_name in self._places:
            if not slot_name:
                found: Tensor | None = getattr(function, "variable", None)
                return found
            for name, slot in saved_slots(function):
                if name == slot_name and slot.unpack_hook is None and slot.data is not None:
                    data: Tensor = slot.data
                    return data
        return None

    def __repr__(self) -> str:
        what = self.name or (f"output {self.output} of {self.producer.name}" if self.producer else "constant")
        return f"Value({what}, {describe(self)})"


class Node:
    """One function of the graph: what it was applied to, and what it keeps for its backward."""

    __slots__ = ("function", "index", "inputs", "kept", "line", "module", "name", "unrecorded")

    def __init__(
        self, function: Function, *, index: int, inputs: tuple[Value, ...], kept: tuple[Kept, ...], unrecorded: int
    ) -> None:
        self.function = function
        """The node of torch, `tensor.grad_fn`."""
        self.index = index
        """Its place in `Graph.nodes`: the order in which forward ran."""
        self.name = function.name()
        self.inputs = inputs
        """What it was applied to, in the order of its arguments; first those that may need a gradient."""
        self.kept = kept
        self.unrecorded = unrecorded
        """How many inputs need no gradient and are not kept: torch forgets those, and so nobody can show them."""
        self.module = ""
        """Path of the module that it ran in, where known; see `graph`."""
        self.line = ""
        """`train.py:42`, the line that made it, if anomaly detection was on at the time."""

    @property
    def held_bytes(self) -> int:
        """What it keeps, each storage once, without `parameter_bytes`. Other nodes may keep the same storage."""
        return unique_bytes(kept for kept in self.kept if not kept.parameter)

    @property
    def parameter_bytes(self) -> int:
        """What it keeps that is in memory anyway."""
        return unique_bytes(kept for kept in self.kept if kept.parameter)

    def __repr__(self) -> str:
        return f"Node({self.name}, {len(self.inputs)} inputs, keeps {format_bytes(self.held_bytes)})"


def unique_bytes(kept: Iterable[Kept]) -> int:
    """The bytes of several kept tensors, each storage once."""
    return sum({each.storage: each.bytes for each in kept}.values())


def describe(value: Value) -> str:
    """`[8, 512] float32`, as far as it is known."""
    shape = "" if value.shape is None else f"[{', '.join(map(str, value.shape))}]"
    return f"{shape} {value.dtype}".strip()
