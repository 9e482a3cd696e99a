"""Run the operators of a step on fake tensors, and record the memory that they would allocate.

Views, in-place operators and results that alias an argument allocate nothing. Memory that operators allocate and free
internally is computed in `cpu/scratch.py`. `storage_ledger.py` records when storages are freed.

Under a dispatch mode, autograd does not accumulate tensors in place, because it can't know the mode's effects. If
autograd would write in place without a mode, the tracker assigns the old memory to the result (`INPLACE_OTHERWISE`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch.backward import (
    ACCUMULATE_GRAD,
    BACKWARD_CALL,
    get_running_node_name,
    get_running_node_number,
    in_backward,
)
from lowtide._torch.distributed import is_wrapping
from lowtide._torch.fake_modes import (
    DATA_DEPENDENT,
    NO_FAKE_KERNEL,
    OWN_OPERATORS,
    SENDING_OPERATORS,
    WRAPPING_OPERATOR,
    is_strided,
    on_real_tensors,
    without_function_modes,
    without_modes,
)
from lowtide._torch.modes import TorchDispatchMode
from lowtide._torch.operators import changes_geometry, op_name
from lowtide._torch.pytree import tree_map
from lowtide._torch.tensors import base_of, find_parts, get_storage_id
from lowtide.errors import RehearsalError
from lowtide.estimator import sparse_tensors as sparse
from lowtide.estimator.collectives import n_sent
from lowtide.estimator.cpu.scratch import Scratch
from lowtide.estimator.fake_tensors import FakeTensors, is_real
from lowtide.estimator.op_sets import (
    BATCH_NORMED,
    CONTIGUOUS,
    GROUPED,
    IN_FORMULA,
    INPLACE_OTHERWISE,
    PACKING,
    PRODUCTS,
)
from lowtide.estimator.packed_sequences import copies
from lowtide.estimator.storage_ledger import StorageLedger
from lowtide.estimator.values.query_site import where
from lowtide.estimator.values.value_oracle import ValueOracle, detach_real
from lowtide.profiler.measure_call import CAN_GO_WRONG, FORMULAS
from lowtide.runtime import inplace_gradients as in_place

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor

    from lowtide._torch.fake_modes import FakeTensorMode

aten = torch.ops.aten

_ASKED_OF_RESULTS = torch.ops.prim.device.default
"""Operator by which autograd queries the device of a node's result, while it still holds the node's inputs."""


class AllocationTracker(TorchDispatchMode):
    """Dispatch mode that runs every operator on fake tensors and records the memory that it would allocate on `device`.

    Real tensors are replaced by fake counterparts. `answers` holds the contents of tensors that are known. `scratch`
    computes the memory that operators allocate internally.
    """

    def __init__(
        self,
        device: str,
        fakes: FakeTensorMode,
        answers: ValueOracle,
        scratch: Scratch,
        stream_number: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.ledger = StorageLedger(device, stream_number)
        self._fakes, self._fake_tensors = fakes, FakeTensors(fakes)
        self._answers, self._scratch = answers, scratch
        self._formula = (-1, 0)
        """Sequence number of the last node with a formula in `IN_FORMULA`, and the number of the first block allocated
        since.
        """
        self.in_place: set[int] = set()
        """Numbers of storages whose gradients are views (buckets of DDP). Autograd adds to these views in place."""
        self._asked: set[int] = set()
        """Ids of tensors whose device autograd has just queried: a node's results, which it adds to other gradients
        next.
        """
        self.n_flops = 0
        """FLOPs since the last `begin`, of operators for which torch has a formula."""
        self.meter: Callable[[Any, Sequence[Tensor], Sequence[Tensor], int], None] | None = None
        """Function called with each operator, its arguments, its results and its FLOPs; None if no function is set."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch wraps each call in a guard that imports the compiler

    def __enter__(self) -> Self:
        self.ledger.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.ledger.__exit__(kind, error, traceback)
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Begin a new stream of events. Storages that are alive now count as existing at its beginning."""
        self.ledger.begin()
        self.n_flops = 0

    def adopt(self, tensor: Tensor) -> Tensor:
        """Track a tensor that exists before the step, without an allocation event. Return its fake counterpart.

        A fake tensor is its own counterpart. For a distributed tensor, the local shard is tracked and the tensor itself
        is returned.
        """
        if is_wrapping(type(tensor)):
            for part in find_parts(tensor):
                self.adopt(part)
            return tensor
        fake = tensor
        if is_real(tensor):
            fake = self._fake_tensors.of(tensor)
            self._answers.introduce(fake, tensor)
        for part in sparse.parts([fake]):
            self._follow(part, entry=True)
        return fake

    def follow_new(self, tensor: Tensor) -> None:
        """Track a real tensor that torch has just allocated without calling an operator."""
        self._follow(tensor, "aten::empty", n_bytes=tensor.nbytes)

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Create fake tensors in this block without recording allocations."""
        with without_modes(), self._fakes:
            yield

    def release(self, tensor: Tensor) -> None:
        """Drop the tracker's reference to a tensor's fake memory, because the tensor gets other memory.

        The fake memory is freed once no other object refers to it.
        """
        self._fake_tensors.release(tensor)

    # --- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_wrapping, types)):
            return NotImplemented  # the wrapper's own code runs first, and comes back with its parts
        if func is _ASKED_OF_RESULTS and not is_real(args[0]):  # more than half of all calls
            self._asked.add(id(args[0]))
            return self._fakes.dispatch(func, (), args)
        if func.namespace not in OWN_OPERATORS:  # a fake kernel of the user's own may ask for CUDA
            return self._handle(func, args, kwargs or {})
        with without_function_modes():
            return self._handle(func, args, kwargs or {})

    def _handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on fake tensors, record what it allocates, and return its result."""
        if func is _ASKED_OF_RESULTS:
            self._asked.add(id(args[0]))
        else:
            self.ledger.settle()
            if func is not aten.add.Tensor:
                self._asked.clear()
        n_sent[0] += func.namespace in SENDING_OPERATORS
        tensors, any_real = list_tensors(args, kwargs)
        if any_real:
            if (detached := detach_real(func, args)) is not None:
                return detached
            if changes_geometry(func):
                raise self._answers.refusal(f"{op_name(func)} changes the geometry of a tensor that exists already")
            args, kwargs = tree_map(lambda leaf: self._make_fake(leaf, func) if is_real(leaf) else leaf, (args, kwargs))
            tensors, _ = list_tensors(args, kwargs)
        if len(tensors) > 1:
            args, kwargs, tensors = self._move_to_one_device(func, args, kwargs, tensors)
        places = self._answers.count_mask_index_bytes(func, args)
        answered, out = self._answers.before(func, args, kwargs, tensors)
        if not answered:
            try:
                out = self._run(func, args, kwargs)
            except NO_FAKE_KERNEL as error:
                raise _build_no_kernel_error(func) from error
        n_flops = 0
        if (formula := FORMULAS.get(func.overloadpacket)) is not None:
            with contextlib.suppress(
                AssertionError, *CAN_GO_WRONG
            ):  # torch's formula does not handle these shapes: count nothing
                n_flops = int(formula(*args, **kwargs, out_val=out))
                self.n_flops += n_flops
        results = (
            [out] if isinstance(out, torch.Tensor) else [t for t in _list_leaves(out) if isinstance(t, torch.Tensor)]
        )
        self._record(func, args, kwargs, tensors, sparse.parts(results))
        if self.meter is not None:
            self.meter(func, tensors, results, n_flops)
        self.ledger.inside(places, "aten::nonzero")
        self._answers.after(func, args, kwargs, tensors, results)
        return out

    def _make_fake(self, tensor: Tensor, func: Any) -> Tensor:
        if func is aten.lift_fresh.default:  # `torch.tensor(...)`: newly allocated
            is_torchs = not is_strided(tensor) or tensor.untyped_storage().resizable()
            fake = self._fake_tensors.of_new(tensor)
            self._answers.introduce(fake, tensor)
            self._follow(fake, "aten::empty", n_bytes=None if is_torchs else 0)  # an array's tensor has NumPy's memory
            return fake
        return self.adopt(tensor)

    def _move_to_one_device(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]
    ) -> tuple[Any, Any, list[Tensor]]:
        """Return args, kwargs and the tensors in them unchanged.

        A subclass moves CPU tensors to the GPU if an operator mixes both.
        """
        return args, kwargs, tensors

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.name() == WRAPPING_OPERATOR:
            return self._fakes.dispatch(aten.alias.default, (), args)
        if func is GROUPED:
            return self._multiply_groups(*args, **kwargs)
        if func in PRODUCTS and len(dtypes := dict.fromkeys(tensor.dtype for tensor in args)) > 1:
            raise RuntimeError(
                f"expected mat1 and mat2 to have the same dtype, but got: {' and '.join(map(str, dtypes))}"
            )
        if (assumed := sparse.assumed(func, args)) is not None:
            self._answers.note(assumed)
        if (kernel := sparse.kernel(func, args, self._answers, by_autograd=_is_called_in_backward)) is not None:
            return kernel(*args, **kwargs)
        try:
            out: Any = self._fakes.dispatch(func, (), args, kwargs)
        except DATA_DEPENDENT as error:
            raise self._answers.refusal(f"the size of what {op_name(func)} gives depends on contents") from error
        if func in CONTIGUOUS and self.device == "cpu":
            return tuple(None if t is None else _lay_out(t) for t in out)
        if func in BATCH_NORMED and self.device == "cpu" and out[0] is not None:
            return _lay_out(out[0], _choose_format(args[BATCH_NORMED[func]])), *out[1:]
        return out

    def _multiply_groups(
        self, one: Tensor, other: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
    ) -> Tensor:
        """Return a fake result of a grouped matrix product. Like the real kernels, align its rows to 16 bytes."""
        dtype = out_dtype or one.dtype
        rows, columns = one.shape[-2], other.shape[-1]
        padded = -(-columns * dtype.itemsize // 16) * 16 // dtype.itemsize
        shape, strides = (rows, columns), (padded, 1)
        if one.dim() == other.dim():
            groups = one.shape[0] if offs is None else offs.shape[0]
            shape, strides = (groups, *shape), (rows * padded, *strides)  # type: ignore[assignment]
        with self._fakes:
            return torch.empty_strided(shape, strides, dtype=dtype, device=one.device)

    def _record(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], results: list[Tensor]) -> None:
        op = "aten::" + op_name(func)
        new = [tensor for tensor in results if not self.ledger.knows(tensor)]
        if len(new) == 1 and self._writes_otherwise(func, args):
            if self._reuse_memory(args[0], new[0]):
                return
            if get_running_node_name() == ACCUMULATE_GRAD and get_storage_id(args[0]) in self.in_place:
                self.ledger.share(args[0], new[0])
                return
        if len(new) == 1 and self._is_written_over(func, args, new[0]):
            self.ledger.share(args[0], new[0])
            return
        if new and in_place.wanted_from(func, args):
            self._reuse_memory(args[0], results[0])
        sizes, extra = self._scratch.of(func, args, kwargs, tensors, results)
        for number, tensor in enumerate(results):
            self._follow(tensor, op, n_bytes=sizes.get(number))
        self.ledger.inside(extra, op)
        if func is PACKING and (known := self._answers.value(args[1])) is not None:
            with on_real_tensors():
                lengths = known.tolist()
            self.ledger.inside(copies(args[0], lengths, args[2]), op)

    def _writes_otherwise(self, func: Any, args: Any) -> bool:
        """Return True if autograd would run this operator in place if no dispatch mode were active.

        A sum counts only if it adds up gradients, not if it is part of a node's backward formula.
        """
        if func is not aten.add.Tensor or get_running_node_name() == ACCUMULATE_GRAD:
            return func in INPLACE_OTHERWISE
        return any(id(arg) in self._asked for arg in args)

    def _is_written_over(self, func: Any, args: Any, new: Tensor) -> bool:
        """Return True if the node's backward formula, without a dispatch mode, would write the result over `args[0]`.

        A formula overwrites only tensors that it has computed itself.
        """
        if (writes := IN_FORMULA.get(get_running_node_name())) is None:
            return False
        if self._formula[0] != (node := get_running_node_number()):
            self._formula = node, self.ledger.n_blocks
        return func in writes and self.ledger.is_newer(args[0], self._formula[1], new.untyped_storage().nbytes())

    def _follow(self, tensor: Tensor, op: str = "", *, entry: bool = False, n_bytes: int | None = None) -> None:
        """Track a tensor's storage from now until it is freed.

        With `entry`, the storage exists before the step. The recorded allocation has `n_bytes` bytes, by default the
        storage's size; no allocation is recorded for 0.
        """
        self.ledger.follow(tensor, op, entry=entry, n_bytes=n_bytes)

    def _reuse_memory(self, old: Any, new: Tensor) -> bool:
        """Assign the memory of `old` to `new` if autograd, without this mode, would write in place. Return True if so.

        Autograd does that only for its own sums and gradients, not for those that Python code computes in a backward
        pass, and only if nothing else refers to `old`. A view, such as the gradient of a transposed weight, keeps its
        base alive and is excluded.
        """
        if not in_backward() or not isinstance(old, torch.Tensor) or base_of(old) is not None:
            return False
        return _is_called_by_autograd() and self.ledger.reuse_memory(old, new)


def _lay_out(tensor: Tensor, form: torch.memory_format = torch.contiguous_format) -> Tensor:
    if tensor.is_contiguous(memory_format=form):
        return tensor
    return torch.empty_like(tensor, memory_format=form)


def _choose_format(tensor: Tensor) -> torch.memory_format:
    """Return the channels-last memory format if the tensor has it, else the contiguous format."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def list_tensors(args: Any, kwargs: Any) -> tuple[list[Tensor], bool]:
    """Return the tensors among an operator's arguments, and True if any of them is real.

    It is faster than flattening the arguments by torch's pytree functions.
    """
    tensors: list[Tensor] = []
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(arg, torch.Tensor):
            tensors.append(arg)
        elif isinstance(arg, list | tuple):
            tensors += [item for item in arg if isinstance(item, torch.Tensor)]
    return tensors, any(is_real(tensor) for tensor in tensors)


