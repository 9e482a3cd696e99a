"""Settings of malloc, the same for every measurement: freed pages stay with the process.

By default glibc returns blocks of 32 MiB and more to the system when they are freed, and gets them back, page by page,
in the next step. On a CPU these page faults can cost more than recomputing a tensor. The ways that free and allocate
most, plans and checkpointing, pay for them. With these settings the main heap serves all sizes and keeps its pages, as
the caching allocator does on a GPU. glibc reads the settings when a process starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

SETTINGS: Mapping[str, str] = {
    "MALLOC_MMAP_MAX_": "0",  # no block gets its own mapping
    "MALLOC_TRIM_THRESHOLD_": "1099511627776",  # the heap's end is not returned before 1 TiB of it is free
    "MALLOC_TOP_PAD_": "268435456",  # the heap grows by 256 MiB at once
    "MALLOC_ARENA_MAX": "1",  # threads share one heap
}


def environment() -> dict[str, str]:
    """Return this process's environment with SETTINGS added, for a child process."""
    return {**os.environ, **SETTINGS}


def in_force() -> bool:
    """Return True if this process was started with SETTINGS."""
    return all(os.environ.get(name) == value for name, value in SETTINGS.items())


def warm_up(n_bytes: int) -> None:
    """Write to `n_bytes` of memory and free it, so that no timed step is the first to touch its pages."""
    assert in_force(), "only with these settings it stays with the process"
    torch.ones(n_bytes, dtype=torch.uint8)
