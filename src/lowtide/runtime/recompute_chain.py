"""Chains of elementwise recomputes, computed by one kernel.

Where backward asks for a tensor whose recompute needs results of other elementwise recomputes, one kernel computes all
of them. Results that something else will read are stored; the others are never written to memory.

No chain may need more memory than its recomputes one by one: then these run as before. They also do while a recording
observes them, so that the planner's memory is that of single recomputes.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain as join
from typing import TYPE_CHECKING, Any, Final

import torch

from lowtide._torch.backward import backward_number
from lowtide._torch.fake_modes import is_fake
from lowtide._torch.nodes import get_output_metadata
from lowtide._torch.tensors import set_version
from lowtide.runtime import saved_values as values
from lowtide.runtime.kernels.chain_source import find_run, write_chain
from lowtide.runtime.recipes import CannotRecompute
from lowtide.runtime.recipes.chains import MIXED, format_single
from lowtide.runtime.recompute import Recompute
from lowtide.runtime.saved_fields import NEVER

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node

    from lowtide.runtime.operand_capture import CaptureSite
    from lowtide.runtime.recipes import Recipe
    from lowtide.runtime.saved_values import Handle, Value

FLOATS: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
LONGEST: Final = 24
"""Largest number of operators in one kernel."""


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Return True if Triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def can_chain(device: torch.device) -> bool:
    """Return True if kernels for chains run on `device`: a GPU, or a CPU where Triton is told to interpret kernels."""
    return has_triton() and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


_failed: set[str] = set()
"""Sources of kernels that failed in this process."""


class ChainedRecompute(Recompute):
    """Recompute of an elementwise operator, which may be part of a chain: made by `start_chained`."""

    __slots__ = ("chain", "dtype", "shape")

    chain: Chain | None
    """The chain that ends with this recompute and is about to run."""
    shape: torch.Size
    dtype: torch.dtype

    def gather(self, value: Value) -> Sequence[Handle | None]:
        """Return the operands that have to be available before `make`: those of the whole chain that ends here."""
        self.chain = None if values.observer is not None else find_chain(value, get_pending_recompute)
        return self.operands if self.chain is None else self.chain.outside

    def make(self, value: Value) -> Tensor:
        """Run the chain that ends here, or only this recipe if the chain has no kernel or needs more memory."""
        chain, self.chain = self.chain, None
        if chain is None:
            return super().make(value)
        prepared = chain.prepare()
        if prepared is not None and chain.count_bytes(fused=True) <= chain.count_bytes(fused=False):
            outputs = chain.try_launch(prepared)
            if outputs is not None:
                return chain.store(prepared, outputs)
        for member, maker in chain.members[:-1]:
            Recompute.make(maker, member)
        return super().make(value)


def get_pending_recompute(value: Value) -> Recompute | None:
    """Return the maker of a value that has to be recomputed and may be part of a chain."""
    maker = value.maker
    return maker if value.tensor is None and isinstance(maker, ChainedRecompute) else None


@dataclass(slots=True)
class Prepared:
    """A kernel for a chain with its arguments, except the outputs."""

    source: str
    inputs: list[Tensor]
    runs: list[tuple[int, int]]
    stride: tuple[int, ...]
    stored: list[int]


@dataclass(slots=True)
class Chain:
    """Recomputes that one kernel can compute, in order, and the handles on their operands from elsewhere."""

    members: list[tuple[Value, ChainedRecompute]]
    outside: tuple[Handle, ...]

    def prepare(self, stored: Sequence[int] | None = None) -> Prepared | None:
        """Return the kernel for this chain; None if there is none. The operands in `outside` must be available.

        The kernel stores the results of the members with the numbers `stored`; by default, of those that something else
        will read.
        """
        top = self.members[-1][1]
        found, numbers, full = dict[int, int](), dict[int, str](), None
        inputs: list[Tensor] = []
        for operand in self.outside:
            tensor = look_at(operand)
            if tensor is not None and is_number(tensor):
                numbers[id(operand)] = put_in_text(tensor.item())
                continue
            if tensor is None or is_fake(tensor) or not (tensor.dtype in FLOATS or tensor.dtype is torch.bool):
                return None
            same = (n for n, other in enumerate(inputs) if is_same_memory(tensor, other))
            found[id(operand)] = next(same, len(inputs))
            if found[id(operand)] < len(inputs):
                continue
            inputs.append(tensor)
            if tensor.shape == top.shape and full is None:
                full = tensor
        device = inputs[0].device if inputs else None
        if full is None or device is None or not can_chain(device) or any(each.device != device for each in inputs):
            return None
        stride = full.stride()
        order = sorted(range(full.dim()), key=lambda n: (-stride[n], n))
        sizes = [full.shape[n] for n in order]
        if find_run(sizes, [stride[n] for n in order], sizes) != (1, full.numel()):
            return None
        broadcast, runs = [], []
        for tensor in inputs:
            if tensor.shape == full.shape and tensor.stride() == stride:
                broadcast.append(False)
                continue
            wide = tensor.expand(full.shape)
            run = find_run([wide.shape[n] for n in order], [wide.stride()[n] for n in order], sizes)
            if run is None:
                return None
            broadcast.append(True)
            runs.append(run)
        number_of = {id(value): n for n, (value, _) in enumerate(self.members)}
        if stored is None:
            stored = [n for n, (value, _) in enumerate(self.members) if self._is_read_elsewhere(value)]
        operators = []
        for value, maker in self.members:
            if maker.stride not in (None, stride) or maker.sharded:
                return None
            names, dtypes = dict[str, str](), []
            for name, handle in name_operands(maker):
                if handle is None:
                    names[name] = ""
                elif handle.value is not value and id(handle.value) in number_of:
                    number = number_of[id(handle.value)]
                    names[name] = f"v{number}"
                    dtypes.append((self.members[number][1].dtype, True))
                elif id(handle) in numbers:
                    names[name] = numbers[id(handle)]
                else:
                    tensor = inputs[found[id(handle)]]
                    names[name] = f"a{found[id(handle)]}"
                    dtypes.append((tensor.dtype, tensor.dim() > 0))
            if not have_common_type(maker, dtypes):
                return None
            try:
                operators.append((write_expression(maker, names), maker.dtype))
            except CannotRecompute:
                return None
        return Prepared(write_chain(broadcast, operators, stored), inputs, runs, stride, list(stored))

    def _is_read_elsewhere(self, value: Value) -> bool:
        """Return True if something besides the members of this chain will read `value` in this pass."""
        if value is self.members[-1][0]:
            return True
        inside = sum(handle.value is value for handle in self._inside())
        return count_unread(value) > inside

    def _inside(self) -> list[Handle]:
        """Return the handles of members on members."""
        own = {id(value) for value, _ in self.members}
        operands = join.from_iterable(maker.operands for _, maker in self.members)
        return [handle for handle in operands if handle is not None and id(handle.value) in own]

    def count_bytes(self, *, fused: bool) -> int:
        """Return the most bytes that the chain needs at once: results, and recomputed operands that are freed after it.

        Fused, all of these exist at once. One by one, a result may be written over an operand.
        """
        last_read, n_reads = dict[int, int](), dict[int, int]()
        for n, (_, maker) in enumerate(self.members):
            for handle in maker.operands:
                if handle is not None:
                    last_read[id(handle.value)] = n
                    n_reads[id(handle.value)] = n_reads.get(id(handle.value), 0) + 1
        size = {id(value): maker.shape.numel() * maker.dtype.itemsize for value, maker in self.members}
        stays = {id(value) for value, _ in self.members if self._is_read_elsewhere(value)}
        live = dict[int, int]()
        for handle in self.outside:
            value = handle.value
            if value.maker is not None and value.tensor is not None and count_unread(value) <= n_reads[id(value)]:
                live[id(value)] = value.tensor.untyped_storage().nbytes()
        if fused:
            return sum(live.values()) + sum(size[value] for value in stays)
        most = 0
        for n, (value, maker) in enumerate(self.members):
            over = self._may_write_over(maker, live, size[id(value)])
            if over is not None:
                del live[over]
            live[id(value)] = size[id(value)]
            most = max(most, sum(live.values()))
            for freed in [it for it in live if it not in stays and last_read.get(it, n + 1) <= n]:
                del live[freed]
        return most

    def _may_write_over(self, maker: ChainedRecompute, live: Mapping[int, int], n_bytes: int) -> int | None:
        """Return an operand that `maker` may write its result over; None if there is none."""
        if maker.recipe.into:
            for handle in maker.operands:
                if handle is not None and handle.value.is_intermediate and live.get(id(handle.value)) == n_bytes:
                    return id(handle.value)
        return None

    def store(self, prepared: Prepared, outputs: list[Tensor]) -> Tensor:
        """Mark the chain's operands as read, store the results that are read elsewhere, and return the last one."""
        for handle in self.outside:
            handle.get()
        number = backward_number()
        for n, output in zip(prepared.stored, outputs, strict=True):
            value = self.members[n][0]
            if value.version not in (-1, output._version):
                set_version(output, value.version)
            value.store_recomputed(output)
        for handle in self._inside():
            value = handle.value
            if value.last_backward != number:
                value.last_backward, value.reads = number, 0
            handle.last_backward = number
            value.reads += 1
            if value.reads == value.readers:
                value.tensor = None
        return outputs[-1]

    def try_launch(self, prepared: Prepared) -> list[Tensor] | None:
        """Run the kernel and return its outputs; None if it fails, now or earlier. Raises torch's error if there is not
        enough memory.
        """
        if prepared.source in _failed:
            return None
        try:
            return self.launch(prepared)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # of Triton, a compiler or the driver: the recipes run instead
            _failed.add(prepared.source)
            return None

    def launch(self, prepared: Prepared) -> list[Tensor]:
        """Run the kernel and return its outputs."""
        device = prepared.inputs[0].device
        outputs = []
        for n in prepared.stored:
            maker = self.members[n][1]
            outputs.append(torch.empty_strided(maker.shape, prepared.stride, dtype=maker.dtype, device=device))
        run_chain(prepared.source, prepared.inputs, outputs, prepared.runs)
        return outputs


