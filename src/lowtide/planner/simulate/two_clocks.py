"""Compute the time of a step whose host launches work that a device does later: two clocks that run side by side.

At each position the host takes `host[i]` to launch the position's work. The device takes `device[i]` to do it, once it
is launched and all earlier work is done:

    launched[i] = launched[i - 1] + host[i]
    done[i]     = max(done[i - 1], launched[i]) + device[i]

A launch is hidden while the device is behind, and device time is hidden while the host is. Unrolled, the step takes as
long as the longest path that follows the host up to some position k, and the device from there on:

    step = max over k of  host[0] + ... + host[k] + device[k] + ... + device[end]

So the time is a maximum of sums: monotone and convex in all times, which gives the rows of `solve/linear_program.py`.
Within a position, all work is assumed to be launched before the device begins. The host is assumed never to wait for
the device: in a step that reads results back (`loss.item()`) it does, but these waits are not modelled.

Times are whole nanoseconds: equal work in another order takes exactly the same time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lowtide.planner.records import StepClocks

Ints = npt.NDArray[np.int64]
NS_PER_MS = 1_000_000


def round_to_ns(ms: float) -> int:
    """Return milliseconds as whole nanoseconds."""
    return round(ms * NS_PER_MS)


def compute_step_ns(host: Ints, device: Ints) -> int:
    """Return the nanoseconds of a step, given the nanoseconds of host and device at each position."""
    return int(compute_hand_overs(host, device).max())


def compute_hand_overs(host: Ints, device: Ints) -> Ints:
    """Return, for each position, the ns of a step in which the host works up to that position, and then the device."""
    ways: Ints = host.cumsum() + device[::-1].cumsum()[::-1]
    return ways


class TwoClocks:
    """Host and device times of a plain step, to which the work of a plan is added."""

    def __init__(self, clocks: StepClocks) -> None:
        self.host = np.array([round_to_ns(ms) for ms in clocks.host_ms], np.int64)
        self.device = np.array([round_to_ns(ms) for ms in clocks.device_ms], np.int64)
        self.plain_ns = compute_step_ns(self.host, self.device)
        self.kept_slot_ns = round_to_ns(clocks.kept_slot_ms)
        self.packed_slot_ns = round_to_ns(clocks.packed_slot_ms)

    def extra_ms(self, host: Ints, device: Ints) -> float:
        """Return the extra milliseconds of the step if `host` and `device` are added to the nanoseconds of each
        position.
        """
        return (compute_step_ns(self.host + host, self.device + device) - self.plain_ns) / NS_PER_MS

    def find_critical_position(self) -> int:
        """Return the last position at which the plain step's longest path moves from the host to the device."""
        ways = compute_hand_overs(self.host, self.device)
        return int(np.flatnonzero(ways == ways.max())[-1])
