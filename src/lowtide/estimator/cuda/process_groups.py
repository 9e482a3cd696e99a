"""Process groups of a script for CUDA where NCCL is missing: gloo, with nothing sent for tensors on the GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lowtide._torch.fake_modes import is_fake, on_real_tensors
from lowtide.runtime.fingerprint import tensors_in

_MAKING = ("init_process_group", "new_group")
_SENDING = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"),
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"),
)
_OF_OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "barrier")


class _Done:
    """Handle of a finished collective operation."""

    def wait(self, *args: Any) -> bool:
        return True

    is_completed = is_success = wait


def stand_ins() -> Iterator[tuple[Any, str, Any]]:
    """Return the replacements in torch: (owner, name, function)."""
    yield DistributedDataParallel, "__init__", _anywhere(DistributedDataParallel.__init__)
    if not torch.distributed.is_available():
        return
    for owner in (torch.distributed, torch.distributed.distributed_c10d):
        for names, kind in ((_MAKING, _by_gloo), (_SENDING, _unsent), (_OF_OBJECTS, _in_reality)):
            yield from ((owner, name, kind(getattr(owner, name))) for name in names)
        yield owner, "is_nccl_available", lambda: True


def _anywhere(init: Callable[..., None]) -> Callable[..., None]:
    """Allow wrapping a module on any device: before the first forward its parameters are on the CPU."""

    @functools.wraps(init)
    def wrap(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        init(self, module, None, None, *args, **kwargs)

    return wrap


def _by_gloo(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        def gloo(value: Any) -> Any:
            return "gloo" if isinstance(value, str) and ("nccl" in value or "cuda" in value) else value

        kwargs.pop("device_id", None)
        return make(*map(gloo, args), **{name: gloo(value) for name, value in kwargs.items()})

    return made


def _unsent(send: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(send)
    def sent(*args: Any, **kwargs: Any) -> Any:
        if not any(map(is_fake, tensors_in((args, kwargs)))):
            return send(*args, **kwargs)
        return _Done() if kwargs.get("async_op") else None

    return sent


def _in_reality(send: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(send)
    def sent(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
        with on_real_tensors():
            return send(*args, **kwargs)

    return sent
