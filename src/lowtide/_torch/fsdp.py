"""Private names of torch: modules sharded by FSDP2."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal
from unittest.mock import patch

import torch

from lowtide._torch.fake_modes import is_fake
from lowtide._torch.tensors import fakes_have_addresses, get_storage_id

Purpose = Literal["gathered parameters", "communication buffers", "gradients"]
"""Purpose of memory that FSDP2 allocates."""


class ShardGroup:
    """Parameters that `fully_shard` gathers together. Relies on internals of torch 2.13; those behind `senders` have
    existed since 2.9 at the latest.
    """

    __slots__ = ("_group",)

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def number(self) -> int:
        """Number that identifies the group during its lifetime: modules that are sharded together share one."""
        return id(self._group)

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """Modules that `fully_shard` was called on."""
        modules: tuple[torch.nn.Module, ...] = self._group.modules
        return modules

    @property
    def is_gathered(self) -> bool:
        """Return True if the parameters are gathered now."""
        return bool(self._group.is_unsharded)

    @property
    def reshards_after_forward(self) -> bool:
        """Return True if the parameters are resharded after forward and gathered again for backward."""
        return self._group.post_forward_mesh_info is not None

    @property
    def is_gathered_in_backward(self) -> bool:
        """Return True unless `set_unshard_in_backward(False)` keeps the parameters from being gathered for backward."""
        return bool(self._group.unshard_in_backward)

    @property
    def is_on_host(self) -> bool:
        """Return True if the shards are kept in host memory."""
        return type(self._group.offload_policy).__name__ == "CPUOffloadPolicy"

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

    def keep_gathered(self) -> None:
        """Keep the parameters gathered until `reshard`."""
        self._group.reshard = lambda: None

    def reshard(self) -> None:
        """Reshard the parameters as forward does at its end, unless forward leaves them gathered."""
        del self._group.reshard
        with self._group.use_training_state(type(self._group._training_state).FORWARD):
            self._group.reshard()

    @property
    def is_symmetric(self) -> bool:
        """Return True if collectives use symmetric memory, which other processes write to."""
        return any(type(sender).__name__.startswith("SymmMem") for sender in self.senders)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Sharded parameters."""
        return [parameter.sharded_param for parameter in self._group.fsdp_params]

    @property
    def sharded_by_gathered(self) -> dict[int, torch.Tensor]:
        """Sharded parameters by the `id` of the gathered parameter that replaces each; empty if none is gathered."""
        parameters = self._group.fsdp_params if self.is_gathered else ()
        whole = ((getattr(p, "_unsharded_param", None), p.sharded_param) for p in parameters)
        return {id(gathered): sharded for gathered, sharded in whole if gathered is not None}

    def drop_gathered(self) -> Callable[[], None]:
        """Drop the gathered parameters, which have no memory now; return a function that restores them."""
        before = [(p, vars(p).pop("_unsharded_param", None), p.all_gather_outputs) for p in self._group.fsdp_params]
        for parameter in self._group.fsdp_params:
            parameter.all_gather_outputs = []

        def restore() -> None:
            for parameter, whole, outputs in before:
                parameter.all_gather_outputs = outputs
                vars(parameter).pop("_unsharded_param", None)
                if whole is not None:
                    parameter._unsharded_param = whole

        return restore

    def on_device(
        self, device: torch.device, to_device: Callable[[torch.Tensor], torch.Tensor]
    ) -> Iterator[tuple[Any, str, Any]]:
        """Yield the attributes to set so that the group runs on `device`, as (owner, name, value).

        `to_device` moves a shard there.
        """
        yield self._group, "device", device
        yield self._group, "device_handle", getattr(torch, device.type)
        yield self._group, "_all_gather_output", to_device(self._group._all_gather_output)
        for parameter in self._group.fsdp_params:
            yield parameter, "device", device
            if not self.is_on_host:
                yield parameter, "_sharded_param_data", to_device(parameter._sharded_param_data)

    def forget_gradients(self) -> None:
        """Drop unreduced gradients and the gathered parameters."""
        self._group.reshard()
        for parameter in self._group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(parameter):  # torch 2.13; in 2.15 it is `whole.grad`
                parameter.unsharded_accumulated_grad = None
            if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                whole.grad = None


def find_shard_groups(module: Any) -> list[ShardGroup]:
    """Return the groups of parameters of a module that `fully_shard` was called on; up to torch 2.11, there is only
    one. Relies on internals of torch 2.13.
    """
    return _list_groups(module._get_fsdp_state())


def _list_groups(state: Any) -> list[ShardGroup]:
    groups = getattr(state, "_fsdp_param_groups", None)
    return [ShardGroup(g) for g in (groups if groups is not None else [state._fsdp_param_group]) if g is not None]


def has_default_resharding(module: Any) -> bool:
    """Return True if `reshard_after_forward` was left unset; a root then does not reshard after forward. Relies on
    internals of torch 2.13.
    """
    return bool(module._get_fsdp_state()._auto_reshard_after_forward)


@contextlib.contextmanager
def as_in_backward(module: Any) -> Iterator[None]:
    """Treat forward inside this `with` block as a recompute in backward: gathered parameters stay gathered. Relies on
    internals of torch 2.13.
    """
    state = module._get_fsdp_state()
    before, state._training_state = state._training_state, type(state._training_state).PRE_BACKWARD
    try:
        yield
    finally:
        state._training_state = before


