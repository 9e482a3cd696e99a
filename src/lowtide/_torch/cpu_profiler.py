"""Private names of torch: the profiler on the CPU."""

from __future__ import annotations

from typing import Any

import torch

RecordFunction = torch._C._profiler._RecordFunctionFast
"""Context manager that records an event of the given name in a running profiler; it costs 0.7 us. Read in torch 2.13.
"""

ALLOCATION = "[memory]"
"""Name of the profiler's events for allocations and frees. Read in torch 2.13; present since 1.6."""

COMPILED = "## Call CompiledFxGraph "
"""Beginning of the names of events for calls of inductor's graphs, before the graph's hash. Read in torch 2.13."""


PROFILERS: tuple[type, ...] = (torch.autograd.profiler.profile, torch.profiler.profile)
"""Classes of torch's profilers; the second one uses the first. Read in torch 2.13."""


def is_profiler_running() -> bool:
    """Return True if any of torch's profilers is recording, in any thread. Relies on internals of torch 2.13."""
    return bool(torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled)


def is_warming_up(profiler: Any) -> bool:
    """Return True if `profiler`, an instance of one of the classes PROFILERS, is prepared but not started yet.

    Another profiler that starts now would take its place, and the prepared profiler's own start would then end the
    process (torch 2.13). torch has no query for this, so each live profiler object has to be asked.
    """
    if isinstance(profiler, torch.autograd.profiler.profile):
        return getattr(profiler, "entered", False) and not profiler.profiling_start_time_ns
    # A profiler that accumulates prepares the same inner profiler repeatedly.
    accumulates = getattr(profiler, "acc_events", False)
    return bool(accumulates and profiler.current_action is torch.profiler.ProfilerAction.WARMUP)


def stop_profiler() -> None:
    """Stop the profiler that this thread has started, and drop its events. Relies on internals of torch 2.13, present
    since 1.12.
    """
    torch._C._autograd._disable_profiler()


def get_profiler_roots(profile: torch.autograd.profiler.profile) -> list[Any]:
    """Return the outermost events of a stopped profiler, which have `.name`, `.start_time_ns` and `.children`.

    An ALLOCATION has `.extra_fields.ptr`, `.alloc_size` (negative for a free) and `.device`. The size of a free is that
    of the last allocation at the address that any profiler saw: correct within one profile, arbitrary across two.
    Relies on internals of torch 2.13, present since 1.12.
    """
    results = profile.kineto_results
    return [] if results is None else list(results.experimental_event_tree())
