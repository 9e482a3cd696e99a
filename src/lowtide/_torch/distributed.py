"""Private names of torch: process groups and DDP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    pass
from lowtide._torch.fake_modes import without_function_modes, without_modes


def n_collectives() -> int:
    """How many collective operations this process has begun, over all of its process groups. 2.13, since 1.10."""
    groups: Any = torch.distributed.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def awaits_first_backward(wrapper: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Whether it has `static_graph`, and has not learned yet which parameters are used how often. 2.13, since 1.13."""
    return wrapper.static_graph and not wrapper._static_graph_delay_allreduce_enqueued


def has_new_buckets(wrapper: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Whether it has put its buckets in the order in which gradients came: in its second forward. 2.13, since 2.1."""
    return wrapper._has_rebuilt_buckets


def after_backward(call: Callable[[], None]) -> None:
    """Call this at the end of the backward pass that runs now. 2.13, since 1.0."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


SYNC_BUFFERS = "_distributed_broadcast_coalesced"
"""Method of a wrapper that sends buffers: it is given tensors, bytes at a time and a rank. 2.13, since 1.10."""


def sent_parameters(
    wrapper: torch.nn.parallel.DistributedDataParallel,
) -> tuple[list[torch.nn.Parameter], list[bool]]:
    """Parameters whose gradients a wrapper sends, and which of them have sparse ones. 2.13, since 1.10."""
    return wrapper._build_params_for_reducer()  # type: ignore[no-any-return, no-untyped-call]


def bucket_limits(wrapper: torch.nn.parallel.DistributedDataParallel) -> tuple[list[int], list[int]]:
    """Bytes up to which gradients share a bucket: at first, and from the second forward on. 2.13."""
    config = wrapper._bucket_config
    first, then = config.compute_bucket_size_limits(
        static_graph=wrapper.static_graph, find_unused_parameters=wrapper.find_unused_parameters
    )
    return first, then or [config.first_bucket_bytes_cap, config.bucket_bytes_cap]


def assign_buckets(
    parameters: Sequence[torch.Tensor], limits: list[int], sparse: list[bool], numbers: Sequence[int]
) -> list[list[int]]:
    """Numbers of the parameters that share each bucket. `sparse` is by number. 2.13, since 1.10."""
    with without_modes(), without_function_modes():
        like = [torch.empty_strided(p.size(), p.stride(), dtype=p.dtype, device="meta") for p in parameters]
        assign: Any = vars(torch.distributed)["_compute_bucket_assignment_by_size"]
        found = assign(like, limits, sparse, list(numbers))
    return [list(group) for group in found[0]]
