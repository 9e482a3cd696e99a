"""Private names of torch: process groups and DDP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    pass
from lowtide._torch.fake_modes import without_function_modes, without_modes


def n_collectives() -> int:
    """Return the number of collectives that this process has started, over all process groups. 2.13, since 1.10."""
    groups: Any = torch.distributed.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def awaits_first_backward(wrapper: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return True if a `static_graph` wrapper has not yet recorded its parameters' use. 2.13, since 1.13."""
    return wrapper.static_graph and not wrapper._static_graph_delay_allreduce_enqueued


def has_new_buckets(wrapper: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return True if `wrapper` has put its buckets in gradient order, as its second forward does. 2.13, since 2.1."""
    return wrapper._has_rebuilt_buckets


def after_backward(call: Callable[[], None]) -> None:
    """Have `call` called at the end of the running backward pass. 2.13, since 1.0."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


SYNC_BUFFERS = "_distributed_broadcast_coalesced"
"""Method of a wrapper that sends buffers. Arguments: tensors, bytes at a time and a rank. 2.13, since 1.10."""


def sent_parameters(
    wrapper: torch.nn.parallel.DistributedDataParallel,
) -> tuple[list[torch.nn.Parameter], list[bool]]:
    """Return the parameters whose gradients a wrapper sends, and True for those with sparse ones. 2.13, since 1.10."""
    return wrapper._build_params_for_reducer()  # type: ignore[no-any-return, no-untyped-call]


def bucket_limits(wrapper: torch.nn.parallel.DistributedDataParallel) -> tuple[list[int], list[int]]:
    """Return the bucket size limits in bytes: those at first, and those from the second forward on. 2.13."""
    config = wrapper._bucket_config
    first, then = config.compute_bucket_size_limits(
        static_graph=wrapper.static_graph, find_unused_parameters=wrapper.find_unused_parameters
    )
    return first, then or [config.first_bucket_bytes_cap, config.bucket_bytes_cap]


def assign_buckets(
    parameters: Sequence[torch.Tensor], limits: list[int], sparse: list[bool], numbers: Sequence[int]
) -> list[list[int]]:
    """Return the numbers of the parameters in each bucket. `sparse` is by number. 2.13, since 1.10."""
    with without_modes(), without_function_modes():
        like = [torch.empty_strided(p.size(), p.stride(), dtype=p.dtype, device="meta") for p in parameters]
        assign: Any = vars(torch.distributed)["_compute_bucket_assignment_by_size"]
        result = assign(like, limits, sparse, list(numbers))
    return [list(group) for group in result[0]]
