"""Allocation tracker for a step on an absent GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lowtide._torch.fake_modes import (
    NO_FAKE_KERNEL,
    OWN_OPERATORS,
    SENDING_OPERATORS,
    SHARDING_OPERATORS,
    is_fake,
    is_strided,
    running_on_zeros,
    without_modes,
)
from lowtide._torch.pytree import tree_map
from lowtide.estimator import sparse_tensors as sparse
from lowtide.estimator.allocation_tracker import AllocationTracker, list_tensors
from lowtide.estimator.compiled_collectives import refuse_in_compiled_code
from lowtide.estimator.cpu.scratch import Scratch
from lowtide.estimator.cpu.scratch_trials import Trials
from lowtide.estimator.cuda.current_gpu import NAME, emulated, streams
from lowtide.estimator.cuda.ops.op_table import CUDA_OPS, CudaOp
from lowtide.estimator.fake_tensors import FakeTensors, swap

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide._torch.fake_modes import FakeTensorMode
    from lowtide.estimator.cuda.op_workspace import OpWorkspaces
    from lowtide.estimator.cuda.ops.op_registry import ScratchBlock
    from lowtide.estimator.values.value_oracle import ValueOracle

aten = torch.ops.aten

_ACROSS_DEVICES = frozenset({aten.copy_.default, aten._to_copy.default, aten._pack_padded_sequence.default})
"""Operators whose tensors may be on different devices."""

_CPU = torch.device("cpu")
_AS_ON_CPU = CudaOp()


class _CudaMovedFakeTensors(FakeTensors):
    """Fake counterparts of tensors, on the tensors' own devices. Those of CUDA tensors are on the rehearsed GPU."""

    def _choose_device(self, tensor: Tensor) -> torch.device | str:
        return NAME if tensor.device.type == "cuda" else tensor.device


