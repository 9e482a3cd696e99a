"""Replacements for the process groups of a CUDA script on a machine without NCCL: gloo, or a simulated group."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel

from lowtide._torch.distributed import build_own_state_patch, find_symmetric_memory, keep_own_gradients
from lowtide._torch.fake_modes import on_real_tensors
from lowtide.errors import RehearsalError
from lowtide.estimator.absent_processes import AbsentProcesses
from lowtide.estimator.collectives import replacements as collectives
from lowtide.estimator.sharded_units import FSDP1, SYMMETRIC
from lowtide.estimator.values.query_site import where
from lowtide.utils.frames import module_name

_OWNERS = (torch.distributed, torch.distributed.distributed_c10d) if torch.distributed.is_available() else ()
_MAKING = ("init_process_group", "new_group")
_OF_OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "barrier")
_BETWEEN_TWO = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")

taken_as_own: dict[str, None] = {}
"""Notes on lines of the script that received objects from absent processes in the current estimate, in order."""


def replacements(processes: AbsentProcesses | None = None) -> Iterator[tuple[Any, str, Any]]:
    """Yield replacements for torch's functions on process groups, as (owner, name, function)."""
    taken_as_own.clear()
    yield DistributedDataParallel, "__init__", _wrap_on_cpu(DistributedDataParallel.__init__)
    yield DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda self, module: None
    if not torch.distributed.is_available():
        return
    yield from collectives()
    for owner in _OWNERS:
        yield from ((owner, name, _send_real(getattr(owner, name))) for name in _OF_OBJECTS)
        yield owner, "is_nccl_available", lambda: True
        if processes is None:
            yield from ((owner, name, _use_gloo(getattr(owner, name))) for name in _MAKING)
    if processes is not None:
        yield from simulated_group(processes)
        yield torch.distributed, "get_backend", lambda group=None: "nccl"
        from torch.distributed.fsdp import FullyShardedDataParallel

        yield FullyShardedDataParallel, "__init__", _refuse_with(FSDP1)
        for owner, name in find_symmetric_memory():
            yield owner, name, _refuse_with(SYMMETRIC)


def simulated_group(processes: AbsentProcesses) -> Iterator[tuple[Any, str, Any]]:
    """Yield replacements of functions that simulate a group of `processes`, as (owner, name, function)."""
    from torch.distributed import device_mesh  # a mesh starts the group of a script that has not

    yield build_own_state_patch()
    started = _start_absent(torch.distributed.init_process_group, processes)
    yield from ((owner, "init_process_group", started) for owner in (*_OWNERS, device_mesh))
    for owner in _OWNERS:
        yield owner, "new_group", _ignore_backend(owner.new_group)
        yield owner, "all_gather_object", _gather_own_for_all
        yield owner, "gather_object", _gather_own
        yield owner, "broadcast_object_list", _keep_own
        yield owner, "scatter_object_list", _scatter_own
    for name in _BETWEEN_TWO:  # one function for all owners, because P2POp compares functions
        refused = _refuse_sending(name)
        yield from ((owner, name, refused) for owner in _OWNERS)


def list_ddp_stand_ins() -> Iterator[tuple[Any, str, Any]]:
    """Yield replacements with which DDP keeps this process's own gradients, as (owner, name, function).

    DDP's reducer can't handle the results of a simulated group's collectives.
    """
    init, hooked = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook

    @functools.wraps(init)
    def wrap(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        hooked(self, None, lambda state, bucket: keep_own_gradients(bucket))  # a lambda: torch checks annotations

    yield DistributedDataParallel, "__init__", wrap
    yield DistributedDataParallel, "register_comm_hook", _refuse_with(HOOKED)


HOOKED = (
    "DistributedDataParallel has a communication hook (register_comm_hook), and the processes that it sends to are not "
    "there.\n  Leave it out, or plan in real processes: torchrun ... lowtide run."
)


def _wrap_on_cpu(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap DDP's constructor so that it accepts modules on the CPU, where they are before the first forward."""

    @functools.wraps(init)
    def wrap(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        init(self, module, None, None, *args, **kwargs)

    return wrap


def _use_gloo(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        def gloo(value: Any) -> Any:
            return "gloo" if isinstance(value, str) and ("nccl" in value or "cuda" in value) else value

        kwargs.pop("device_id", None)
        return make(*map(gloo, args), **{name: gloo(value) for name, value in kwargs.items()})

    return made


def _start_absent(start: Callable[..., None], processes: AbsentProcesses) -> Callable[..., None]:
    @functools.wraps(start)
    def started(*args: Any, **kwargs: Any) -> None:
        processes.start(start)

    return started


def _ignore_backend(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `new_group` so that it ignores the requested backend and uses that of the default group."""

    @functools.wraps(make)
    def made(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return make(ranks, use_local_synchronization=kwargs.get("use_local_synchronization", False))

    return made


def _gather_own_for_all(object_list: list[Any], obj: Any, *args: Any, **kwargs: Any) -> None:
    _take_own("all_gather_object")
    object_list[:] = [obj] * len(object_list)


def _gather_own(obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
    if object_gather_list:
        _take_own("gather_object")
        object_gather_list[:] = [obj] * len(object_gather_list)


def _keep_own(
    object_list: list[Any], src: int | None = None, *args: Any, group_src: int | None = 0, **kwargs: Any
) -> None:
    """Replace a broadcast of objects: each process keeps its own objects."""
    if torch.distributed.get_rank() != (group_src if src is None else src):
        _take_own("broadcast_object_list")


def _scatter_own(output: list[Any], objects: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
    if objects:
        output[0] = objects[torch.distributed.get_rank() % len(objects)]
    else:
        _take_own("scatter_object_list")


def _take_own(name: str) -> None:
    """Record that the program gets its own objects instead of those of absent processes. Ignore calls by torch."""
    if not module_name(sys._getframe(2)).startswith("torch."):
        what = f"what other processes send (torch.distributed.{name}) is taken as this process's own"
        taken_as_own[f"{where()}: {what}"] = None


def _send_real(send: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(send)
    def sent(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
        with on_real_tensors():
            return send(*args, **kwargs)

    return sent


def _refuse_with(text: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RehearsalError(text)

    return refuse


def _refuse_sending(name: str) -> Callable[..., NoReturn]:
    return _refuse_with(
        f"torch.distributed.{name} sends from one process to another, as pipelines and rings do, and the others are "
        "not there.\n  Steps are estimated that all processes take alike: FSDP2, HSDP, DDP, tensor parallel."
    )
