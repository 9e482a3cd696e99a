"""Private names of torch: the profiler on the CPU."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    pass


RecordFunction = torch._C._profiler._RecordFunctionFast
"""Puts an event of the given name between the operators that a running profiler records; 0.7 us. 2.13."""

ALLOCATION = "[memory]"
"""Name of the profiler's events for allocations and frees. 2.13, since 1.6."""


def profiler_running() -> bool:
    """Whether any of torch's profilers records, in this thread or in another. 2.13."""
    return bool(torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled)


def profiler_warming_up() -> bool:
    """Whether one of torch's profilers is prepared and not started yet; another one's start would take its place, and
    its own would then end the process (2.13). torch does not say so: its objects are looked through, in some 20 ms.
    """
    inner, outer = torch.autograd.profiler.profile, torch.profiler.profile
    return any(
        (type(found) is inner and found.entered and not found.profiling_start_time_ns)
        # One that accumulates prepares the same inner profiler over and over.
        or (type(found) is outer and found.acc_events and found.current_action is torch.profiler.ProfilerAction.WARMUP)
        for found in gc.get_referrers(inner, outer)
    )


def profiler_roots(profile: torch.autograd.profiler.profile) -> list[Any]:
    """The outermost events that a stopped profiler saw: `.name`, `.start_time_ns`, `.children`. 2.13, since 1.12.

    An ALLOCATION has `.extra_fields.ptr`, `.alloc_size` (negative for a free) and `.device`. The size of a free is that
    of the allocation at that address which a profiler saw last: right within one profile, any number across two.
    """
    results = profile.kineto_results
    return [] if results is None else list(results.experimental_event_tree())
