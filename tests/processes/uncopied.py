"""Collectives of gloo without the copies that gloo makes of what it sends and that NCCL does not make.

gloo reduces and scatters a copy of the input, and gathers into a copy of the output. Here parts are reduced and
broadcast one by one instead, in memory that is not torch's.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.distributed_c10d import _resolve_process_group


def reduce_scatter(output: Tensor, input: Tensor, op: Any = ReduceOp.SUM, group: Any = None, **_: Any) -> None:
    sums = torch.frombuffer(bytearray(input.nbytes), dtype=input.dtype).copy_(input.reshape(-1))
    parts = sums.view(distributed.get_world_size(group), -1)
    for rank, part in enumerate(parts):
        distributed.reduce(part, group_dst=rank, op=op, group=group)
    output.view(-1).copy_(parts[distributed.get_rank(group)])


def all_gather(output_tensor: Tensor, input_tensor: Tensor, group: Any = None, **_: Any) -> None:
    parts = output_tensor.view(distributed.get_world_size(group), -1)
    own = parts[distributed.get_rank(group)]
    if own.data_ptr() != input_tensor.data_ptr():
        own.copy_(input_tensor.view(-1))
    for rank, part in enumerate(parts):
        distributed.broadcast(part, group_src=rank, group=group)


def scattered(tensor: Tensor, op: str, n: int, group: Any) -> Tensor:
    output = tensor.new_empty(tensor.shape[0] // n, *tensor.shape[1:])
    reduce_scatter(output, tensor, ReduceOp.AVG if op == "avg" else ReduceOp.SUM, process_group(group))
    return output


def gathered(tensor: Tensor, n: int, group: Any) -> Tensor:
    output = tensor.new_empty(tensor.shape[0] * n, *tensor.shape[1:])
    all_gather(output, tensor.contiguous(), process_group(group))
    return output


def process_group(group: Any) -> ProcessGroup:
    return _resolve_process_group(group) if isinstance(group, str) else group


@contextlib.contextmanager
def uncopied() -> Iterator[None]:
    """Let FSDP2 and distributed tensors send without gloo's copies in this block."""
    library: Any = vars(torch.library)["Library"]("_c10d_functional", "IMPL")
    library.impl("reduce_scatter_tensor", scattered, "CPU")
    library.impl("all_gather_into_tensor", gathered, "CPU")
    with (
        patch.object(distributed, "reduce_scatter_single", reduce_scatter),
        patch.object(distributed, "all_gather_single", all_gather),
    ):
        yield
    library._destroy()
