"""Collective operations in estimated steps. On fake tensors, they return at once and send nothing.

Sums keep this process's own contents, and a note says so if these are read. The contents of tensors that other
processes would fill are unknown, so a size that depends on them raises an error. SyncBatchNorm leaves out the
statistics of processes without rows, so all processes are assumed to have rows.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch.distributed import import_functional_collectives
from lowtide._torch.fake_modes import is_fake, on_real_tensors
from lowtide._torch.modules import SyncBatchNorm
from lowtide.estimator.compiled_collectives import refuse_in_compiled_code
from lowtide.estimator.values.known_values import learn_alike, receive, senders, suppose
from lowtide.runtime.batch_tensors import collect_tensors
from lowtide.utils.frames import module_name

if TYPE_CHECKING:
    from torch import Tensor

SENDING = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"),
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"),
    *("all_gather_single", "reduce_scatter_single", "all_reduce_coalesced", "all_gather_coalesced"),
)
"""Functions of `torch.distributed` that send tensors. Not every version of torch has all of them."""

RECEIVED = {
    "all_gather": (0, "tensor_list"),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_single"), (0, "output_tensor")),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"), (0, "output")),
    "all_to_all_single": (0, "output"),
    "all_to_all": (0, "output_tensor_list"),
    "all_gather_coalesced": (0, "output_tensor_lists"),
    "gather": (1, "gather_list"),
    "scatter": (0, "tensor"),
}
"""Functions of `SENDING` -> position and name of the argument that other processes fill."""

n_sent = [0]
"""Number of collectives on fake tensors so far, except those of FSDP2; waits count, too."""

IN_ALL = "every process has rows for SyncBatchNorm"
OWN = "what all processes add up or one sends to all (torch.distributed.{}) is this process's own"


class Done:
    """Work handle of a collective operation on `tensors` that has already finished."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self._tensors = [*tensors]

    def wait(self, *args: Any) -> bool:
        """Return True at once, because no data was sent."""
        return True

    is_completed = is_success = synchronize = wait

    def result(self) -> list[Tensor]:
        """Return the operation's tensors."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a finished future of the tensors."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """Yield replacements of torch's collectives that send nothing, as (owner, name, function)."""
    senders.clear()
    for owner in (torch.distributed, torch.distributed.distributed_c10d):
        yield from ((owner, name, unsent(getattr(owner, name))) for name in SENDING if hasattr(owner, name))
    functional = import_functional_collectives()
    yield functional, "all_to_all_single", _refuse_unknown_sizes(functional.all_to_all_single)


def _refuse_unknown_sizes(send: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `send` so that unknown split sizes raise an error. torch checks only that they are integers."""

    @functools.wraps(send)
    def sent(tensor: Tensor, *sizes_and_group: Any, **kwargs: Any) -> Any:
        for sizes in (*sizes_and_group[:2], kwargs.get("output_split_sizes"), kwargs.get("input_split_sizes")):
            for size in sizes or ():
                operator.index(size)
        return send(tensor, *sizes_and_group, **kwargs)

    return sent


def unsent(send: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the collective `send` so that it does nothing for fake tensors."""
    names = [*inspect.signature(send).parameters]
    place_of_async = names.index("async_op") if "async_op" in names else len(names)

    @functools.wraps(send)
    def sent(*args: Any, **kwargs: Any) -> Any:
        if not any(map(is_fake, collect_tensors((args, kwargs)))):
            return send(*args, **kwargs)
        caller = module_name(sys._getframe(1))
        if not caller.startswith("torch."):
            refuse_in_compiled_code(send.__name__)
        n_sent[0] += not caller.startswith("torch.distributed.fsdp.")
        received: Sequence[Tensor] = ()
        if send.__name__ not in RECEIVED:
            for tensor in collect_tensors((args, kwargs)):
                suppose(tensor, OWN.format(send.__name__))
        if (argument := RECEIVED.get(send.__name__)) is not None:
            place, name = argument
            received = collect_tensors(args[place] if len(args) > place else kwargs.get(name))
            with on_real_tensors():
                for tensor in received:
                    if caller == SyncBatchNorm.__module__:
                        learn_alike(tensor, torch.ones((), dtype=tensor.dtype), IN_ALL)
                    else:
                        receive(tensor, f"torch.distributed.{send.__name__}")
        is_async = kwargs.get("async_op") or any(args[place_of_async : place_of_async + 1])
        return Done(received or collect_tensors((args, kwargs))) if is_async else None

    return sent