def _list_leaves(out: Any) -> Iterator[Any]:
    if isinstance(out, tuple | list):
        for item in out:
            yield from _list_leaves(item)
    else:
        yield out


def _build_no_kernel_error(func: Any) -> RehearsalError:
    remedy = "Measure this step instead (lowtide.timeline), or do there without it"
    if func.namespace not in OWN_OPERATORS:
        remedy = "Say what its results look like (torch.library.register_fake), or measure this step (lowtide.timeline)"
    return RehearsalError(
        f"{where()}: {func.name()} is an operator that torch can't run on fake tensors (tensors without memory).\n  "
        f"{remedy}."
    )


def _is_called_in_backward() -> bool:
    return in_backward() and _is_called_by_autograd()


def _is_called_by_autograd() -> bool:
    """Return True if autograd's C++ code called the operator, with no user Python code in between."""
    frame = sys._getframe(3)  # a frame of the tracker, from which the loop goes on to the tracker's caller
    while frame.f_code.co_filename.endswith(_WRAPPERS):
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_code is BACKWARD_CALL


_WRAPPERS = (
    *("torch/utils/_python_dispatch.py", "torch/_ops.py"),
    *("lowtide/estimator/allocation_tracker.py", "lowtide/estimator/cuda/gpu_allocation_tracker.py"),
    *("lowtide/runtime/inplace_gradients.py", "lowtide/_torch/privateuse1.py"),
)
