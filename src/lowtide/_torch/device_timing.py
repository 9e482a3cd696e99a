"""Timing on asynchronous devices."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import NamedTuple
from unittest.mock import patch

import torch

CYCLES_PER_MS = 2_000_000
"""Upper bound of a GPU's clock cycles in a millisecond: a sleep of so many cycles takes a millisecond or a little
longer.
"""


def accelerator_in_use() -> bool:
    """Return True if the machine has an accelerator and this process has used it.

    Any other query would initialize the accelerator.
    """
    if not torch.accelerator.is_available():
        return False
    used = getattr(torch.get_device_module(), "is_initialized", None)
    return used is None or bool(used())


_simulated: dict[str, Callable[[], float]] = {}
"""Clocks of simulated devices, by device type."""


def simulated_clock(device_type: str, clock: Callable[[], float]) -> contextlib.AbstractContextManager[object]:
    """Make `now_ms` return `clock()` for devices of the type `device_type` inside this `with` block."""
    return patch.dict(_simulated, {device_type: clock})


def now_ms(device: torch.device | None = None) -> float:
    """Wait until `device`, an accelerator, has finished all its queued work; return the time of a clock in
    milliseconds.

    Without the wait, only the launch of GPU work would be measured. For None or the CPU, the wait is for the current
    device of the accelerator in use, if any.
    """
    if device is not None and device.type in _simulated:
        return _simulated[device.type]()
    if accelerator_in_use():
        torch.accelerator.synchronize(None if device is None or device.type == "cpu" else device)
    return time.perf_counter() * 1000


def has_two_clocks(device: torch.device) -> bool:
    """Return True if `device` runs work asynchronously, so that the time to launch work is not the time to run it."""
    return device.type == "cuda"


def occupy(milliseconds: float) -> None:
    """Queue a kernel that sleeps for `milliseconds`, so that work queued behind it is launched before it can begin.
    Relies on internals of torch 2.13, present since 1.0.
    """
    torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))  # type: ignore[no-untyped-call]


def make_timing_event() -> torch.cuda.Event:
    """Return a new CUDA event that records its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call,no-any-return,unused-ignore]


class Times(NamedTuple):
    """Milliseconds that some work took: `host` to launch it, `device` to run it."""

    host: float
    device: float


class Stopwatch:
    """Stopwatch for the host time and the device time of the work between `start` and `stop`.

    Device time is measured between two events that are queued behind other work, so it leaves out launches. If host and
    device are one resource, as on a CPU, all time counts as device time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_two_clocks = has_two_clocks(device)
        self._began = 0.0

    def start(self, *, ahead_ms: float = 0.2) -> None:
        """Start, and keep the device busy for `ahead_ms`: long enough for the host to launch the work."""
        if self._has_two_clocks:
            self._first, self._last = make_timing_event(), make_timing_event()
            occupy(ahead_ms)
            self._first.record()
            self._began = time.perf_counter() * 1000
        else:
            self._began = now_ms(self._device)

    def stop(self) -> Times:
        """Wait until the device is done, and return the times since `start`."""
        if not self._has_two_clocks:
            return Times(0.0, now_ms(self._device) - self._began)
        host_ms = time.perf_counter() * 1000 - self._began
        self._last.record()
        self._last.synchronize()
        return Times(host_ms, self._first.elapsed_time(self._last))