def forget_step(module: Any) -> None:
    """Reset a root module, after an aborted step, to its state between steps. Relies on internals of torch 2.13; torch
    has had a method for it since 2.11.
    """
    state = module._get_fsdp_state()
    if not state._is_root:
        return
    if hasattr(state, "_reset_iter_state"):
        state._reset_iter_state()
    else:
        state._root_post_backward_final_callback()
    for group in (group for other in state._state_ctx.all_states for group in _list_groups(other)):
        group.forget_gradients()


@contextlib.contextmanager
def report_purposes(
    inside: Callable[[Purpose], AbstractContextManager[None]], becomes: Callable[[torch.Tensor, Purpose], None]
) -> Iterator[None]:
    """Report the purpose of each of FSDP2's allocations inside this `with` block.

    `inside(purpose)` returns a context that is entered around allocations; `becomes(tensor, purpose)` is called when an
    existing tensor gets a new purpose. Relies on internals of torch 2.13, present since 2.6.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    post_backward = FSDPParamGroup.post_backward

    def around(owner: type, name: str, purpose: Purpose) -> Any:
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            with inside(purpose):
                return plain(self, *args, **kwargs)

        return patch.object(owner, name, called)

    @functools.wraps(post_backward)
    def reduced(self: Any, *args: Any) -> Any:
        for parameter in self.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None and whole.grad is not None:
                becomes(whole.grad, "gradients")
        with inside("communication buffers"):
            done = post_backward(self, *args)
        for parameter in self.fsdp_params:
            for gradient in (parameter.sharded_param.grad, parameter.unsharded_accumulated_grad):
                if gradient is not None:
                    becomes(gradient, "gradients")
        return done

    with (
        around(FSDPParamGroup, "unshard", "communication buffers"),
        around(FSDPParamGroup, "wait_for_unshard", "gathered parameters"),
        around(FSDPParam, "to_sharded_post_forward", "gathered parameters"),  # the part kept until backward
        patch.object(FSDPParamGroup, "post_backward", reduced),
    ):
        yield


@contextlib.contextmanager
def meta_parameters_ungathered(refuse: Callable[[], None]) -> Iterator[None]:
    """Let `unshard` leave parameters on the meta device ungathered inside this `with` block; a forward with such
    parameters calls `refuse`. Relies on internals of torch 2.13, present since 2.6.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    unshard: Callable[..., Any] = FSDPModule.unshard
    check: Callable[..., Any] = FSDPParamGroup._validate_no_meta_params

    @functools.wraps(unshard)
    def gather(module: Any, async_op: bool = False) -> Any:
        if not any(parameter.is_meta for parameter in module.parameters()):
            return unshard(module, async_op)
        return _Gathered() if async_op else None

    @functools.wraps(check)
    def checked(group: Any) -> None:
        if any(parameter.sharded_param.is_meta for parameter in group.fsdp_params):
            refuse()
        check(group)

    with (
        patch.object(FSDPModule, "unshard", gather),
        patch.object(FSDPParamGroup, "_validate_no_meta_params", checked),
    ):
        yield


class _Gathered:
    """Result of `unshard(async_op=True)` if there is nothing to wait for."""

    def wait(self) -> None:
        """Return at once, because the parameters are gathered already."""


@contextlib.contextmanager
def observe_resizes(on_resize: Callable[[torch.UntypedStorage], None], devices: Iterable[str]) -> Iterator[None]:
    """Call `on_resize` after each resize of a storage on one of `devices` inside this `with` block. Relies on internals
    of torch 2.13.

    FSDP2 frees and allocates gathered parameters by resizing their storages. It also compares addresses; fake storages,
    which have none, return a number that identifies them instead. FSDP2 would pad a fake shard once more in each step,
    because it recognizes padded shards only if they are plain tensors; inside this block it does not.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    devices = frozenset(devices)
    resize = torch.UntypedStorage.resize_
    reset: Callable[[Any], None] = FSDPParam.reset_sharded_param

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        done = resize(storage, size)
        if before != size and storage.device.type in devices:
            on_resize(storage)
        return done

    @functools.wraps(reset)
    def padded_once(self: Any) -> None:
        parameter = getattr(self._module_info.module, self._module_info.param_name)
        shard, padded = parameter._local_tensor, self._sharded_param_data
        is_padded = (
            parameter is self.sharded_param and is_fake(shard) and get_storage_id(shard) == get_storage_id(padded)
        )
        if not is_padded:
            reset(self)

    with (
        patch.object(torch.UntypedStorage, "resize_", resized),
        patch.object(FSDPParam, "reset_sharded_param", padded_once),
        fakes_have_addresses(),
    ):
        yield


def list_device_attributes(module: Any, device: torch.device) -> Iterator[tuple[Any, str, Any]]:
    """Yield the attributes to set so that a sharded module runs on `device`, as (owner, name, value). Relies on
    internals of torch 2.13.
    """
    state = module._get_fsdp_state()
    handle = getattr(torch, device.type)
    yield state, "_device", device
    yield state, "_device_handle", handle
    context = vars(state._comm_ctx)
    if "device_handle" in context:  # after the first forward
        yield state._comm_ctx, "device_handle", handle
        for name in sorted(name for name in context if name.endswith("_stream")):
            yield state._comm_ctx, name, handle.Stream()
