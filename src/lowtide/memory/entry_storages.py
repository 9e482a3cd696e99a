"""Find the storages that exist in CPU memory when a recording begins, with their bytes, so that frees are noticed.

The profiler does not report the free of a block that it did not see allocated (see `cpu_recorder.py`). A weak
reference to a storage reports its end; so the existing storages must be found first.
"""

import bisect
import contextlib
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lowtide._torch.autograd_graph import find_nodes_behind
from lowtide._torch.cpu_profiler import PROFILERS
from lowtide._torch.nodes import raw_saved
from lowtide._torch.tensors import find_parts, is_leaf_tensor
from lowtide.utils.live_objects import LiveObjectFinder

_MEMORY_FILES = ("/dev/shm/", "/memfd:", "/dev/zero", "/SYSV")
"""Paths of mapped files that are memory, not files on a disk: shared memory of processes."""

_finder = LiveObjectFinder(Tensor, torch.jit.ScriptModule, *PROFILERS)

_excluded: weakref.WeakValueDictionary[int, UntypedStorage] = weakref.WeakValueDictionary()
"""Storages, by address, of copies that a rehearsal holds and that are not the program's own."""


def exclude_from_entry(copy: Tensor) -> Tensor:
    """Mark `copy`, a temporary tensor of Lowtide, not to count as existing when a recording begins; return `copy`."""
    for part in find_parts(copy):
        if part.device.type == "cpu":
            _excluded[part.untyped_storage().data_ptr()] = part.untyped_storage()
    return copy


def is_excluded(storage: UntypedStorage) -> bool:
    """Return True if `storage` does not count as existing when a recording begins."""
    return _excluded.get(storage.data_ptr()) is not None


def collect_storages(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
    """Yield the storages of `tensors` that torch's CPU allocator owns, each once.

    Left out: storages of other devices, empty ones, and memory that torch only borrows (NumPy, mapped files) or shares
    with other processes.
    """
    return (storage for storage in _find_host_storages(tensors) if storage.resizable() and not storage.is_shared())


def bytes_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage of `tensors` in host memory, by address.

    Memory that torch borrows or shares is included. Mapped files on a disk and excluded storages are not.
    """
    borrowed: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for storage in _find_host_storages(tensors):
        if not is_excluded(storage):
            (sizes if storage.resizable() else borrowed)[storage.data_ptr()] = storage.nbytes()
    files = _find_mapped_files() if borrowed else []
    sizes.update((where, n_bytes) for where, n_bytes in borrowed.items() if not _is_inside(where, files))
    return sizes


def find_existing_tensors() -> Iterator[Tensor]:
    """Yield every tensor that Python holds, their gradients, and the saved tensors of the autograd graphs behind them.

    Parts of sparse tensors and parameters of TorchScript are included. Not found: other tensors that only C++ holds,
    and objects that `gc.freeze` has hidden.
    """
    held, scripts, _ = _living()
    yield from held
    for script in scripts:
        with contextlib.suppress(Exception):  # a module whose constructor still runs
            yield from (*script.parameters(), *script.buffers())
    yield from (leaf.grad for leaf in held if _is_leaf(leaf) and leaf.grad is not None)
    yield from find_saved_behind(held)


def find_living_tensors() -> list[Tensor]:
    """Return every tensor that Python holds. Soon after another search, only newer objects are searched."""
    return _living()[0]


def find_living_profilers() -> list[Any]:
    """Return torch's profiler objects that Python holds. Soon after another search, only newer ones are searched."""
    return _living()[2]


def _living() -> tuple[list[Tensor], list[torch.jit.ScriptModule], list[Any]]:
    tensors: list[Tensor] = []
    scripts: list[torch.jit.ScriptModule] = []
    profilers: list[Any] = []
    objects: list[Any] = _finder.find()
    for obj in objects:
        kind = type(obj)
        is_script = issubclass(kind, torch.jit.ScriptModule)
        (tensors if issubclass(kind, Tensor) else scripts if is_script else profilers).append(obj)
    return tensors, scripts, profilers


def _find_host_storages(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
    """Yield the nonempty storages of `tensors` in host memory, each once."""
    visited: set[int] = set()
    for tensor in tensors:
        try:
            for part in find_parts(tensor):
                storage = part.untyped_storage()
                is_there = storage.device.type == "cpu" and storage.nbytes()
                if is_there and (address := storage.data_ptr()) and address not in visited:
                    visited.add(address)
                    yield storage
        except (RuntimeError, TypeError):
            # a fake or wrapped tensor, or one internal to a graph, has no storage
            continue


def _find_mapped_files() -> list[tuple[int, int]]:
    """Return the address ranges of memory-mapped disk files as sorted (start, end) pairs; `end` is exclusive."""
    with contextlib.suppress(OSError):  # not on Linux
        rows = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
        places = (row[0].split("-") for row in rows if len(row) == 6 and row[5][0] == "/" and not _is_memory(row[5]))
        return sorted((int(start, 16), int(end, 16)) for start, end in places)
    return []


def _is_memory(path: str) -> bool:
    return path.startswith(_MEMORY_FILES)


def _is_inside(address: int, places: list[tuple[int, int]]) -> bool:
    at = bisect.bisect_right(places, address, key=lambda place: place[0]) - 1
    return at >= 0 and address < places[at][1]


def find_saved_behind(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the saved tensors of the autograd graphs behind `tensors`."""
    for node in find_nodes_behind(tensors):
        yield from (saved for saved in raw_saved(node) if isinstance(saved, Tensor))


def _is_leaf(tensor: Tensor) -> bool:
    return is_leaf_tensor(tensor) and tensor.requires_grad
