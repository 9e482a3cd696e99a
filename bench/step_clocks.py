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

from lowtide._torch.device_timing import make_timing_event, occupy

LEAD = 1.5
"""Time that the device is kept busy before a step, in multiples of the step's time: by then the host has launched it
all.
"""
QUEUED = 1000
"""Largest number of launches that a GPU queues: with more kernels in a step, device time includes waiting for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of one step in milliseconds, and counts of kernels and calls."""

    wall_ms: float
    """Time from one synchronization to the next."""
    pipelined_ms: float
    """Time per step in a series of steps without synchronization."""
    host_ms: float
    """Time until the step's code returns, when all kernels are launched."""
    device_ms: float | None
    """Time between two events on the device while the host is far ahead; None on a CPU."""
    kernel_ms: float | None
    """Sum of the times of all kernels."""
    n_kernels: int | None
    n_calls: int
    """Calls of Python and C functions that the interpreter reports in the thread that runs the step."""


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_step_times(run: Callable[[], object], device: torch.device, *, runs: int = 5) -> StepTimes:
    """Measure the times of `run`, one step: medians of `runs` runs, after two to warm up."""
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
        n_calls=count_python_calls(run),
    )


def device_ms(run: Callable[[], object], device: torch.device, lead_ms: float, *, runs: int = 3) -> float:
    """Measure the device's time for `run` between two events behind a kernel that gives the host a lead."""
    times = []
    for _ in range(runs):
        first, last = make_timing_event(), make_timing_event()
        synchronize(device)
        occupy(LEAD * lead_ms)
        first.record()
        run()
        last.record()
        synchronize(device)
        times.append(float(first.elapsed_time(last)))
    return statistics.median(times)


def kernels(run: Callable[[], object]) -> tuple[float, int]:
    """Measure the time of all kernels of `run` in milliseconds, and count them."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    of_device = [event for event in recorded.events() or () if str(event.device_type).endswith("CUDA")]
    return sum(float(event.device_time_total) for event in of_device) / 1e3, len(of_device)


def count_python_calls(run: Callable[[], object]) -> int:
    """Count the calls of Python and C functions that the interpreter reports while `run` runs."""
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
