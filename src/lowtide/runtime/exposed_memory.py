"""Memory that code can write to without a new version of the tensors that a recompute or replay reads again.

A tensor's version counts writes through the tensor, its views and `detach()`; not writes through `tensor.data`, which
has a version of its own, nor through a NumPy array. In-place methods are intercepted anyway (`inplace_methods.py`). For
all other writers (`out=`, `torch.ops`, functions that were looked up earlier, NumPy) a checksum of exposed memory is
taken, and compared before the memory is read again.
"""

from __future__ import annotations

import ctypes
import weakref
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import torch

from lowtide._torch.fake_modes import is_fake
from lowtide._torch.tensors import get_storage_id, get_storage_number, is_plain

if TYPE_CHECKING:
    from torch import Tensor

EXPOSED: Final = -3
"""Marker, in place of a tensor's version, for a kept tensor whose contents are compared before they are read again."""

LARGEST_BYTES: Final = 2**20
"""Largest size in bytes of a CPU tensor whose checksum covers all its memory; of a larger one, sixteen parts."""

n_exposures = 0
"""Number of times that memory was exposed, or an alias of it was freed. The set of exposed tensors is the same as long
as this number is.
"""

_aliases: dict[int, weakref.ref[Tensor]] = {}
"""By `id`, the tensors that `tensor.data` has returned for leaves, while they are alive."""
n_aliases: Counter[int] = Counter()
"""Number of tensors in `_aliases` for each storage."""


class Contents:
    """Version and checksum of a tensor, recorded to detect later writes to it."""

    __slots__ = ("_sum", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.version, self._sum = tensor._version, _compute_checksum(tensor)

    def are_in(self, tensor: Tensor) -> bool:
        """Return True if `tensor` has the recorded version and checksum."""
        return tensor._version == self.version and bool(self._sum == _compute_checksum(tensor))


def note_alias(data: Tensor) -> None:
    """Record the memory of `data`, which `tensor.data` has returned, as exposed while `data` is alive."""
    global n_exposures
    key, storage = id(data), get_storage_id(data)

    def forget(_: object) -> None:
        global n_exposures
        n_exposures += 1
        del _aliases[key]
        n_aliases[storage] -= 1
        if not n_aliases[storage]:
            del n_aliases[storage]

    n_exposures += 1
    _aliases[key] = weakref.ref(data, forget)
    n_aliases[storage] += 1


def note_array() -> None:
    """Record that a NumPy array was made of some tensor's memory, so that tensors are checked for such arrays again."""
    global n_exposures
    n_exposures += 1


def is_exposed(tensor: Tensor) -> bool:
    """Return True if code may write to the tensor through a NumPy array, or through a tensor that `.data` returned.

    The check for arrays is whether the storage can be resized: in torch 2.13 a storage that shares its memory with a
    NumPy array can't be.
    """
    try:
        storage = tensor.untyped_storage()
    except RuntimeError:  # sparse
        return False
    if not storage.resizable():
        return tensor.device.type == "cpu" and is_plain(tensor)
    return bool(n_aliases) and get_storage_number(storage) in n_aliases


def _compute_checksum(tensor: Tensor) -> Any:
    """Return a checksum of the tensor's memory; 0 if the memory can't be read. On a GPU the checksum is a tensor, so
    that the host need not wait.
    """
    if not tensor.numel() or is_fake(tensor) or tensor.is_meta or not is_plain(tensor):
        return 0
    if tensor.device.type != "cpu":
        return tensor.detach().contiguous().view(-1).view(torch.uint8).sum()
    n_bytes = (1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.itemsize
    memory = memoryview((ctypes.c_ubyte * n_bytes).from_address(tensor.data_ptr()))
    if n_bytes <= LARGEST_BYTES:
        return zlib.crc32(memory)
    part, total = LARGEST_BYTES // 16, 0
    for n in range(16):
        begin = (n_bytes - part) * n // 15
        total = zlib.crc32(memory[begin : begin + part], total)
    return total