def run_chain(
    source: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], runs: Sequence[tuple[int, int]]
) -> None:
    from lowtide.runtime.kernels import chain_kernel

    chain_kernel.run_chain(source, inputs, outputs, runs)


def find_chain(top: Value, get_maker: Callable[[Value], Recompute | None]) -> Chain | None:
    """Return the longest chain of at least two recomputes that ends with the recompute of `top`.

    `get_maker` returns the recompute of a value that may be a member. Returns None if there is no chain, or if one of
    its operands would be recomputed after a member, because the chain would then hold more than its members one by one.
    """
    members: list[tuple[Value, ChainedRecompute]] = []
    available: list[Handle] = []
    missing: list[Handle] = []
    last = get_maker(top)
    if not isinstance(last, ChainedRecompute):
        return None
    pending: list[tuple[Value, Handle | None]] = [(top, None)]
    done, entered, made_first = set[int](), set[int](), list[int]()
    while pending:
        value, handle = pending[-1]
        if id(value) in done:
            pending.pop()
            continue
        maker = last if value is top else get_maker(value)
        is_whole = handle is None or handle.view is None
        if not (is_whole and isinstance(maker, ChainedRecompute) and maker.shape == last.shape):
            if members:
                return None
            done.add(id(value))
            made_first.append(id(value))
            continue
        if id(value) in entered:
            members.append((value, maker))
            done.add(id(value))
            if len(members) > LONGEST:
                return None
            continue
        entered.add(id(value))
        for operand in maker.operands:
            if operand is None:
                continue
            if operand.last_backward != NEVER:
                operand.mark_unread()
            if operand.value.tensor is None or get_maker(operand.value) is not None:
                pending.append((operand.value, operand))
    if len(members) < 2:
        return None
    own = {id(value) for value, _ in members}
    for _, maker in members:
        for operand in maker.operands:
            if operand is not None and id(operand.value) not in own:
                (available if operand.value.tensor is not None else missing).append(operand)
            elif operand is not None and operand.view is not None:
                return None
    missing.sort(key=lambda operand: -made_first.index(id(operand.value)))  # the last one is made first
    return Chain(members, (*available, *missing))


