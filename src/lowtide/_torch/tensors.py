"""Private names of torch: tensors and their storage."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    pass
from lowtide._torch.fake_modes import FakeTensor

base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
"""Return the tensor that a view was taken of, through any number of views; None for no view. 2.13."""


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is just a strided piece of memory: no subclass with a will of its own, not sparse. 2.13."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that have the memory: those inside of a sparse or nested one or of another wrapper, else itself."""
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(part := getattr(tensor, name), torch.Tensor):  # a DTensor names its mesh, too
                yield from parts_of(part)
    else:
        yield tensor


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Let `tensor._version` be this number, as if it had been changed in place so many times. 2.13, since 2.6."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def storage_number(storage: torch.UntypedStorage) -> int:
    """The same number for all Python objects of one storage, while it lives. 2.13."""
    return int(storage._cdata)


def storage_id(tensor: torch.Tensor) -> int:
    """The same number for tensors that share memory, while one of them lives; 0 for those without a storage. 2.13."""
    try:
        return storage_number(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse tensors
        return 0


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors of a shape begin at one place of one storage."""
    if one.shape != other.shape or not storage_id(one) or storage_id(one) != storage_id(other):
        return False
    return one.storage_offset() == other.storage_offset()


class WeakStorage:
    """A tensor's memory, without holding it. 2.13: a storage's Python object, once made, counts as one owner."""

    __slots__ = ("_reference", "address")

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.address = storage.data_ptr()

    def owners(self) -> int:
        """How many tensors of C++ have this memory; 0 when it is gone."""
        return max(0, int(torch._C._storage_Use_Count(self._reference.cdata)) - 1)


def has_one_owner(tensor: torch.Tensor) -> bool:
    """Whether nothing but this one tensor object refers to its memory: no view, no other graph. 2.13.

    The memory's Python object counts as well.
    """
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == 2 and tensor._use_count() == 1)  # type: ignore[attr-defined]


def references(things: tuple[Any, ...]) -> tuple[int, ...]:
    """How many refer to the first of these, a tensor, and to its memory: to be compared with another call's. 2.13.

    The last is an object that nobody else has. Whoever refers to all of them alike, as callers do whose frames somebody
    traces or evaluates (Dynamo, debuggers), is not counted. No variable here has any of them, for these are looked at.
    """
    return (
        things[0]._use_count(),
        sys.getrefcount(things[0]) - sys.getrefcount(things[-1]),
        torch._C._storage_Use_Count(things[0].untyped_storage()._cdata),
        sys.getrefcount(things[0].untyped_storage()),
    )


def held_by_python(tensors: Sequence[Any], index: int, known: int) -> bool:
    """Whether Python refers to the tensor `tensors[index]` beside `known` references; False where only C++ does. 2.13.

    The object of Python stays with its C++ tensor, which owns one reference to it while it has other owners.
    """
    owners = int(tensors[index]._use_count())
    # An item, not a variable: since Python 3.14 a call may borrow the reference that a variable has.
    return sys.getrefcount(tensors[index]) - 1 - known - (owners > 1) > 0


def as_kind(kind: type[Any], tensor: torch.Tensor) -> Any:
    """A tensor of that subclass with the memory of `tensor`, which may require no gradient. 2.13, since 1.0."""
    return torch.Tensor._make_subclass(kind, tensor)


DEVICE = vars(torch._C.TensorBase)["device"].__get__
"""What `tensor.device` calls. 2.13."""
SET_DATA = vars(torch._C.TensorBase)["data"].__set__
"""What `tensor.data = other` calls. 2.13."""
IS_CUDA = vars(torch._C.TensorBase)["is_cuda"].__get__
"""What `tensor.is_cuda` calls. 2.13."""
PAD_PACKED = torch._VF._pad_packed_sequence
"""What `pad_packed_sequence` calls. 2.13."""
PARSE_TO = torch._C._nn._parse_to
"""What `module.to` reads its arguments with. 2.13."""
SET_REQUIRES_GRAD = vars(torch._C.TensorBase)["requires_grad"].__set__
"""What `tensor.requires_grad = True` calls. 2.13."""


def wrapper(kind: type[Any], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of that subclass, shape, dtype and device, which has no memory. 2.13, since 1.11."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Two tensors change places, each Python object keeping its identity. Neither may be held by a graph. 2.13.

    `torch.utils.swap_tensors`, which refuses tensors with weak references, as recurrent layers have to their weights.
    """
    torch._C._swap_tensor_impl(one, other)
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__


def is_leaf_tensor(tensor: torch.Tensor) -> bool:
    """Return True if no autograd node computed `tensor`.

    False for one of several views that one call returned, once its base was written to: asking it raises. 2.13.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks run on a tensor's gradient before it is accumulated. 2.13."""
    return bool(tensor._backward_hooks)


def has_accumulation_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks run once a leaf's gradient has been accumulated. 2.13, since 2.1."""
    return bool(tensor._post_accumulate_grad_hooks)


def share_hooks(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """`other`, a leaf like `tensor`, runs the same hooks on its gradient. 2.13, since 2.1."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if hooks := getattr(tensor, name):
            setattr(other, name, hooks)
