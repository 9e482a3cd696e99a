"""Timing on asynchronous devices."""

from __future__ import annotations

import time

import torch


def accelerator_in_use() -> bool:
    """Return True if an accelerator exists and has been used; any other query would initialize it."""
    if not torch.accelerator.is_available():
        return False
    used = getattr(torch.get_device_module(), "is_initialized", None)
    return used is None or bool(used())


def now_ms(device: torch.device | None = None) -> float:
    """Return a clock's milliseconds after `device`, an accelerator, has finished all its queued work.

    Without the wait, only the launch of GPU work would be measured. For None or the CPU, the wait is for the current
    device of the accelerator in use, if any.
    """
    if accelerator_in_use():
        torch.accelerator.synchronize(None if device is None or device.type == "cpu" else device)
    return time.perf_counter() * 1000
