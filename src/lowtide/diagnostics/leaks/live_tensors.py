"""All live tensors, modules and optimizers, and NumPy arrays that share the tensors' memory."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lowtide._torch.fake_modes import FakeTensor
from lowtide._torch.optim import list_parameters
from lowtide._torch.tensors import get_storage_id
from lowtide.diagnostics.leaks.call_log import collect_tensors
from lowtide.diagnostics.leaks.reference_path import is_array_of_objects
from lowtide.utils.live_objects import LiveObjectFinder

_finder = LiveObjectFinder(Tensor, nn.Module, Optimizer, Dataset, DataLoader)


def storage_bytes(tensor: Tensor) -> int:
    """Return the size in bytes of the whole storage of a tensor; 0 if it has no storage."""
    try:
        return tensor.untyped_storage().nbytes()
    except RuntimeError:
        return 0


def find_live_arrays() -> tuple[list[Any], list[Any]]:
    """Return all NumPy arrays, and all objects with references to arrays that `gc.get_referrers` does not find.

    The garbage collector tracks neither arrays nor dicts and tuples that contain only untracked objects.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return [], []
    arrays: dict[int, Any] = {}
    untracked: dict[int, Any] = {}
    pending = gc.get_objects()
    while pending:
        referents = [gc.get_referents(obj) for obj in pending]
        pending = []
        for obj in chain.from_iterable(referents):
            if type(obj) is numpy.ndarray:
                arrays[id(obj)] = obj
            elif type(obj) in (dict, tuple) and not gc.is_tracked(obj) and id(obj) not in untracked:
                untracked[id(obj)] = obj
                pending.append(obj)
    unseen = [obj for obj in untracked.values() if not arrays.keys().isdisjoint(map(id, gc.get_referents(obj)))]
    return list(arrays.values()), unseen + [array for array in arrays.values() if is_array_of_objects(array)]


def find_live_tasks() -> list[Any]:
    """Return all asyncio tasks. They refer to their results, but `gc.get_referrers` does not find them."""
    asyncio = sys.modules.get("_asyncio")
    return [] if asyncio is None else [obj for obj in gc.get_objects() if type(obj) is asyncio.Task]


def find_arrays_over(tensors: dict[int, int], arrays: Iterable[Any]) -> list[tuple[int, Any]]:
    """Return pairs of a tensor's number and a NumPy array in its memory. `tensors` maps ids of tensors to numbers."""
    pairs: list[tuple[int, Any]] = []
    for array in arrays:
        base = array
        while type(base) is type(array):
            base = base.base
        if id(base) in tensors:
            pairs.append((tensors[id(base)], array))
    return pairs


def state_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state, including tensors in lists, which LBFGS has."""
    for state in getattr(optimizer, "state", {}).values():
        yield from collect_tensors(state)


def map_standing_storages(owner: nn.Module | Optimizer) -> dict[int, int]:
    """Map the storages of a module's parameters, gradients and buffers, or of an optimizer's state, to their bytes."""
    if isinstance(owner, nn.Module):
        tensors = [*owner.parameters(), *owner.buffers()]
        tensors += [parameter.grad for parameter in owner.parameters() if parameter.grad is not None]
    else:
        tensors = list(state_of(owner))
    return {get_storage_id(tensor): storage_bytes(tensor) for tensor in tensors}


class LiveObjects:
    """Snapshot of all live tensors, modules, optimizers and data sets. Valid only until user code continues.

    Only the list `tensors` refers to tensors.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.modules: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.datasets: list[Any] = []
        objects: list[Any] = _finder.find()
        for obj in objects:
            kind = type(obj)
            if issubclass(kind, nn.Module):
                self.modules.append(obj)
            elif issubclass(kind, Optimizer):
                self.optimizers.append(obj)
            elif not issubclass(kind, Tensor):
                self.datasets.append(obj.dataset if issubclass(kind, DataLoader) else obj)
            elif not issubclass(kind, FakeTensor):
                self.tensors.append(obj)
        self.standing: set[int] = set()
        """Storages of parameters, gradients, buffers and optimizer state."""
        self.buffers: dict[int, str] = {}
        """Ids of tensors that are buffers of a module -> their names."""
        parameters = (p for m in self.modules for p in m.__dict__.get("_parameters", {}).values())
        leaves = [t for t in self.tensors if isinstance(t, nn.Parameter)]
        self._record_permanent(t for group in (parameters, leaves) for t in group)
        for module in self.modules:
            buffers = {name: b for name, b in module.__dict__.get("_buffers", {}).items() if b is not None}
            self._record_permanent(buffers.values())
            self.buffers |= {id(buffer): f"{type(module).__name__}.{name}" for name, buffer in buffers.items()}
        for optimizer in self.optimizers:
            self._record_permanent(state_of(optimizer))
            self._record_permanent(list_parameters(optimizer))

    @property
    def ids(self) -> set[int]:
        """Ids of the snapshot's own lists, which do not count as holders of tensors."""
        return {id(self.tensors), id(self.modules), id(self.optimizers), id(self.datasets)}

    @property
    def n_samples(self) -> int:
        """Length of the largest data set that has a length; 0 if none has."""
        lengths = [0]
        for dataset in self.datasets:
            with suppress(Exception):  # an endless data set, or any error of the user's own `__len__`
                lengths.append(len(dataset))
        return max(lengths)

    def _record_permanent(self, tensors: Iterable[object]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self.standing.add(get_storage_id(tensor))
                if tensor.is_leaf and tensor.grad is not None:
                    self.standing.add(get_storage_id(tensor.grad))


class KnownStorages:
    """Record of the step in which each storage was first seen.

    It holds weak references, because the number of a freed storage may be used again by another one.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}

    def note(self, tensors: Iterable[Tensor], when: int) -> None:
        """Record step `when` for the storages of `tensors` that were not seen before."""
        self._seen = {number: entry for number, entry in self._seen.items() if entry[0]() is not None}
        for tensor in tensors:
            number = get_storage_id(tensor)
            if number and number not in self._seen:
                self._seen[number] = (weakref.ref(tensor.untyped_storage()), when)

    def since(self, number: int) -> int | None:
        """Return the step in which storage `number` was first seen; None if it was never seen."""
        entry = self._seen.get(number)
        return None if entry is None or entry[0]() is None else entry[1]
