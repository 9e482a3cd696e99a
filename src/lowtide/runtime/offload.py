"""Offload of saved tensors to host memory until backward.

A storage is copied once, however many saved tensors it contains. It is copied on a separate stream, into pinned memory.
Its device memory is freed when the next storage is offloaded, or forward ends: by then the copy has had time to run in
parallel with other work. The copy back begins when backward reads the storage that was offloaded next, so that the copy
runs in parallel with that part of backward; the reader of a tensor waits for the event behind its copy.

Events alone order the two streams, and neither frees memory that the other may still use:

- out: the copy waits for all work queued when the tensor was saved; the memory is freed only after the computing stream
  waits for the copy, so that its next user comes after the copy.
- back: the memory comes from the computing stream, and the copy waits for all work queued there; readers wait for the
  copy, and memory that was never read is freed in the same way.

Tests run the same code on the CPU, with a copier of their own (`COPIERS`).
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide._torch.backward import backward_number
from lowtide._torch.tensors import get_storage_id, is_plain
from lowtide.runtime import saved_values as values
from lowtide.runtime.saved_fields import changed_in_place
from lowtide.runtime.saved_values import Value

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.runtime.saved_fields import Geometry
    from lowtide.runtime.saved_values import Handle


class Copier(Protocol):
    """Copier of bytes between one device and the host, in both directions. Each copy returns a token for `wait`."""

    def out(self, data: Tensor) -> tuple[Tensor, object]:
        """Start a copy of `data` to the host; return the host tensor and a token, with which `wait` awaits the copy."""

    def back(self, host: Tensor) -> tuple[Tensor, object]:
        """Start a copy of `host` to the device; return the device tensor and a token, with which `wait` awaits the
        copy.
        """

    def wait(self, token: object, data: Tensor) -> None:
        """Make later work in this thread's computing stream wait for the copy from or to `data`."""


class CudaCopier:
    """Copier that uses a stream next to the computing stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def out(self, data: Tensor) -> tuple[Tensor, object]:
        host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
        return host, self._copy(host, data)

    def back(self, host: Tensor) -> tuple[Tensor, object]:
        data = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        return data, self._copy(data, host)

    def _copy(self, to: Tensor, source: Tensor) -> tuple[torch.cuda.Event, torch.cuda.Stream]:
        computing = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(computing)
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
            return self.stream.record_event(), computing

    def wait(self, token: object, data: Tensor) -> None:
        assert isinstance(token, tuple)
        event, then = token
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(event)
        if computing != then:  # keeps the other stream from reusing its memory while this one reads it
            data.record_stream(computing)


COPIERS: dict[torch.device, Copier] = {}
"""Copiers by device, made on demand. Tests add one for the CPU, where offloading saves no memory."""
_one_at_a_time = threading.RLock()
"""Lock for offloaded storages, because backward may run in several threads."""
_Layout = tuple[torch.dtype, "Geometry"]


def find_copier(device: torch.device) -> Copier | None:
    """Return the copier for memory of `device`; None if offloading from it is not supported."""
    if device.type == "cuda" and device not in COPIERS:
        COPIERS[device] = CudaCopier(device)
    return COPIERS.get(device)


class OffloadedStorage:
    """One offloaded storage, in any state: being copied to the host, on the host, or being copied back."""

    __slots__ = (
        "__weakref__",
        "_back",
        "_before",
        "_copying",
        "_host",
        "_leaving",
        "_out",
        "_spoiled",
        "offloaded_values",
        "version",
    )

    def __init__(self, base: Tensor, copying: Copier, before: weakref.ref[OffloadedStorage] | None) -> None:
        self._copying = copying
        self._leaving: Tensor | None = None
        self._back: tuple[Tensor, object] | None = None
        self._spoiled = ""
        """Reason why the host copy may differ from the saved tensor; empty if there is none."""
        self.version = base._version
        self._host, self._out = copying.out(bytes_of(base))  # raises if host memory runs out
        self._leaving = base.detach()
        self._before = before
        """The storage that was offloaded before this one."""
        self.offloaded_values: list[tuple[weakref.ref[Value], _Layout]] = []
        """Values in this storage, each with its dtype and geometry."""

    def release_device_memory(self) -> None:
        """Release the device memory; its next user on the computing stream waits for the copy to the host."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            self._copying.wait(self._out, leaving)
            if leaving._version != self.version:
                self._spoiled = changed_in_place(leaving, self.version)

    def fetch(self) -> None:
        """Start the copy back to the device, unless it has started."""
        if self._back is None:
            self._back = self._copying.back(self._host)

    def bring_back(self) -> Tensor:
        """Wait for the copy back to the device, and return it as bytes.

        Values that still have to be read get views of it, and the copy back of the storage that was offloaded just
        before this one starts. Raises RuntimeError if the tensor was changed in place during its copy to the host.
        """
        self.release_device_memory()
        if self._spoiled:
            raise RuntimeError(self._spoiled)
        self.fetch()
        assert self._back is not None
        (data, token), self._back = self._back, None
        self._copying.wait(token, data)
        for reference, layout in self.offloaded_values:
            if (there := reference()) is not None:
                there.store_recomputed(make_view_in(data, layout))
        before = None if self._before is None else self._before()
        if before is not None and before.awaited():
            before.fetch()
        return data

    def awaited(self) -> bool:
        """Return True if a saved tensor in this storage has not been read yet in this backward pass."""
        there = (value for reference, _ in self.offloaded_values if (value := reference()) is not None)
        number = backward_number()
        return any(v.tensor is None and (v.last_backward != number or v.reads < v.readers) for v in there)

    def __del__(self) -> None:
        if self._back is not None:  # the copy back was never read
            data, token = self._back
            self._copying.wait(token, data)
        if self._leaving is not None:
            self._copying.wait(self._out, self._leaving)