class GpuAllocationTracker(AllocationTracker):
    """Allocation tracker for a step on an absent GPU. CPU tensors may occur, too, but their memory does not count.

    A script for a machine without a GPU creates its tensors on the CPU. If an operator combines a CPU tensor with
    tensors on the GPU, the CPU tensor is assumed to be on the GPU from then on.
    """

    def __init__(self, fakes: FakeTensorMode, answers: ValueOracle, takes: OpWorkspaces) -> None:
        super().__init__(NAME, fakes, answers, Scratch(NAME, Trials()), lambda: streams[-1])
        self._takes, self._fake_tensors = takes, _CudaMovedFakeTensors(fakes)
        self._moved = WeakIdKeyDictionary()  # type: ignore[no-untyped-call]
        self.bounds: dict[int, ScratchBlock] = {}
        """Number of a block -> its bounds, for blocks whose size is not known exactly."""
        self.unbounded: dict[str, str] = {}
        """Descriptions of operators with unknown scratch memory, by the operator's name."""
        self.is_inside = False
        """True while an operator runs."""

    def _follow(self, tensor: Tensor, op: str = "", *, entry: bool = False, n_bytes: int | None = None) -> None:
        super()._follow(tensor, emulated[-1] if op and emulated else op, entry=entry, n_bytes=n_bytes)

    def _record(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], results: list[Tensor]) -> None:
        op = f"aten::{func.__name__.partition('.')[0]}"
        known = CUDA_OPS.get(func, _AS_ON_CPU)
        if (host := known.on_host) is not None:
            for place in host:
                self._follow(results[place], op, n_bytes=0)
            results = [tensor for place, tensor in enumerate(results) if place not in host]
        scratch = self._takes.inside(func, args, kwargs, results)
        held = [(self._allocate_scratch(inside, op), inside) for inside in scratch if inside.first]
        super()._record(
            func, args, kwargs, tensors, results if known.order is None else [results[i] for i in known.order]
        )
        if results and func.namespace not in OWN_OPERATORS | SHARDING_OPERATORS:
            self.unbounded.setdefault(op, f"{func.name()}, no operator of torch: what it takes inside")
        self._record_scratch([inside for inside in scratch if not inside.first], op)
        for block, inside in reversed(held):
            self.ledger.free(block, inside.bytes)
        for library, n_bytes in self._takes.lasting(func, args, results):
            self.ledger.allocate(n_bytes, library)

    def _record_scratch(self, scratch: list[ScratchBlock], op: str) -> None:
        """Record the allocation of an operator's scratch blocks, and their frees at the ends of their lifetimes."""
        held: list[tuple[int, int, ScratchBlock]] = []
        for place, inside in enumerate(scratch):
            for ended in [one for one in held if one[2].through is not None and one[0] + one[2].through < place]:
                held.remove(ended)
                self.ledger.free(ended[1], ended[2].bytes)
            held.append((place, self._allocate_scratch(inside, op), inside))
        for _, block, inside in reversed(held):
            self.ledger.free(block, inside.bytes)

    def _allocate_scratch(self, inside: ScratchBlock, op: str) -> int:
        """Record the allocation of a scratch block, and its bounds if they differ. Return the block's number."""
        block = self.ledger.allocate(inside.bytes, op)
        if inside.least < inside.most:
            self.bounds[block] = inside
        return block

    def _move_to_one_device(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]
    ) -> tuple[Any, Any, list[Tensor]]:
        away = sum(t.device.type == "cpu" and t.dim() > 0 for t in tensors)
        if not away or func in _ACROSS_DEVICES or not any(t.device.type == self.device for t in tensors):
            return args, kwargs, tensors
        args, kwargs = tree_map(self.on_gpu, (args, kwargs))
        return args, kwargs, list_tensors(args, kwargs)[0]

    def put_on_gpu(self, tensor: Tensor) -> None:
        """Move a leaf tensor that the step has created on the CPU to the GPU. The Python object stays the same."""
        if tensor.is_leaf and is_fake(tensor) and (on_gpu := self.on_gpu(tensor)) is not tensor:
            del self._moved[tensor]
            on_gpu.requires_grad_(tensor.requires_grad)
            swap(tensor, on_gpu)

    def on_gpu(self, leaf: Any) -> Any:
        """Return a CPU tensor's copy on the GPU, which lives as long as the tensor. Return other leaves unchanged."""
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.device.type != "cpu":
            return leaf
        copy = self._moved.get(leaf)  # type: ignore[no-untyped-call]
        if copy is None:
            self._answers.note("a tensor on the CPU is assumed to be on the GPU")
            with without_modes(), self._fakes:
                copy = sparse.with_parts(leaf, self._empty) if sparse.is_sparse(leaf) else self._empty(leaf)
            self._moved[leaf] = copy
            for part in sparse.parts([copy]):
                self._follow(part, "aten::_to_copy")
        if is_strided(leaf):
            self._answers.pass_on(leaf, copy)  # at each use, because the tensor may have been written to since
        return copy

    def _empty(self, tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace in SENDING_OPERATORS:
            refuse_in_compiled_code(func.name())
        self.is_inside, before = True, self.is_inside
        try:
            known = CUDA_OPS.get(func, _AS_ON_CPU)
            if known.results is not None:
                with self._fakes:
                    return known.results(*args, **kwargs)
            out = super()._run(func, args, kwargs)
            return out if known.layout is None else known.layout(args, out)
        except NO_FAKE_KERNEL:
            return self._run_on_cpu(func, args, kwargs)
        finally:
            self.is_inside = before

    def _run_on_cpu(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that has no fake kernel on zeros on the CPU, to get the shapes of its results."""
        back: dict[int, Tensor] = {}

        def make_zeros_on_cpu(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return _CPU
            if not isinstance(leaf, torch.Tensor) or leaf.device == _CPU:
                return leaf
            on_cpu = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=_CPU)
            back[id(on_cpu)] = leaf
            return on_cpu

        def fake_again(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or id(leaf) in back:
                return back.get(id(leaf), leaf)
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=self.device)

        with self._fakes:
            args, kwargs = tree_map(make_zeros_on_cpu, (args, kwargs))
        with running_on_zeros(self._fakes):
            out = self._fakes.dispatch(func, (), args, kwargs)
        with self._fakes:
            return tree_map(fake_again, out)
