"""Identity of the model and batch that a profile is made for, and memory in use before the step begins."""

from __future__ import annotations

import copy
import gc
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lowtide._torch.compiled_code import is_compiled
from lowtide._torch.pytree import tree_leaves, tree_map
from lowtide._torch.tensors import parts_of
from lowtide.errors import StalePlan
from lowtide.memory import lbfgs_history as histories
from lowtide.planner.records import Fingerprint, Static
from lowtide.utils.live_objects import live_objects

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn


def fingerprint(model: nn.Module, batch: Any) -> Fingerprint:
    """Return the identity of a model, the shapes of its batch and its device."""
    return Fingerprint(
        torch=torch.__version__.partition("+")[0],
        model=model_signature(model),
        batch=in_words(tensors_in(batch)),
        device=device_of(model),
    )


ANY = object()
"""Placeholder for a batch of any size."""


def check_made_for(
    made: Fingerprint, model: nn.Module, batch: Any = ANY, *, device: str | None = None, what: str = "plan"
) -> None:
    """Raise StalePlan if a plan or profile was made for another model or another size of batch.

    `device` is the device type to compare with, if not the model's own.
    """
    found = fingerprint(model, batch)
    found = replace(found, batch=made.batch if batch is ANY else found.batch, device=device or found.device)
    if differences := made.differences(found):
        name = type(model).__name__ if batch is ANY else f"{type(model).__name__} and batch"
        again = "rehearse again" if what == "profile" else "rehearse and plan again"
        raise StalePlan(f"this {what} is not for this {name}: {again}.", differences=differences)


def in_words(tensors: Iterable[Tensor]) -> str:
    """Format shapes and dtypes: `[8, 1024] int64, [8, 1024] bool`."""
    return ", ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)


def model_signature(model: nn.Module) -> str:
    """Return the model's class, a hash, and the number of compiled modules.

    The hash covers the modules' paths and classes, which of them are compiled, and the parameters' names, shapes,
    dtypes and `requires_grad`.
    """
    compiled = [path for path, module in model.named_modules() if is_compiled(module)]
    lines = [f"{path} {type(module).__qualname__}" for path, module in model.named_modules()]
    lines += [f"{name} {list(p.shape)} {p.dtype} {p.requires_grad}" for name, p in model.named_parameters()]
    lines += [f"{path} compiled" for path in compiled]
    digest = hashlib.blake2b(chr(10).join(lines).encode(), digest_size=8).hexdigest()
    return f"{type(model).__name__} {digest}" + (f" ({len(compiled)} compiled)" if compiled else "")


def device_of(model: nn.Module) -> str:
    """Return the type of the device that the model's first parameter is on, for which a plan is made."""
    return place_of(model).type


def place_of(model: nn.Module) -> torch.device:
    """Return the device itself, such as `cuda:1`, where memory and time are measured; it may not be current."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in a batch or a step's result: in nested lists, tuples, mappings and objects' attributes."""
    found: list[Tensor] = []
    seen: dict[int, Any] = {}
    pending = tree_leaves(tree)[::-1]
    while pending:  # a recursive closure would hold its results until garbage is collected
        leaf = pending.pop()
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif id(leaf) not in seen and not isinstance(leaf, _NO_BATCH):
            seen[id(leaf)] = leaf
            inside = list(leaf.values()) if isinstance(leaf, Mapping) else [*getattr(leaf, "__dict__", {}).values()]
            pending += tree_leaves(inside)[::-1]
    return found


def with_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a batch with each tensor replaced by `change(tensor)`; `tree` itself stays unchanged."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        inside = tensors_in(leaf)
        return copy.deepcopy(leaf, {id(tensor): change(tensor) for tensor in inside}) if inside else leaf

    return tree_map(changed, tree)


_NO_BATCH = (str, bytes, int, float, type(None), type, ModuleType, FunctionType, MethodType, torch.nn.Module)


