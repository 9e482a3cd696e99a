"""Training in several processes: a rehearsed step runs in this process alone.

Each process decides by itself how many steps a rehearsal takes. So during a rehearsal modules wrapped in
DistributedDataParallel send nothing, neither gradients nor buffers, as inside its `no_sync()`, and modules sharded by
`fully_shard` (FSDP2) use their own part of each parameter in place of all the other parts. So do the collectives of
distributed tensors, as in tensor parallel models. A step that waits for other processes all the same, such as one with
SyncBatchNorm, is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch

from lowtide._torch.distributed import (
    awaits_first_backward,
    collectives_alone,
    count_collectives,
    count_local_collectives,
    find_ddp_wrappers,
    has_new_buckets,
    is_wrapping,
)
from lowtide._torch.fsdp import ShardGroup, find_shard_groups, forget_step
from lowtide.errors import RehearsalError
from lowtide.runtime.fsdp_scopes import find_units


def several_processes() -> bool:
    """Return True if this process trains together with others."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def n_sent() -> int:
    """Return the number of collective operations of this process so far, or 0 if it trains alone."""
    return count_collectives() if several_processes() else 0


def count_computed_collectives() -> int:
    """Return the number of collective operations so far, with those that were only simulated in this process."""
    return n_sent() + count_local_collectives()


def check_sharding(modules: Iterable[torch.nn.Module]) -> None:
    """Raise RehearsalError if a model is sharded over processes in a way that is not supported."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported here: that takes a second
    if fsdp is None:
        return
    modules = tuple(modules)
    for module in modules:
        if isinstance(module, fsdp.FullyShardedDataParallel):
            raise RehearsalError(
                f"{type(module).__name__} is wrapped in FullyShardedDataParallel (FSDP1), which is not planned for: "
                "a call that one process replays, all processes would have to replay. Shard with "
                "torch.distributed.fsdp.fully_shard (FSDP2) instead."
            )
    for unit in find_units(modules):
        if why := _find_unsupported_property(unit):
            raise RehearsalError(f"{type(unit).__name__} {why}, which is not planned for.")


def _find_unsupported_property(unit: torch.nn.Module) -> str | None:
    """Describe a property of `unit`, a module sharded by `fully_shard`, that is not supported; return None if there is
    none.
    """
    for group in find_shard_groups(unit):
        if group.is_on_host:
            return "is sharded with CPUOffloadPolicy"
    return None


def check_at_rest(groups: Iterable[ShardGroup]) -> None:
    """Raise RehearsalError if a module sharded by `fully_shard` is in the middle of a step."""
    for group in groups:
        if group.has_unsent_gradients:
            raise RehearsalError(
                "gradients of earlier micro-batches have not been added up over the processes "
                "(set_requires_gradient_sync), and a rehearsal would lose them. Fit before the first of them, or after "
                "the update."
            )
        if group.is_gathered:
            names = " and ".join(type(module).__name__ for module in group.modules)
            raise RehearsalError(
                f"the parameters of {names} are gathered now, as after a forward without backward. Call its "
                "reshard() in all processes first."
            )


def check_waits_for_no_process(sent_before: int) -> None:
    """Raise RehearsalError if the step that has just run has taken part in collectives, because it would wait for other
    processes.

    `sent_before` is the result of `n_sent` before the step.
    """
    if n := n_sent() - sent_before:
        raise RehearsalError(
            f"the step waits for other processes ({n} collective operations), not counting what "
            "DistributedDataParallel and fully_shard send. Each process decides on its own how many steps a "
            "rehearsal takes, and would wait for the others forever.\n  "
            "Fit a step that leaves them out, if they are sums of losses for a log, say. With SyncBatchNorm, run the "
            "script with `lowtide run`: it rehearses in steps that all processes take."
        )


def n_with_new_buckets(modules: Iterable[torch.nn.Module]) -> int:
    """Count the DDP modules that have rebuilt their buckets in the order of the gradients, which allocates new ones."""
    return sum(map(has_new_buckets, find_ddp_wrappers(modules)))


class NoSync:
    """Suspension of communication by DistributedDataParallel and `fully_shard`, from construction until `end()`.

    The constructor raises RehearsalError for a DDP wrapper with `static_graph=True` before its first backward pass, in
    which DDP records the graph.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        modules = tuple(modules)
        self._units = find_units(modules)
        groups = [group for unit in self._units for group in find_shard_groups(unit)]
        check_at_rest(groups)
        wrappers = find_ddp_wrappers(modules)
        if any(map(awaits_first_backward, wrappers)):
            raise RehearsalError(
                "DistributedDataParallel(static_graph=True) learns from its first backward pass, which a rehearsal "
                "must not be. Fit the model before it is wrapped, or take one step before."
            )
        self._undo = ExitStack()
        for wrapper in wrappers:
            for flag in ("require_backward_grad_sync", "require_forward_param_sync"):
                self._undo.callback(setattr, wrapper, flag, getattr(wrapper, flag))
                setattr(wrapper, flag, False)
        for group in groups:
            self._undo.callback(setattr, group, "senders", group.senders)
            group.senders = _LocalShard(), _LocalShard()
        if any(is_wrapping(type(parameter)) for module in modules for parameter in module.parameters(recurse=False)):
            self._undo.enter_context(collectives_alone())

    def forget_step(self) -> None:
        """Reset the modules sharded by `fully_shard` to their state between two steps, also after an aborted step."""
        for unit in self._units:
            forget_step(unit)

    def end(self) -> None:
        """Let the modules communicate with other processes again."""
        self._undo.close()


class _LocalShard:
    """Gather and reduce operations that act as if all processes had this one's values, without communication."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, *_: Any, **settings: Any
    ) -> None:
        """Copy `input_tensor` to `output_tensor`; the longer of the two has one part for each process.

        `input_tensor` may be a part of `output_tensor`.
        """
        if output_tensor.numel() < input_tensor.numel():
            output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()].view_as(output_tensor))
            return
        own = input_tensor.data_ptr()
        for part in output_tensor.view(group.size(), *input_tensor.shape):
            if part.data_ptr() != own:
                part.copy_(input_tensor)
