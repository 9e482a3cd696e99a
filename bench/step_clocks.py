"""Where the time of a step goes: host and device apart, the kernels, and the Python calls.

Imported by `on_gpu.py`. On a CPU, host and device are one resource: a step then has its time and its Python calls.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lowtide._torch.device_timing import occupy, timing_event

LEAD = 1.5
"""Time that the device is kept busy before a step, in times of the step itself: the host launches it all by then."""
QUEUED = 1000
"""Launches that a GPU queues at most: of a step with more kernels some device time is that of waiting for launches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of one step in milliseconds, and counts."""

    wall_ms: float
    """From one synchronization to the next."""
    pipelined_ms: float
    """A step in a row of steps without synchronization."""
    host_ms: float
    """Until the step has returned: all is launched."""
    device_ms: float | None
    """Between two events, where the host is far ahead; None on a CPU."""
    kernel_ms: float | None
    """Sum of the kernels' own times."""
    n_kernels: int | None
    n_calls: int
    """Calls of Python and C functions that the interpreter reports in the thread that runs the step."""


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_times(run: Callable[[], object], device: torch.device, *, runs: int = 5) -> StepTimes:
    """Measure `run`, one step: medians of `runs`, after two to warm up."""
    for _ in range(2):
        run()
    wall, host = [], []
    for _ in range(runs):
        synchronize(device)
        began = time.perf_counter()
        run()
        host.append(time.perf_counter() - began)
        synchronize(device)
        wall.append(time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(runs):
        run()
    synchronize(device)
    pipelined_ms = (time.perf_counter() - began) * 1e3 / runs
    wall_ms = statistics.median(wall) * 1e3
    kernel_ms, n_kernels = kernels(run) if device.type == "cuda" else (None, None)
    return StepTimes(
        wall_ms=wall_ms,
        pipelined_ms=pipelined_ms,
        host_ms=statistics.median(host) * 1e3,
        device_ms=device_ms(run, device, wall_ms) if device.type == "cuda" else None,
        kernel_ms=kernel_ms,
        n_kernels=n_kernels,
        n_calls=python_calls(run),
    )


def device_ms(run: Callable[[], object], device: torch.device, lead_ms: float, *, runs: int = 3) -> float:
    """Measure the device's time for `run` between two events behind a kernel that gives the host a lead."""
    times = []
    for _ in range(runs):
        first, last = timing_event(), timing_event()
        synchronize(device)
        occupy(LEAD * lead_ms)
        first.record()
        run()
        last.record()
        synchronize(device)
        times.append(float(first.elapsed_time(last)))
    return statistics.median(times)


def kernels(run: Callable[[], object]) -> tuple[float, int]:
    """Return the milliseconds of all kernels of `run`, and their number."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    of_device = [event for event in recorded.events() or () if str(event.device_type).endswith("CUDA")]
    return sum(float(event.device_time_total) for event in of_device) / 1e3, len(of_device)


def python_calls(run: Callable[[], object]) -> int:
    """Count the calls that `run` makes from Python, or into it."""
    n_calls = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal n_calls
        n_calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return n_calls