def static_bytes(model: nn.Module, batch: Any, optimizers: Iterable[Optimizer]) -> tuple[Static, frozenset[int]]:
    """Return the bytes on the model's device that belong to the step before it begins, and all storage addresses.

    Each storage counts once. A batch that the step itself moves there, and Adam's step counters, are in host memory.
    Everything else that the optimizers update counts like the model. Gradients include DistributedDataParallel's
    buckets, also those of other models: no Python object holds them.
    """
    optimizers, there = list(optimizers), place_of(model)
    # Without a process group none has buckets, and the search takes its time.
    in_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    wrappers = live_objects(DistributedDataParallel) if in_group else []
    updated = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    trained = [*model.parameters(), *updated]
    seen: set[int] = set()

    def add(tensors: Iterable[Tensor | None]) -> int:
        total = 0
        for tensor in tensors:
            if tensor is None or tensor.device.type == "meta" or is_lazy(tensor):
                continue
            for part in parts_of(tensor):
                storage = part.untyped_storage()
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    total += storage.nbytes() if part.device == there else 0
        return total

    parameters = add(trained)
    buffers = add(model.buffers())
    inputs = add(tensors_in(batch))
    gradients = add(p.grad for p in trained) + sum(
        _bucket_bytes(wrapper) for wrapper in wrappers if place_of(wrapper) == there
    )
    state = add(_state(optimizers))
    growing = [o for o in optimizers if isinstance(o, torch.optim.LBFGS)]
    state += sum(add(histories.tensors_of(o)) + histories.missing_history_bytes(o) for o in growing)
    static = Static(parameters=parameters, gradients=gradients, optimizer=state, buffers=buffers, inputs=inputs)
    return static, frozenset(seen - {0})


Optimizers: TypeAlias = "Optimizer | Sequence[Optimizer] | None"
"""Values of `optimizer=`: one, several or none."""


def listed(optimizers: Optimizers) -> list[Optimizer]:
    """Return the optimizers passed as `optimizer=` as a list."""
    if optimizers is None:
        return []
    return list(optimizers) if isinstance(optimizers, tuple | list) else [optimizers]  # type: ignore[list-item]


def optimizers_of(model: nn.Module, named: Optimizers = None) -> list[Optimizer]:
    """Return live optimizers with parameters of `model`; of a wrapper and its inner one, the one with the state."""
    gc.collect()  # an unused optimizer may be in a cycle with its scheduler
    found: dict[int, Optimizer] = {}
    for optimizer in [*listed(named), *live_objects(Optimizer)]:
        if is_of(model, optimizer) and (id(optimizer.state) not in found or "state" in vars(optimizer)):
            found[id(optimizer.state)] = optimizer
    return list(found.values())


def is_of(model: nn.Module, optimizer: Optimizer) -> bool:
    """Return True if the optimizer updates parameters of the model."""
    mine = {id(p) for p in model.parameters()}
    return any(id(p) in mine for p in updated_by(optimizer))


def updated_by(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors that the optimizer updates; none while it is being constructed."""
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def state_bytes(optimizers: Iterable[Optimizer], device: torch.device) -> int:
    """Return the bytes of optimizer state for parameters on a device."""
    parts = [part for tensor in _state(optimizers) for part in parts_of(tensor) if part.device == device]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (part.untyped_storage() for part in parts)}
    return sum(storages.values())


def _state(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    return [tensor for o in optimizers for entry in o.state.values() for tensor in tensors_in(entry)]


def _bucket_bytes(wrapper: DistributedDataParallel) -> int:
    """Return the bytes of the buckets in which gradients are sent, except those of which gradients are views."""
    model: nn.Module = wrapper.module
    sent = (p for name, p in model.named_parameters() if p.requires_grad and name not in wrapper.parameters_to_ignore)
    return sum(p.nbytes for p in sent if p.grad is None or not wrapper.gradient_as_bucket_view)
