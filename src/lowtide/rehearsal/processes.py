"""Training in several processes: a step that is rehearsed is taken by this process alone.

How many steps a rehearsal takes is for each process to find out. So those that DistributedDataParallel wraps send
nothing meanwhile, neither gradients nor buffers, as inside of its `no_sync()`. What waits for the others all the same,
as SyncBatchNorm does, is refused; so are sharded models (FSDP), whose every forward waits for the others.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.parallel import DistributedDataParallel

from lowtide._torch import awaits_first_backward, has_new_buckets, n_collectives
from lowtide.errors import RehearsalError


def several_processes() -> bool:
    """Whether this process trains together with others."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def n_sent() -> int:
    """How many collective operations this process has taken part in so far."""
    return n_collectives() if several_processes() else 0


def check_not_sharded(modules: Iterable[torch.nn.Module]) -> None:
    """Refuse a model that is sharded over processes. Raises RehearsalError."""
    if not several_processes():
        return
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for module in modules:
        if isinstance(module, FSDPModule | FullyShardedDataParallel):
            raise RehearsalError(
                f"{type(module).__name__} is sharded over processes (FSDP), which is not planned for yet: what one of "
                "them would run again, all would have to."
            )


def check_waits_for_nobody(sent_before: int) -> None:
    """Refuse a step that has waited for other processes although none had to. Raises RehearsalError."""
    if n := n_sent() - sent_before:
        raise RehearsalError(
            f"the step waits for other processes ({n} collective operations), not counting what "
            "DistributedDataParallel sends. Each process decides by itself how many steps a rehearsal takes, and would "
            "wait for the others without end.\n"
            "  Fit a step that leaves them out, if they are sums of losses for a log, say. With SyncBatchNorm, run the "
            "script with `lowtide run`: it rehearses in steps that all processes take."
        )


def n_with_new_buckets(modules: Iterable[torch.nn.Module]) -> int:
    """How many of them send gradients in the order in which these came once. Memory moves when they begin to."""
    return sum(isinstance(module, DistributedDataParallel) and has_new_buckets(module) for module in modules)


class Alone:
    """What DistributedDataParallel wraps sends nothing to other processes until `end()`.

    Raises RehearsalError where it has to send once first.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        wrappers = [module for module in modules if isinstance(module, DistributedDataParallel)]
        if any(map(awaits_first_backward, wrappers)):
            raise RehearsalError(
                "DistributedDataParallel(static_graph=True) learns from its first backward pass, which a rehearsal "
                "must not be. Fit the model before it is wrapped, or take one step before."
            )
        self._before = [(w, w.require_backward_grad_sync, w.require_forward_param_sync) for w in wrappers]
        for wrapper in wrappers:
            wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = False

    def end(self) -> None:
        """Send again."""
        for wrapper, gradients, buffers in self._before:
            wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync = gradients, buffers
