"""Simulate a process group of which only this process exists. Collectives return at once and send nothing."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from lowtide._torch.distributed import simulated_collectives_counted, start_absent_processes
from lowtide.errors import RehearsalError

gpus_per_node = [1]
"""Stack of the number of GPUs that a script sees on its machine. The last entry applies."""

GPUS_PER_NODE = 8
"""Number of GPUs per machine; fewer if there are fewer processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsentProcesses:
    """The size of a process group, and the rank of this process in it. The other processes may not exist."""

    size: int
    rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise RehearsalError(
                f"there is no rank {self.rank} of {self.size} processes. Give at least one process, and a rank from "
                "0 to the number of processes minus 1."
            )

    @property
    def per_node(self) -> int:
        """Number of processes per machine."""
        return min(self.size, GPUS_PER_NODE)

    def environment(self) -> dict[str, str]:
        """Return the variables that torchrun sets. LOCAL_RANK is always 0, because the estimated GPU is `cuda:0`."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": str(self.per_node),
            "GROUP_RANK": str(self.rank // self.per_node),
            "GROUP_WORLD_SIZE": str(-(-self.size // self.per_node)),
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "estimate",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Set torchrun's environment variables in this block, and destroy the process group after it."""
        if torch.distributed.is_initialized():
            raise RehearsalError(
                "this process already belongs to a process group, so no other processes can be simulated in it.\n  "
                "Estimate in a process without a process group."
            )
        gpus_per_node.append(self.per_node)
        with patch.dict(os.environ, self.environment()), _cuda_meshes_on_cpu(), simulated_collectives_counted():
            try:
                yield
            finally:
                gpus_per_node.pop()
                if torch.distributed.is_initialized():
                    torch.distributed.destroy_process_group()

    def start(self, start: Callable[..., None]) -> None:
        """Start the simulated process group by calling `start`, which is `torch.distributed.init_process_group`."""
        start_absent_processes(start, self.rank, self.size)


@contextlib.contextmanager
def absent_processes(size: int, rank: int = 0) -> Iterator[None]:
    """Simulate a group of `size` processes in this block. This process has the rank `rank`; the others do not exist.

    Models can be sharded and wrapped as under torchrun, on the CPU or on the meta device, and their steps estimated:
    `lowtide.estimate(..., device="8 x h100-80")`. With real parameters, `lowtide.rehearse` and `lowtide.plan` make the
    plan that one of `size` real processes would make. Collective operations send nothing, so computed values differ
    from those of real training.

    Args:
        size: Number of processes in the group.
        rank: This process's rank.

    Raises:
        RehearsalError: If this process already has a process group, or there is no such rank.

    Example:
        >>> import torch, lowtide
        >>> with lowtide.absent_processes(8, rank=3):
        ...     torch.distributed.get_rank(), torch.distributed.get_world_size()
        (3, 8)
    """
    processes = AbsentProcesses(size=size, rank=rank)
    with processes.around():
        processes.start(torch.distributed.init_process_group)
        yield


def read_process_group(n_gpus: int) -> AbsentProcesses | None:
    """Return the size of this process's group and its rank; None for a single process.

    Raises RehearsalError unless `n_gpus` is 1 or that size.
    """
    is_one_of_them = torch.distributed.is_available() and torch.distributed.is_initialized()
    size = torch.distributed.get_world_size() if is_one_of_them else 1
    if n_gpus not in (1, size):
        raise RehearsalError(
            f"{n_gpus} GPUs need {n_gpus} processes, and this process belongs to a group of {size}.\n  "
            f"Shard the model and estimate it inside `with lowtide.absent_processes({n_gpus})`, or run `lowtide "
            "estimate` on the script."
        )
    return AbsentProcesses(size=size, rank=torch.distributed.get_rank()) if size > 1 else None


@contextlib.contextmanager
def _cuda_meshes_on_cpu() -> Iterator[None]:
    """Create CUDA device meshes on the CPU in this block if there is no GPU, because tensors are on the CPU, too."""
    if torch.cuda.is_available() or not torch.distributed.is_available():
        yield
        return
    from torch.distributed import device_mesh

    def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def made(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            make(self, "cpu", *args, **kwargs)

        return made

    with patch.object(device_mesh.DeviceMesh, "__init__", on_cpu(device_mesh.DeviceMesh.__init__)):
        yield
