"""Private names of torch: modules sharded by FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    pass


class ShardGroup:
    """Parameters that `fully_shard` gathers together. 2.13; `senders` since 2.9 or longer."""

    __slots__ = ("_group",)

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """Modules that `fully_shard` was called on."""
        modules: tuple[torch.nn.Module, ...] = self._group.modules
        return modules

    @property
    def is_whole(self) -> bool:
        """Return True if the parameters are gathered now."""
        return bool(self._group.is_unsharded)

    @property
    def parts_after_forward(self) -> bool:
        """Return True if the parameters are resharded after forward and gathered again for backward."""
        return self._group.post_forward_mesh_info is not None

    @property
    def is_whole_in_backward(self) -> bool:
        """Return True if the parameters are gathered for backward at all."""
        return bool(self._group.unshard_in_backward)

    @property
    def is_on_host(self) -> bool:
        """Return True if the shards are kept in host memory."""
        return type(self._group.offload_policy).__name__ == "CPUOffloadPolicy"

    @property
    def is_tensor_parallel(self) -> bool:
        """Return True if any parameter is a distributed tensor even when gathered."""
        return any(parameter.is_dtensor for parameter in self._group.fsdp_params)

    @property
    def has_unsent_gradients(self) -> bool:
        """Return True if gradients of earlier micro-batches have not been reduced over processes yet."""
        whole = (getattr(p, "_unsharded_param", None) for p in self._group.fsdp_params)
        waiting = [self._group._partial_reduce_output]
        waiting += [p.unsharded_accumulated_grad for p in self._group.fsdp_params]
        waiting += [p.grad for p in whole if p is not None]
        return any(gradient is not None for gradient in waiting)

    @property
    def senders(self) -> tuple[Any, Any]:
        """Communication objects that gather the parameters and reduce the gradients."""
        return self._group._all_gather_comm, self._group._reduce_scatter_comm

    @senders.setter
    def senders(self, both: tuple[Any, Any]) -> None:
        self._group._all_gather_comm, self._group._reduce_scatter_comm = both

    def stay_whole(self) -> None:
        """Keep the parameters gathered until `part`."""
        self._group.reshard = lambda: None

    def part(self) -> None:
        """Reshard the parameters as after forward, if forward does so at all."""
        del self._group.reshard
        with self._group.use_training_state(type(self._group._training_state).FORWARD):
            self._group.reshard()

    def forget_gradients(self) -> None:
        """Drop unreduced gradients and the gathered parameters."""
        self._group.reshard()
        for parameter in self._group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                whole.grad = None


def shard_groups(module: Any) -> list[ShardGroup]:
    """Return the groups of a module that `fully_shard` was called on. 2.13; one group until 2.11."""
    return _groups(module._get_fsdp_state())


def _groups(state: Any) -> list[ShardGroup]:
    groups = getattr(state, "_fsdp_param_groups", None)
    return [ShardGroup(g) for g in (groups if groups is not None else [state._fsdp_param_group]) if g is not None]


def parts_by_itself(module: Any) -> bool:
    """Return True if `reshard_after_forward` was left unset; a root then does not reshard after forward. 2.13."""
    return bool(module._get_fsdp_state()._auto_reshard_after_forward)


@contextlib.contextmanager
def as_in_backward(module: Any) -> Iterator[None]:
    """Treat forward inside this `with` block as a recompute in backward: gathered parameters stay gathered. 2.13."""
    state = module._get_fsdp_state()
    before, state._training_state = state._training_state, type(state._training_state).PRE_BACKWARD
    try:
        yield
    finally:
        state._training_state = before


def forget_step(module: Any) -> None:
    """Reset a root module to the state between steps after an aborted step. 2.13; torch has no method until 2.11."""
    state = module._get_fsdp_state()
    if not state._is_root:
        return
    if hasattr(state, "_reset_iter_state"):
        state._reset_iter_state()
    else:
        state._root_post_backward_final_callback()
    for group in (group for other in state._state_ctx.all_states for group in _groups(other)):
        group.forget_gradients()


def sum_over_processes(how: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Sum distributed tensors with `how`, for example for the norm in gradient clipping. Return the previous function.

    2.13, since 2.5.
    """
    functional: Any = torch.distributed._functional_collectives
    before: Callable[..., torch.Tensor] = functional.all_reduce
    functional.all_reduce = how
    return before
