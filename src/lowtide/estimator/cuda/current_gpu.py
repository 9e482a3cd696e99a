"""State of the GPU rehearsal in progress, shared by the code that behaves like that GPU."""

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
"""Device that tensors on the rehearsed GPU show to Python code."""

CAPABILITY_ASSUMED = (8, 0)
"""Compute capability assumed for a GPU given only by its memory."""


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
        """Return one millisecond: programs divide by the elapsed time, so it is never 0."""
        return 1.0

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def _nothing(self, *args: Any, **kwargs: Any) -> Any:
        return None

    record = synchronize = wait = wait_stream = wait_event = record_event = _nothing


in_use: list[GpuSpec] = []
"""The GPU that is being estimated; at most one."""


taking: list[Callable[[Tensor], Tensor]] = []
"""Function that moves a CPU tensor to the rehearsed GPU where it meets tensors there; at most one."""


def to_gpu(tensor: Tensor) -> Tensor:
    """Move a CPU tensor of a script that was written without a GPU to the rehearsed GPU; return any other tensor
    unchanged.
    """
    is_away = tensor.device.type == "cpu" and not tensor.requires_grad
    return taking[0](tensor) if is_away and taking else tensor


unbounded: dict[str, str] = {}
"""Notes, by operator, on memory whose size only a library knows; for the GPU in use, or the last one."""

measured: dict[str, str] = {}
"""Notes, by operator, on memory of a library that was measured on one GPU; for the GPU in use, or the last one."""

lasting: dict[str, Tensor] = {}
"""Memory that a library allocates once and keeps until the process ends, by name."""

streams = [0]
"""Stack of the numbers of the streams in use; 0 is the default stream."""

emulated: list[str] = []
"""Stack of operators that are replaced by others while they run; allocations are attributed to the last one."""


@contextlib.contextmanager
def emulates(op: str) -> Iterator[None]:
    """Attribute allocations in this block to the operator of this name."""
    emulated.append(op)
    try:
        yield
    finally:
        emulated.pop()


def capability() -> tuple[int, int]:
    """Return the rehearsed GPU's compute capability, or an assumed one if unknown; a rehearsal must be running."""
    return in_use[0].capability or CAPABILITY_ASSUMED
