"""Records of an autograd graph: values, the nodes that computed them, and the tensors that each node keeps.

Links lead upstream only, from a value to its producer and from a node to its inputs. Without reference cycles, the
autograd graph is freed together with the last of its records.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide._torch.nodes import find_saved_slots
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node as Function


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One tensor that an autograd node keeps until backward has run through the node."""

    name: str
    """Name under which torch saves it (`mat1`, `result`), or `ctx.x` for an attribute of a custom Function."""
    shape: tuple[int, ...] | None
    """Size in each dimension; None for nested tensors."""
    dtype: str
    bytes: int
    """Bytes of the tensor's whole storage, even if the tensor is a small view of it."""
    storage: int
    """Number of the storage; equal for tensors that share memory."""
    parameter: bool
    """True for a parameter, a buffer or another leaf that requires a gradient. Its memory is in use anyway."""
    packed: str = ""
    """Type of the object that a pack hook returned for the saved tensor; empty without a hook. The object is not
    unpacked, and may contain several tensors.
    """


class Value:
    """Data on an edge of the autograd graph: a computed value, a leaf, or a constant."""

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
        """Name of a parameter, of one of the `names` given to `graph`, or of a constant's argument. May be empty."""
        self.producer = producer
        """Node that computed the value; None for leaves and constants."""
        self.output = output
        """Index among the producer's outputs."""
        self.shape = shape
        """Shape of the value; None where autograd did not record it."""
        self.dtype = dtype
        self.requires_grad = requires_grad
        self._places: list[tuple[Any, str]] = []

    @property
    def is_leaf(self) -> bool:
        """True if no node of the graph computed the value, so that backward ends at it."""
        return self.producer is None

    @property
    def tensor(self) -> Tensor | None:
        """The tensor with the value's data, if a leaf or a node holds it now; else None. It is never recomputed."""
        for function, slot_name in self._places:
            if not slot_name:
                variable: Tensor | None = getattr(function, "variable", None)
                return variable
            for name, slot in find_saved_slots(function):
                if name == slot_name and slot.unpack_hook is None and slot.data is not None:
                    data: Tensor = slot.data
                    return data
        return None

    def __repr__(self) -> str:
        name = self.name or (f"output {self.output} of {self.producer.name}" if self.producer else "constant")
        return f"Value({name}, {describe(self)})"


class Node:
    """One node of the autograd graph: its inputs, and the tensors that it keeps for backward."""

    __slots__ = ("function", "index", "inputs", "kept", "line", "module", "name", "unrecorded")

    def __init__(
        self, function: Function, *, index: int, inputs: tuple[Value, ...], kept: tuple[Kept, ...], unrecorded: int
    ) -> None:
        self.function = function
        """torch's node, `tensor.grad_fn`."""
        self.index = index
        """Position in `Graph.nodes`, the order in which forward ran."""
        self.name = function.name()
        self.inputs = inputs
        """Inputs in the order of arguments. Inputs that may need a gradient come first."""
        self.kept = kept
        self.unrecorded = unrecorded
        """Number of inputs that need no gradient and are not kept: torch does not record them."""
        self.module = ""
        """Path of the module that the node ran in, if known; see `graph`."""
        self.line = ""
        """Line of code that created the node, such as `train.py:42`, if anomaly detection was on."""

    @property
    def held_bytes(self) -> int:
        """Bytes that the node keeps, counting each storage once and without `parameter_bytes`. Other nodes may keep the
        same storages.
        """
        return count_unique_bytes(kept for kept in self.kept if not kept.parameter)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters and buffers that the node keeps, which are in memory anyway."""
        return count_unique_bytes(kept for kept in self.kept if kept.parameter)

    def __repr__(self) -> str:
        return f"Node({self.name}, {len(self.inputs)} inputs, keeps {format_bytes(self.held_bytes)})"


def count_unique_bytes(kept: Iterable[Kept]) -> int:
    """Return the bytes of several kept tensors, counting each storage once."""
    return sum({tensor.storage: tensor.bytes for tensor in kept}.values())


def describe(value: Value) -> str:
    """Format a value's shape and dtype, such as `[8, 512] float32`. Unknown ones are left out."""
    shape = "" if value.shape is None else f"[{', '.join(map(str, value.shape))}]"
    return f"{shape} {value.dtype}".strip()