class Offloaded:
    """Maker of an offloaded Value: it fetches the tensor from the host when backward reads it."""

    __slots__ = ("_layout", "_storage")

    operands: tuple[Handle, ...] = ()

    def __init__(self, storage: OffloadedStorage, layout: _Layout) -> None:
        self._storage, self._layout = storage, layout

    def make(self, value: Value) -> Tensor:
        """Return the tensor of `value`, once its storage is back on the device.

        Raises RuntimeError if the tensor was changed in place during the copy to the host.
        """
        with _one_at_a_time:
            if value.tensor is not None:  # another thread has fetched it in the meantime
                return value.tensor
            if values.observer is not None:
                values.observer.on_recompute_begin(self)
            data = self._storage.bring_back()
            tensor = make_view_in(data, self._layout)
            if values.observer is not None:
                values.observer.on_recompute_end(self, (tensor,))
            return tensor


def bytes_of(base: Tensor) -> Tensor:
    """Return the whole storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=base.device).set_(base.untyped_storage())


def make_view_in(data: Tensor, layout: _Layout) -> Tensor:
    """Return a tensor with this dtype and geometry, as a view of the bytes `data` of its storage."""
    dtype, (size, stride, offset) = layout
    return torch.empty(0, dtype=dtype, device=data.device).set_(data.untyped_storage(), offset, size, stride)


class OffloadQueue:
    """The offloaded storages of one forward pass, in order."""

    def __init__(self) -> None:
        self._leaving: OffloadedStorage | None = None
        self._before: weakref.ref[OffloadedStorage] | None = None
        self._known: dict[int, tuple[StorageWeakRef, weakref.ref[OffloadedStorage]]] = {}

    def enqueue(self, base: Tensor, value: Value) -> bool:
        """Offload `value`, which holds the tensor `base`; return False if the tensor or its device is not supported."""
        copying = find_copier(base.device)
        if copying is None or isinstance(base, torch.nn.Parameter) or not is_plain(base) or not get_storage_id(base):
            return False
        storage = self._find_offloaded_storage(base)
        if storage is None:
            self.close()
            storage = self._leaving = OffloadedStorage(base, copying, self._before)
            self._before = weakref.ref(storage)
            self._known[get_storage_id(base)] = StorageWeakRef(base.untyped_storage()), self._before  # type: ignore[no-untyped-call]
        layout = base.dtype, (base.size(), base.stride(), int(base.storage_offset()))
        storage.offloaded_values.append((weakref.ref(value), layout))
        value.tensor, value.version, value.maker = None, base._version, Offloaded(storage, layout)
        return True

    def _find_offloaded_storage(self, base: Tensor) -> OffloadedStorage | None:
        """Return the OffloadedStorage that contains `base`; None if there is none, or if `base` was written to since.

        A weak reference to the storage keeps its id from being reused.
        """
        known = self._known.get(get_storage_id(base))
        storage = None if known is None or known[0].expired() else known[1]()  # type: ignore[no-untyped-call]
        return storage if storage is not None and storage.version == base._version else None

    def close(self) -> None:
        """Release the device memory of the storage that was offloaded last."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.release_device_memory()
