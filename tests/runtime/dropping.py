"""Saved-tensor hooks for tests: pack as the engine does, drop chosen tensors, and compare recomputed ones."""

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide.profiler.measure_call import identical
from lowtide.runtime.operand_capture import CaptureSite, OperandCapture
from lowtide.runtime.recipes import CannotRecompute
from lowtide.runtime.recompute import Recompute, certain
from lowtide.runtime.recompute_builder import Builder, ParameterOwners
from lowtide.runtime.saved_values import Handle, Value, register, registered, unpack
from lowtide.runtime.tensor_writers import ReliedOn
from lowtide.runtime.view_geometry import find_base_node_and_view


class Everything:
    """Holds every tensor that an operator is given, among `values`."""

    def __init__(self, values: weakref.WeakSet[Value]) -> None:
        self.values, self.held = values, []

    def get_site_of_numbers(self) -> CaptureSite:
        return CaptureSite("")

    def unrecorded(self, operand: Tensor) -> tuple[CaptureSite, Value | None]:
        self.held.append(Value(operand.detach()))
        return CaptureSite("", len(self.held)), self.held[-1]

    def report_sized_by_contents(self, operator: str) -> None:
        """Sizes are of no interest here."""


class Dropping:
    """Drops each saved tensor that can be recomputed and for which `drops` is true; keeps all others.

    Unless `careless`, the dropped tensors stay here, and what is read in backward is compared with them, bit by bit.
    """

    def __init__(
        self, drops: Callable[[Value], bool], module: nn.Module | None = None, *, careless: bool = False
    ) -> None:
        self.drops, self.careless = drops, careless
        self.builder = Builder(
            ParameterOwners(module or nn.Module(), ReliedOn(lambda tensor, writer: None, lambda tensor: None))
        )
        self.refused: dict[str, str] = {}
        """Why a node's output was kept."""
        self.dropped: list[str] = []
        """Nodes whose outputs were not, in order."""
        self.read: list[str] = []
        """Nodes whose outputs were recomputed and read in backward, in order."""
        self.values: weakref.WeakSet[Value] = weakref.WeakSet()
        self._true: dict[Handle, tuple[str, Tensor]] = {}
        self._hooks = saved_tensors_hooks(self.pack, self.unpack)  # type: ignore[arg-type]
        self._noting = OperandCapture(Everything(self.values))

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        self._noting.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._noting.__exit__(kind, error, trace)
        self._hooks.__exit__(kind, error, trace)

    def pack(self, tensor: Tensor) -> Handle:
        base, node, output, view = find_base_node_and_view(tensor)
        name = "" if node is None else node.name()
        value = None if node is None else registered(node, output)
        if value is not None and not certain(value):
            assert node is not None
            value.maker = self.builder.recompute(node, output, base).maker
            register(node, output, value)
        if value is None and node is not None:
            try:
                value = self.builder.recompute(node, output, base)
            except CannotRecompute as why:
                self.refused[name] = str(why)
            if value is not None and not self.drops(value):
                value = None
            if value is not None:
                self.dropped.append(name)
        if value is None:
            value = Value(base.detach(), output=output)
            value.leaf = id(base) if isinstance(base, nn.Parameter) else 0
            if node is not None:
                register(node, output, value)
        self.values.add(value)
        handle = Handle(value, view)
        if not value.kept and not self.careless:
            self._true[handle] = name, tensor.detach()
        return handle

    def unpack(self, handle: Handle) -> Tensor:
        tensor = unpack(handle)
        if handle in self._true:
            name, true = self._true[handle]
            assert identical(tensor, true), name
            self.read.append(name)
        return tensor

    def held_bytes(self, static: nn.Module) -> int:
        """Bytes that the graph holds now, without those that the module owns."""
        own = {tensor.untyped_storage().data_ptr() for tensor in [*static.parameters(), *static.buffers()]}
        there = [value.tensor.untyped_storage() for value in self.values if value.tensor is not None]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in there}
        return sum(size for address, size in sizes.items() if address not in own)


def makers(value: Value) -> list[Recompute]:
    """The recompute of `value`, and those that it passes through on the way from what was saved."""
    if not isinstance(value.maker, Recompute):
        return []
    passed = [operand.value for operand in value.maker.operands if operand is not None and not was_saved(operand.value)]
    return [value.maker, *(maker for operand in passed for maker in makers(operand))]


def was_saved(value: Value) -> bool:
    return not isinstance(value.maker, Recompute) or value.maker.stride is not None


def through(node: str) -> Callable[[Value], bool]:
    """Drop what the recipe of this node takes part in."""
    return lambda value: any(maker.recipe.node == node for maker in makers(value))


def cheap(value: Value) -> bool:
    """Drop what is recomputed without a matrix product, a convolution or attention."""
    return not any(maker.recipe.expensive for maker in makers(value))


def no_attention(value: Value) -> bool:
    """Drop what is recomputed without attention or a convolution: matrix products may be redone."""
    return all(not maker.recipe.expensive or maker.recipe.node in MATRIX_PRODUCTS for maker in makers(value))


MATRIX_PRODUCTS = {"AddmmBackward0", "MmBackward0"}


def everything(value: Value) -> bool:
    return True


def nothing(value: Value) -> bool:
    return False


def node_names(tensor: Tensor) -> set[str]:
    """Of all nodes in the graph of `tensor`."""
    pending, seen = [tensor.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [edge[0] for edge in node.next_functions]
    return {node.name() for node in seen}


class Held(torch.autograd.Function):
    """The same numbers in a new tensor, which is saved: then it can be found on an edge."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        out = x.clone()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad


class Read(torch.autograd.Function):
    """Saves its input, and its gradient depends on it."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return grad * x
