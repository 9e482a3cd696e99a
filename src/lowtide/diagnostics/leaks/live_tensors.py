"""All living tensors, modules and optimizers, and the owners of the tensors' memory."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer

from lowtide._torch.fake_modes import FakeTensor
from lowtide._torch.tensors import storage_id
from lowtide.utils.live_objects import LiveObjectFinder

_finder = LiveObjectFinder(Tensor, nn.Module, Optimizer)


def storage_bytes(tensor: Tensor) -> int:
    """Return the size in bytes of the whole storage of a tensor."""
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return 0


def arrays_over(tensors: dict[int, int]) -> list[tuple[int, Any]]:
    """Return the NumPy arrays in the memory of `tensors` (id -> number), and those that have them as elements, each
    with the number of its tensor.

    The garbage collector does not track arrays: they are found through the objects that refer to them.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None or not tensors:
        return []
    arrays: dict[int, Any] = {}
    for obj in gc.get_objects():
        referents = gc.get_referents(obj)
        if numpy.ndarray in map(type, referents):
            arrays |= {id(array): array for array in referents if type(array) is numpy.ndarray}
    pairs: list[tuple[int, Any]] = []
    for array in arrays.values():
        base = array
        while type(base) is numpy.ndarray:
            base = base.base
        if base is not array and id(base) in tensors:
            pairs.append((tensors[id(base)], array))
        elif array.dtype == object:
            pairs += [(tensors[id(element)], array) for element in array.flat if id(element) in tensors]
    return pairs


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer updates."""
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]


def standing_storages(owner: nn.Module | Optimizer) -> dict[int, int]:
    """Return the storages of a module's parameters, gradients and buffers, or of an optimizer's state, with their
    bytes.
    """
    if isinstance(owner, nn.Module):
        tensors = [*owner.parameters(), *owner.buffers()]
        tensors += [parameter.grad for parameter in owner.parameters() if parameter.grad is not None]
    else:
        states = [state for state in getattr(owner, "state", {}).values() if isinstance(state, dict)]
        tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return {storage_id(tensor): storage_bytes(tensor) for tensor in tensors}


class LiveObjects:
    """Snapshot of all living objects. Valid until user code continues; refers to tensors through `tensors` only."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.modules: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        objects: list[Any] = _finder.find()
        for obj in objects:
            kind = type(obj)
            if not issubclass(kind, Tensor):
                (self.modules if issubclass(kind, nn.Module) else self.optimizers).append(obj)
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
            states = list(getattr(optimizer, "state", {}).values())
            self._record_permanent(t for state in states if isinstance(state, dict) for t in state.values())
            self._record_permanent(parameters_of(optimizer))

    def _record_permanent(self, tensors: Iterable[object]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self.standing.add(storage_id(tensor))
                if tensor.is_leaf and tensor.grad is not None:
                    self.standing.add(storage_id(tensor.grad))


class KnownStorages:
    """Time at which each storage was first seen. Weak references notice when a storage is freed and its number is
    reused.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}

    def note(self, tensors: Iterable[Tensor], when: int) -> None:
        """Record that the storages of these tensors exist at time `when`."""
        self._seen = {number: entry for number, entry in self._seen.items() if entry[0]() is not None}
        for tensor in tensors:
            number = storage_id(tensor)
            if number and number not in self._seen:
                self._seen[number] = (weakref.ref(tensor.untyped_storage()), when)

    def since(self, number: int) -> int | None:
        """Return when storage `number` was first seen; None if never."""
        entry = self._seen.get(number)
        return None if entry is None or entry[0]() is None else entry[1]