def count_unread(value: Value) -> int:
    """Return the number of handles that have not read `value` in this pass."""
    return value.readers - (value.reads if value.last_backward == backward_number() else 0)


def look_at(handle: Handle) -> Tensor | None:
    """Return the tensor of a handle without counting as a reader; None if it is unavailable or has been changed."""
    value, view = handle.value, handle.view
    tensor = value.tensor
    if tensor is None or (value.maker is None and tensor._version != value.version):
        return None
    return tensor if view is None else tensor.as_strided(*view) if isinstance(view, tuple) else view


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same elements at the same addresses."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype is other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def is_number(tensor: Tensor) -> bool:
    """Return True if a saved tensor is a number of the program: autograd saves `0.5` in `0.5 * x` as a tensor."""
    return tensor.dim() == 0 and tensor.device.type == "cpu" and tensor.dtype in {torch.float64, torch.int64}


def name_operands(maker: Recompute) -> list[tuple[str, Handle | None]]:
    """Return the operands of a recompute with the names of the recipe's parameters."""
    if maker.places is None:
        return list(zip(maker.recipe.operands, maker.operands, strict=True))
    return [(name, maker.operands[place]) for name, place in maker.places.items() if isinstance(place, int)]


def have_common_type(maker: ChainedRecompute, dtypes: Sequence[tuple[torch.dtype, bool]]) -> bool:
    """Return True if the operator computes in single precision and rounds once, to the dtype of its result.

    `dtypes` has the dtype of each operand, and False for tensors without dimensions, which torch rounds first.
    """
    if maker.dtype not in FLOATS:
        return False
    if maker.recipe.node in MIXED:
        return True
    for dtype, has_dims in dtypes:
        if dtype is not maker.dtype and dtype is not torch.bool and (maker.dtype is not torch.float32 or not has_dims):
            return False
    return True


