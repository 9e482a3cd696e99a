"""Boundaries between training steps, and the choice of those at which memory is inspected."""

from __future__ import annotations

import os
import time

import torch

FIRST = 4
"""Number of boundaries at the start at which memory is always inspected. Later, memory is inspected at powers of two,
and where it has grown.
"""

MOST_TIME = 0.01
"""Share of the time since the watch began that later inspections may take."""

_LEAST_GROWTH = 2**20
_BETWEEN = 0.002


class StepBoundaries:
    """Detector of steps. A step begins when a line calls a model again and weights were updated in between.

    The rule also works in loops with several models, losses or optimizers, and with accumulated gradients. A graph may
    live from one model's call to another's, but not until the next step.
    """

    def __init__(self) -> None:
        self.first_number = 0
        """Sequence number of the first autograd node after the last update."""
        self.n_updates = 0
        """Number of updates of weights."""
        self._called: dict[int, int] = {}  # place -> updates before its last call
        self._n = 0
        self._began = time.perf_counter()
        self._spent = 0.0
        self._level = 0
        self._last_read_s = 0.0
        self._exempt = 0.0

    def stepped(self, next_number: int) -> None:
        """Record an update of the weights. `next_number` is the sequence number of the next autograd node."""
        self.n_updates += 1
        self.first_number = next_number

    def called(self, key: int) -> None:
        """Record that the line identified by `key` calls a model."""
        self._called[key] = self.n_updates

    def count_step(self, key: int) -> bool:
        """Count a step and return True if a call from the line identified by `key` begins a new one."""
        before = self._called.get(key)
        if before is None or before == self.n_updates:
            return False
        self._called.clear()
        self._n += 1
        return True

    def is_due(self) -> bool:
        """Return True if memory should be inspected at this boundary."""
        if self._n <= FIRST:
            return True
        is_power_of_two = not self._n & (self._n - 1)
        return self.has_time() and (is_power_of_two or self._has_grown())

    def has_time(self) -> bool:
        """Return True if inspections, except those of the first steps, have taken at most a share MOST_TIME of time."""
        return self._spent - self._exempt <= MOST_TIME * (time.perf_counter() - self._began)

    def _has_grown(self) -> bool:
        """Return True if memory in use has grown since the last inspection.

        Memory is read at most every _BETWEEN seconds; in between, the result is False.
        """
        now = time.perf_counter()
        if now - self._last_read_s < _BETWEEN:
            return False
        self._last_read_s = now
        return _level() - self._level > _LEAST_GROWTH

    def inspected(self, seconds: float) -> None:
        """Record the time that an inspection took, and the memory in use now."""
        self._spent += seconds
        if self._n <= FIRST:
            self._exempt = self._spent
        self._level = _level()


def _level() -> int:
    """Return the bytes in use by torch on CUDA, or by the process if CUDA is not in use; 0 if unknown."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.memory_allocated()
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
