"""Private names of torch: tensors and their storage."""

from __future__ import annotations

import contextlib
import copyreg
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide._torch.fake_modes import FakeTensor

base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
"""Return the base of a view, through any number of views; None for a tensor that is not a view. Relies on internals of
torch 2.13.
"""


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` is plain strided memory: not sparse, not nested, and of no tensor subclass but
    `Parameter` and `FakeTensor`. Relies on internals of torch 2.13.
    """
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def reads_attribute(function: Any, types: Any) -> bool:
    """Return True if `function` reads an attribute of a plain tensor. A function mode is given both `function` and
    `types`.

    Relies on internals of torch 2.13.
    """
    return type(function) is _READER and function.__name__ == "__get__" and len(types) == 1 and types[0] in _PLAIN


_READER: Any = type(vars(torch._C.TensorBase)["grad"].__get__)


def find_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that own the memory of `tensor`: the inner tensors of a sparse tensor, a nested tensor or a
    wrapper subclass, otherwise `tensor` itself.
    """
    layout = tensor.layout
    if layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(part := getattr(tensor, name), torch.Tensor):  # a DTensor names its mesh, too
                yield from find_parts(part)
    elif tensor.is_nested:  # in the strided layout, whose sizes cannot be read
        yield tensor.values()
    else:
        yield tensor


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set `tensor._version`, the number of changes in place. Relies on internals of torch 2.13, present since 2.6."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def get_storage_number(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage while it is alive, whichever Python object wraps it. Relies on
    internals of torch 2.13.
    """
    return int(storage._cdata)


@contextlib.contextmanager
def fakes_have_addresses() -> Iterator[None]:
    """Let fake storages, which have no address, return a number that identifies them as their address inside this
    `with` block. Relies on internals of torch 2.13.
    """
    address = torch.UntypedStorage.data_ptr

    def addressed(storage: torch.UntypedStorage) -> int:
        return get_storage_number(storage) if storage.device.type == "meta" else address(storage)

    with patch.object(torch.UntypedStorage, "data_ptr", addressed):
        yield


STORAGE: Callable[[torch.Tensor], torch.UntypedStorage] = operator.methodcaller("untyped_storage")
"""Return a tensor's storage. Raises NO_STORAGE for a tensor without one."""
STORAGE_NUMBER: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""Return the number of a storage, like `get_storage_number`, but without a call of a Python function.

Relies on internals of torch 2.13.
"""
NO_STORAGE = RuntimeError
"""Exception that sparse tensors raise when they are asked for their storage: a NotImplementedError. Read in torch 2.13.
"""


def get_storage_id(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage during its lifetime; 0 without a storage. Relies on internals
    of torch 2.13.
    """
    try:
        return STORAGE_NUMBER(tensor.untyped_storage())
    except NO_STORAGE:
        return 0


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same shape, storage and offset."""
    if one.shape != other.shape or not get_storage_id(one) or get_storage_id(one) != get_storage_id(other):
        return False
    return one.storage_offset() == other.storage_offset()


class WeakStorage:
    """Weak reference to a tensor's memory. In torch 2.13 a storage's Python object, once made, counts as one owner."""

    __slots__ = ("_reference", "address")

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.address = storage.data_ptr()

    def owners(self) -> int:
        """Return the number of C++ tensors that own this memory; 0 once it is freed."""
        return max(0, int(torch._C._storage_Use_Count(self._reference.cdata)) - 1)


def has_one_owner(tensor: torch.Tensor) -> bool:
    """Return True if only this tensor object refers to its memory: no view, no graph. Relies on internals of torch
    2.13.

    The storage's Python object counts as an owner, too.
    """
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == 2 and tensor._use_count() == 1)  # type: ignore[attr-defined]


def references(things: tuple[Any, ...]) -> tuple[int, ...]:
    """Count references to the first item, a tensor, and to its memory; two such counts can be compared. Relies on
    internals of torch 2.13.

    A view refers to its base, in the same memory, so references to the base are counted as well.

    The last item is an object without other references. References to all items alike cancel out, such as references
    from callers whose frames are traced or evaluated (Dynamo, debuggers). No local variable may hold an item, because
    that would be counted.
    """
    counts = (
        things[0]._use_count(),
        sys.getrefcount(things[0]) - sys.getrefcount(things[-1]),
        torch._C._storage_Use_Count(things[0].untyped_storage()._cdata),
        sys.getrefcount(things[0].untyped_storage()),
    )
    if not things[0]._is_view():
        return counts
    return *counts, things[0]._base._use_count(), sys.getrefcount(things[0]._base)


def held_by_python(tensors: Sequence[Any], index: int, known: int) -> bool:
    """Return True if Python holds more than `known` references to `tensors[index]`; C++ references don't count. Relies
    on internals of torch 2.13.

    While a C++ tensor has other owners, it holds one reference to its own Python object, which is not counted here.
    """
    owners = int(tensors[index]._use_count())
    # An item, not a variable: since Python 3.14 a call may borrow a variable's reference.
    return sys.getrefcount(tensors[index]) - 1 - known - (owners > 1) > 0


def as_kind(kind: type[Any], tensor: torch.Tensor) -> Any:
    """Return a tensor of subclass `kind` with the memory of `tensor`, which must not require grad. Relies on internals
    of torch 2.13, present since 1.0.
    """
    return torch.Tensor._make_subclass(kind, tensor)


DEVICE = vars(torch._C.TensorBase)["device"].__get__
"""Function behind `tensor.device`. Read in torch 2.13."""
AS_ARRAY = vars(torch._C.TensorBase)["numpy"]
"""Method behind `tensor.numpy()`, which a plan replaces while it is in force. Read in torch 2.13."""
SET_DATA = vars(torch._C.TensorBase)["data"].__set__
"""Function behind `tensor.data = other`. Read in torch 2.13."""
IS_CUDA = vars(torch._C.TensorBase)["is_cuda"].__get__
"""Function behind `tensor.is_cuda`. Read in torch 2.13."""
PACK_PADDED = torch._VF._pack_padded_sequence
"""Operator that packs padded sequences; the second of its results, the sizes, is always on the CPU. Read in torch 2.13.
"""
PAD_PACKED = torch._VF._pad_packed_sequence
"""Function behind `pad_packed_sequence`. Read in torch 2.13."""
PARSE_TO = torch._C._nn._parse_to
"""Function that parses the arguments of `module.to`. Read in torch 2.13."""
SET_REQUIRES_GRAD = vars(torch._C.TensorBase)["requires_grad"].__set__
"""Function behind `tensor.requires_grad = True`. Read in torch 2.13."""


def wrapper(kind: type[Any], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
    """Return a tensor of subclass `kind` with this shape, dtype and device, without memory. Relies on internals of
    torch 2.13, present since 1.11.
    """
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Swap two tensors, while each Python object keeps its identity. No autograd graph may hold either tensor. Relies
    on internals of torch 2.13.

    `torch.utils.swap_tensors` would refuse tensors with weak references, such as weights of recurrent layers.
    """
    slots = {*copyreg._slotnames(type(one)), *copyreg._slotnames(type(other))}  # type: ignore[attr-defined]
    torch._C._swap_tensor_impl(one, other)
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    for name in slots:
        held = getattr(one, name, None), getattr(other, name, None)
        setattr(one, name, held[1])
        setattr(other, name, held[0])


def is_leaf_tensor(tensor: torch.Tensor) -> bool:
    """Return True if no autograd node computed `tensor`.

    Returns False if reading `is_leaf` raises, as in torch 2.13 for one of several views that one call returned, once
    their base was written to.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Return True if hooks run on a tensor's gradient before it is accumulated. Relies on internals of torch 2.13."""
    return bool(tensor._backward_hooks)


def has_accumulation_hooks(tensor: torch.Tensor) -> bool:
    """Return True if hooks run once a leaf's gradient has been accumulated. Relies on internals of torch 2.13, present
    since 2.1.
    """
    return bool(tensor._post_accumulate_grad_hooks)


HOOK_TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a leaf with the hooks on its gradient: each is None, or a dict that autograd reads. Read in torch 2.13;
present since 2.1.
"""


def share_hooks(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Run the gradient hooks of `tensor` also on the gradient of `other`, a leaf like `tensor`. Relies on internals of
    torch 2.13, present since 2.1.
    """
    for name in HOOK_TABLES:
        if hooks := getattr(tensor, name):
            setattr(other, name, hooks)
