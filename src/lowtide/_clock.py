"""Time that work took, on devices that work while Python goes on."""

from __future__ import annotations

import time

import torch


def now_ms() -> float:
    """Milliseconds on a clock that is read when the accelerator in use, if any, has done all that it was given.

    Without the wait, work on a GPU would seem to take as long as asking for it.
    """
    if torch.accelerator.is_available():
        used = getattr(torch.get_device_module(), "is_initialized", None)
        if used is None or used():
            torch.accelerator.synchronize()
    return time.perf_counter() * 1000
