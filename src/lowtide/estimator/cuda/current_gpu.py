"""State of the GPU rehearsal in progress, shared by the code that simulates the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor

from lowtide.memory.gpu_specs import GpuSpec

NAME = "cudalike"
"""Device type of tensors on the rehearsed GPU."""

CUDA = torch.device("cuda", 0)
"""Value of `tensor.device` that Python code sees for tensors on the rehearsed GPU."""

CAPABILITY_ASSUMED = (8, 0)
"""Compute capability that is assumed for a GPU of which only the memory is known."""


class NullStream:
    """A stream or an event on which nothing happens."""

    device, device_index, device_type, stream_id, event_id, cuda_stream, cuda_event, priority = CUDA, *[0] * 7

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def elapsed_time(self, end: object) -> float:
        """Return one millisecond. It is not 0, because programs divide by the elapsed time."""
        return 1.0

    def query(self) -> bool:
        """Return True, because all work is always complete."""
        return True

    def _nothing(self, *args: Any, **kwargs: Any) -> Any:
        return None

    record = synchronize = wait = wait_stream = wait_event = record_event = _nothing


in_use: list[GpuSpec] = []
"""The GPU that is being estimated; at most one."""


taking: list[Callable[[Tensor], Tensor]] = []
"""Function that moves a CPU tensor to the rehearsed GPU if an operator combines it with GPU tensors; at most one."""


def to_gpu(tensor: Tensor) -> Tensor:
    """Move a CPU tensor to the rehearsed GPU, as for a script that was written without a GPU.

    Return a tensor that is on the GPU or requires a gradient unchanged.
    """
    is_away = tensor.device.type == "cpu" and not tensor.requires_grad
    return taking[0](tensor) if is_away and taking else tensor


unbounded: dict[str, str] = {}
"""Operator -> note on memory whose size only a library knows, in the current or last rehearsal."""

measured: dict[str, str] = {}
"""Operator -> note on a library's memory that was measured on one GPU, in the current or last rehearsal."""

lasting: dict[str, Tensor] = {}
"""Name -> memory that a library allocates once and keeps until the process ends."""

streams = [0]
"""Stack of the numbers of the streams in use; 0 is the default stream."""

emulated: list[str] = []
"""Stack of operators that are computed by calls of other operators. Allocations are attributed to the last one."""


@contextlib.contextmanager
def emulates(op: str) -> Iterator[None]:
    """Attribute allocations in this block to the operator of this name."""
    emulated.append(op)
    try:
        yield
    finally:
        emulated.pop()


def capability() -> tuple[int, int]:
    """Return the compute capability of the rehearsed GPU, or an assumed one if it is unknown.

    A rehearsal must be running.
    """
    return in_use[0].capability or CAPABILITY_ASSUMED
