"""Estimate steps of models that are sharded over processes: FSDP2 (`fully_shard`), HSDP, tensor parallel.

torch's own code shards, gathers and reduces fake tensors; nothing is sent. Its operators reveal all memory in use, with
one exception: FSDP2 frees and allocates gathered parameters by resizing their storages.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn
from unittest.mock import patch

import torch

from lowtide._torch.distributed import find_ring_attention, is_replicated, meshes_on, sharding_without_modes
from lowtide._torch.fsdp import (
    ShardGroup,
    find_shard_groups,
    list_device_attributes,
    observe_resizes,
    report_purposes,
)
from lowtide.errors import RehearsalError
from lowtide.estimator.collectives import replacements
from lowtide.estimator.values.known_values import value
from lowtide.runtime.fsdp_scopes import find_units
from lowtide.state.process_group import check_at_rest, several_processes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from lowtide.estimator.allocation_tracker import AllocationTracker


FSDP1 = (
    "the model is wrapped in FullyShardedDataParallel (FSDP1), which is not estimated.\n  Shard it with "
    "torch.distributed.fsdp.fully_shard (FSDP2)."
)


REPLICATED = (
    "the model is replicated by torch.distributed._composable.replicate, which is not estimated: it makes its buckets "
    "in the first forward.\n  Wrap the model in DistributedDataParallel instead."
)


SYMMETRIC = (
    "the model gathers in symmetric memory (set_symm_mem_for_comm), which is not torch's allocator's and can't be "
    "estimated.\n  Estimate without it: it comes on top of the answer."
)


@contextlib.contextmanager
def sharding(modules: Iterable[Any], tracker: AllocationTracker) -> Iterator[None]:
    """Make collectives send nothing in this block, and track the allocations of FSDP2 units among `modules`.

    Raises RehearsalError for sharding that can't be estimated, and for units that are in the middle of a step.
    """
    modules = tuple(module for module in modules if isinstance(module, torch.nn.Module))
    check_estimated(modules)
    groups = list(_find_groups(modules))
    check_at_rest(groups)
    del modules  # so that a module that the program drops is freed
    with contextlib.ExitStack() as stack:
        if several_processes():
            for owner, name, function in replacements():
                stack.enter_context(patch.object(owner, name, function))
        stack.enter_context(sharding_without_modes(value))
        if (ring := find_ring_attention()) is not None:
            for name in ring[1]:
                stack.enter_context(patch.object(ring[0], name, _refuse_rings))
        if groups:
            for group in groups:
                stack.callback(group.drop_gathered())
            stack.enter_context(observe_resizes(tracker.ledger.resized, (tracker.device, "meta")))
            stack.enter_context(report_purposes(tracker.ledger.purpose, tracker.ledger.becomes))
        yield


@contextlib.contextmanager
def units_on(device: torch.device, modules: Iterable[Any], fake_of: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Make FSDP2 and device meshes use `device` in this block. `fake_of` returns the fake tensor for a CPU shard."""
    modules = tuple(module for module in modules if isinstance(module, torch.nn.Module))
    groups = list(_find_groups(modules))
    with contextlib.ExitStack() as stack:
        stack.enter_context(meshes_on(device.type))
        for unit in find_units(modules):
            for owner, name, value in list_device_attributes(unit, device):
                stack.enter_context(patch.object(owner, name, value))
        del modules  # so that a module that the program drops is freed
        for group in groups:
            for owner, name, value in group.on_device(device, fake_of):
                stack.enter_context(patch.object(owner, name, value))
        yield


def on_host(modules: Iterable[Any]) -> set[int]:
    """Return the ids of parameters that stay in host memory (CPUOffloadPolicy)."""
    groups = (group for group in _find_groups(m for m in modules if isinstance(m, torch.nn.Module)) if group.is_on_host)
    return {id(parameter) for group in groups for parameter in group.parameters}


def check_estimated(modules: Iterable[nn.Module]) -> None:
    """Raise RehearsalError for a model whose sharding can't be estimated."""
    modules = tuple(modules)
    if any(map(is_replicated, modules)):
        raise RehearsalError(REPLICATED)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in modules:
        if isinstance(module, fsdp.FullyShardedDataParallel):
            raise RehearsalError(FSDP1)
    if any(group.is_symmetric for group in _find_groups(modules)):
        raise RehearsalError(SYMMETRIC)


def _refuse_rings(*args: Any, **kwargs: Any) -> NoReturn:
    raise RehearsalError(
        "context parallel passes keys and values from one process to the next, which is not estimated.\n  "
        "Estimate without it, with one process's share of the tokens: the exchanged keys and values are then missing "
        "from the estimate."
    )


def _find_groups(modules: Iterable[nn.Module]) -> Iterator[ShardGroup]:
    numbers: set[int] = set()
    for unit in find_units(modules):
        for group in find_shard_groups(unit):
            if group.number not in numbers:
                numbers.add(group.number)
                yield group
