"""malloc's settings, the same for every cell: freed pages stay with the process.

By default glibc gives blocks of 32 MiB and more back to the system when they are freed, and gets them again from it,
page by page, at the next step. On a CPU the page faults of that can cost more than making a tensor again, and it is
those who free and allocate most, plans and checkpointing, that pay. With these settings the main heap serves all sizes
and keeps its pages, as the caching allocator does on a GPU. They are read when a process starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

SETTINGS: Mapping[str, str] = {
    "MALLOC_MMAP_MAX_": "0",  # no block gets a mapping of its own
    "MALLOC_TRIM_THRESHOLD_": "1099511627776",  # the end of the heap is not given back before 1 TiB is free there
    "MALLOC_TOP_PAD_": "268435456",  # and the heap grows by 256 MiB at once
    "MALLOC_ARENA_MAX": "1",  # threads share it
}


def environment() -> dict[str, str]:
    """This process's environment with SETTINGS in it, for a child process."""
    return {**os.environ, **SETTINGS}


def in_force() -> bool:
    """Whether this process was started with SETTINGS."""
    return all(os.environ.get(name) == value for name, value in SETTINGS.items())


def warm_up(n_bytes: int) -> None:
    """Write to so much memory and give it back, so that no step that is timed is the first to touch it."""
    assert in_force(), "only with these settings it stays with the process"
    torch.ones(n_bytes, dtype=torch.uint8)
