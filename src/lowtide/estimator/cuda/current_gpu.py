"""The GPU that is being rehearsed, for those who behave by it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lowtide.memory.gpu_specs import GpuSpec

NAME = "cudalike"
"""Type of the device that tensors on the GPU have."""

CUDA = torch.device("cuda", 0)
"""The device that they show to Python code."""

CAPABILITY_ASSUMED = (8, 0)
"""Of a GPU of which only the memory was given."""

in_use: list[GpuSpec] = []
"""At most one."""


taking: list[Callable[[Tensor], Tensor]] = []
"""At most one: how a tensor on the CPU that meets others on the GPU is taken to be there."""


def there(tensor: Tensor) -> Tensor:
    """A tensor that a script without a GPU has on the CPU, put on the GPU; any other as it is."""
    is_away = tensor.device.type == "cpu" and not tensor.requires_grad
    return taking[0](tensor) if is_away and taking else tensor


unbounded: dict[str, str] = {}
"""What only a library knows of the memory that it takes, in words, by operator; of the GPU in use, or the last one."""

measured: dict[str, str] = {}
"""What a library takes by a measurement on one GPU, in words, by operator; likewise."""

lasting: dict[str, Tensor] = {}
"""What a library takes once and keeps as long as the process runs, by a name of it."""

standing_in: list[str] = []
"""The operators that other ones stand in for, now: what these make is the last one's."""


@contextlib.contextmanager
def stands_in_for(op: str) -> Iterator[None]:
    """What is made in this block is made by the operator of this name."""
    standing_in.append(op)
    try:
        yield
    finally:
        standing_in.pop()


def capability() -> tuple[int, int]:
    """The compute capability to behave by. Only while a GPU is in use."""
    return in_use[0].capability or CAPABILITY_ASSUMED
