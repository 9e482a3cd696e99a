"""Every recipe, through the engine's own machinery: bits, strides and gradients are those of the plain run."""

import contextlib
import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from remat.recipe_rows import ROWS, Row
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from lowtide.rehearsal.audit import identical
from lowtide.remat.recipes import RECIPES, recipe
from lowtide.remat.remake import Builder, CannotRemake, Remake, producer
from lowtide.remat.values import Handle, Value, register, registered, unpack

aten = torch.ops.aten


@dataclass
class Hooks:
    """Packs as the engine does: what a recipe of one of the nodes `drop` takes part in is dropped, the rest is kept."""

    drop: frozenset[str]
    module: nn.Module | None = None
    truth: dict[Handle, Tensor] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    remade: int = 0
    made: set[str] = field(default_factory=set)
    """Nodes in the graph."""

    def __enter__(self) -> "Hooks":
        modules = [] if self.module is None else list(self.module.modules())
        self.builder = Builder({id(p): (m,) for m in modules for p in m.parameters(recurse=False)})
        self.hooks = saved_tensors_hooks(self.pack, self.unpack)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.hooks.__exit__(*error)

    def pack(self, tensor: Tensor) -> Handle:
        base, node, output, view = producer(tensor)
        value = None if node is None else registered(node, output)
        if value is None and node is not None:
            try:
                value = self.builder.remake(node, output, base)
            except CannotRemake as why:
                self.refused[node.name()] = str(why)
            if value is not None and not self.drop & through(value):
                value = None
        if value is None:
            value = Value(base.detach(), output=output)
            value.leaf = id(base) if isinstance(base, nn.Parameter) else 0
            if node is not None:
                register(node, output, value)
        handle = Handle(value, view)
        self.truth[handle] = tensor.detach()
        return handle

    def unpack(self, handle: Handle) -> Tensor:
        tensor, true = unpack(handle), self.truth[handle]
        assert identical(tensor, true)
        if not handle.value.kept:
            self.remade += 1
        return tensor


def through(value: Value) -> set[str]:
    """Nodes whose recipes run when `value` is made."""
    if not isinstance(value.maker, Remake):
        return set()
    operands = (operand for operand in value.maker.operands if operand is not None)
    return {value.maker.recipe.node}.union(*(through(operand.value) for operand in operands))


class Held(torch.autograd.Function):
    """The same numbers in a new tensor that is saved, so that it can be found on an edge."""

    @staticmethod
    def forward(ctx, x):
        out = x.clone()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad


class Read(torch.autograd.Function):
    """Saves its input, and its gradient depends on it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x


def layouts(row: Row) -> list[str]:
    found = ["contiguous"]
    if not row.plain:
        found += ["transposed", "expanded", "sliced"] if row.shapes else []
        found += ["channels last"] if any(len(shape) == 4 for shape in row.shapes) else []
    return found


def leaf(shape: tuple[int, ...], layout: str, row: Row, dtype: torch.dtype, device: str) -> Tensor:
    if layout == "transposed":
        shape = shape[::-1]
    elif layout == "expanded":
        shape = (1, *shape[1:])
    elif layout == "sliced":
        shape = (*shape[:-1], 2 * shape[-1] + 1)
    random = torch.rand if row.unit else torch.randn
    tensor = (random(shape) * 0.8 + 0.1).to(device, dtype)
    if layout == "channels last" and tensor.dim() == 4:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    return tensor.requires_grad_()


def seen(tensor: Tensor, shape: tuple[int, ...], layout: str) -> Tensor:
    """The leaf as the op gets it."""
    if layout == "transposed":
        return tensor.permute(*reversed(range(tensor.dim())))
    if layout == "expanded":
        return tensor.expand(shape)
    return tensor[..., 1::2] if layout == "sliced" else tensor


def run(row: Row, layout: str, dtype: torch.dtype, device: str, hooks: Hooks | None) -> list[Tensor]:
    """All gradients, and what the module keeps."""
    torch.manual_seed(0)
    leaves = [leaf(shape, layout, row, dtype, device) for shape in row.shapes]
    op, kept = row.op, []
    if isinstance(op, nn.Module):
        op = copy.deepcopy(op).to(device, dtype)
        kept = list(op.buffers())
        leaves += op.parameters()
        if hooks is not None:
            hooks.module = op
    with hooks or contextlib.nullcontext():
        made = op(*(seen(Held.apply(x), s, layout) for x, s in zip(leaves, row.shapes, strict=False)))
        total = torch.zeros((), dtype=torch.float64, device=device)
        for out in made if isinstance(made, tuple | list) else (made,):
            if out.requires_grad:
                total = total + Read.apply(out).double().sum() + Read.apply(-out).double().sum()
    if hooks is not None:
        hooks.made = nodes(total)
    total.backward()
    return [x.grad for x in leaves if x.grad is not None] + kept


def nodes(tensor: Tensor) -> set[str]:
    """Names of the nodes that made it."""
    pending, seen = [tensor.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [edge[0] for edge in node.next_functions]
    return {node.name() for node in seen}


def check(row: Row, dtype: torch.dtype, device: str = "cpu", autocast: bool = False) -> None:
    for layout in layouts(row):
        with torch.autocast(device, dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
            try:
                plain = run(row, layout, dtype, device, None)
            except RuntimeError as error:
                if layout == "contiguous" or "view size is not compatible" not in str(error):
                    raise
                continue
            hooks = Hooks(drop=frozenset({row.node}))
            found = run(row, layout, dtype, device, hooks)
        usual = layout == "contiguous"  # an op may be another one for another layout, or none at all
        assert hooks.remade or not (usual or row.node in hooks.made), f"nothing was remade ({layout}): {hooks.refused}"
        assert len(found) == len(plain)
        assert all(identical(one, other) for one, other in zip(found, plain, strict=True)), layout


def runs_on(device: str, rows: list[Row]) -> list[Row]:
    return [row for row in rows if RECIPES[row.node].device in (None, device)]


def names(value: object) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize(
    ("row", "dtype"), [(row, dtype) for row in runs_on("cpu", ROWS) for dtype in row.dtypes], ids=names
)
def test_bits_strides_and_gradients_are_those_of_the_plain_run(row: Row, dtype: torch.dtype) -> None:
    check(row, dtype)


@pytest.mark.parametrize("row", [row for row in runs_on("cpu", ROWS) if torch.float32 in row.dtypes], ids=names)
def test_under_autocast(row: Row) -> None:
    check(row, torch.float32, autocast=True)


@pytest.mark.gpu
@pytest.mark.parametrize("row", runs_on("cuda", ROWS), ids=names)
def test_on_cuda(row: Row) -> None:
    for dtype in row.dtypes:
        check(row, dtype, "cuda")


def test_every_recipe_has_a_row() -> None:
    assert {row.node for row in ROWS} == RECIPES.keys()
