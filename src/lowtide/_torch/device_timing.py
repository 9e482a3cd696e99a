"""Time that work took, on devices that work while Python goes on."""

from __future__ import annotations

import time

import torch


def accelerator_in_use() -> bool:
    """Whether there is an accelerator and something has been done on it: to ask it anything else would set it up."""
    if not torch.accelerator.is_available():
        return False
    used = getattr(torch.get_device_module(), "is_initialized", None)
    return used is None or bool(used())


def now_ms(device: torch.device | None = None) -> float:
    """Milliseconds on a clock that is read when `device`, an accelerator, has done all that it was given.

    Without the wait, work on a GPU would seem to take as long as asking for it. Without a device, and with the CPU for
    one, the wait is for the current device of the accelerator in use, if any.
    """
    if accelerator_in_use():
        torch.accelerator.synchronize(None if device is None or device.type == "cpu" else device)
    return time.perf_counter() * 1000
