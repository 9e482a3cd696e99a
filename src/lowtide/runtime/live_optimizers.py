"""The optimizers of a model: those passed as `optimizer=`, and those that are alive in the process."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from torch.optim import Optimizer

from lowtide._torch.optim import list_parameters
from lowtide._torch.tensors import find_parts
from lowtide.runtime.batch_tensors import collect_tensors
from lowtide.utils.live_objects import live_objects

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


Optimizers: TypeAlias = "Optimizer | Sequence[Optimizer] | None"
"""Values of `optimizer=`: one, several or none."""


def listed(optimizers: Optimizers) -> list[Optimizer]:
    """Return the optimizers passed as `optimizer=` as a list."""
    if optimizers is None:
        return []
    return list(optimizers) if isinstance(optimizers, tuple | list) else [optimizers]  # type: ignore[list-item]


def find_optimizers(model: nn.Module, named: Optimizers = None) -> list[Optimizer]:
    """Return the live optimizers that update parameters of `model`, including those in `named`.

    If one of them wraps another one, only the optimizer that owns the state is returned.
    """
    known = listed(named)
    optimizers = _find_live_optimizers(model, known)
    if any(all(optimizer is not each for each in known) for optimizer in optimizers):
        optimizers.clear()
        gc.collect()  # an unused optimizer may be in a cycle with its scheduler
        optimizers = _find_live_optimizers(model, known)
    return optimizers


def _find_live_optimizers(model: nn.Module, known: Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers of `model` among `known` and all live ones, also unreachable ones that Python has not
    collected yet.
    """
    optimizers: dict[int, Optimizer] = {}
    for optimizer in [*known, *live_objects(Optimizer)]:
        if is_of(model, optimizer) and (id(optimizer.state) not in optimizers or "state" in vars(optimizer)):
            optimizers[id(optimizer.state)] = optimizer
    return list(optimizers.values())


def is_of(model: nn.Module, optimizer: Optimizer) -> bool:
    """Return True if the optimizer updates parameters of the model."""
    mine = {id(p) for p in model.parameters()}
    return any(id(p) in mine for p in list_parameters(optimizer))


def state_bytes(optimizers: Iterable[Optimizer], device: torch.device) -> int:
    """Return the bytes of optimizer state on a device, without parameters and gradients that the state refers to."""
    optimizers = [*optimizers]
    updated = [tensor for o in optimizers for p in list_parameters(o) for tensor in (p, p.grad) if tensor is not None]
    counted = _measure_storages(updated, device)
    state = _measure_storages(list_optimizer_state(optimizers), device)
    return sum(n_bytes for address, n_bytes in state.items() if address not in counted)


def count_missing_state(optimizers: Iterable[Optimizer], device: torch.device) -> tuple[int, int]:
    """Count the parameters on `device` that an optimizer has not updated so far, although it has updated others of
    their group; return their number, and the bytes of state on `device` to expect for them.

    The expected state of a parameter has the form of the state of an updated parameter in the same group.
    """
    n = total = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            known = next(
                ((p, found) for p in group["params"] if (found := collect_tensors(optimizer.state.get(p)))), None
            )
            if known is None:
                continue
            for p in group["params"]:
                if p.requires_grad and p.device == device and not optimizer.state.get(p):
                    n += 1
                    total += sum(_scale_bytes(entry, known[0], p) for entry in known[1] if entry.device == device)
    return n, total


def _scale_bytes(entry: Tensor, known: Tensor, other: Tensor) -> int:
    """Return the bytes that a state tensor of the parameter `other` would have, judged by `entry`, a state tensor of
    `known`. A tensor shaped like its parameter grows with it.
    """
    return entry.element_size() * other.numel() if entry.shape == known.shape else entry.nbytes


def _measure_storages(tensors: Iterable[Tensor], device: torch.device) -> dict[int, int]:
    """Return the sizes of the tensors' storages on a device, by address."""
    parts = (part for tensor in tensors for part in find_parts(tensor) if part.device == device)
    return {storage.data_ptr(): storage.nbytes() for storage in (part.untyped_storage() for part in parts)}


def list_optimizer_state(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the tensors in the optimizers' state."""
    return [tensor for o in optimizers for entry in o.state.values() for tensor in collect_tensors(entry)]