def write_expression(maker: Recompute, names: Mapping[str, str]) -> str:
    """Return the expression of a recompute whose tensors have the `names`; its numbers are written out.

    Raises CannotRecompute if it has none.
    """
    expression: Any = maker.recipe.expression
    parameters = expression.__code__.co_varnames[: expression.__code__.co_argcount]
    known = dict(names)
    for name, constant in maker.constants.items():
        if name in parameters:
            known[name] = put_in_text(constant)
    return str(expression(**{name: known.get(name, "") for name in parameters}))


def put_in_text(constant: object) -> str:
    """Return a constant as the text of a kernel: a number in single precision, or the constant itself; `nan` for any
    other constant, so that no result is exact.
    """
    if isinstance(constant, str) or constant is None:
        return constant or ""
    if not isinstance(constant, int | float) or not abs(number := float(constant)) < 2**127:
        return 'float("nan")'
    return format_single(number)


def start_chained(
    recipe: Recipe,
    operands: tuple[Handle | None, ...],
    places: dict[str, int | slice] | None,
    constants: dict[str, Any],
    stride: tuple[int, ...] | None,
    captured_sites: frozenset[CaptureSite],
    node: Node,
    output: int,
) -> ChainedRecompute:
    """Return the recompute of an output of `node`, by a recipe with an expression."""
    recompute = ChainedRecompute(recipe, operands, places, constants, stride, captured_sites)
    metadata = get_output_metadata(node, output)
    recompute.chain, recompute.shape, recompute.dtype = None, torch.Size(metadata.shape), metadata.dtype
    return recompute


if values.native is not None:
    values.native.lend(ChainedRecompute=ChainedRecompute)
