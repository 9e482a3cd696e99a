"""Measure host-device copy bandwidth."""

from __future__ import annotations

import torch

from lowtide.state.step_outcome import is_out_of_memory

PROBE_BYTES = 2**24
"""Bytes that are copied for the measurement: few, because a GPU may be nearly full, but enough to take about a
millisecond.
"""
RUNS = 3


def host_bandwidth(device: torch.device | str) -> float | None:
    """Return the bandwidth in bytes per ms of the slower direction, to or from pinned memory.

    None for the CPU, and where no memory is left to measure it.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):  # events are recorded in its streams
        try:
            host = torch.empty(PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
            data = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
        except Exception as error:
            if is_out_of_memory(error):
                return None
            raise
        return PROBE_BYTES / max(_time_copy(host, data), _time_copy(data, host))


def _time_copy(to: torch.Tensor, source: torch.Tensor) -> float:
    """Return the shortest time of `RUNS` copies in ms; the first copy pays for setup."""
    took = list[float]()
    for _ in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        to.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end))
    return min(took)
