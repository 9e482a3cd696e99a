"""Boundaries between steps, and the choice of those to inspect."""

from __future__ import annotations

import os
import time

import torch

FIRST = 4
"""Number of boundaries at the start that are all inspected. Later inspections are at powers of two, and where memory
has grown.
"""

MOST_TIME = 0.01
"""Share of the time since the watch began that later inspections may take."""

_LEAST_GROWTH = 2**20
_BETWEEN = 0.002


class StepBoundaries:
    """Detector of steps: a step begins when a line calls a model again and weights were updated in between.

    This holds for loops with several models, losses, accumulation or optimizers: a graph may live from one model's call
    to another's, but not from one round of the loop to the next.
    """

    def __init__(self) -> None:
        self.first_number = 0
        """Number of the first graph node after the last update."""
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
        """Record an update of the weights; `next_number` is the number of the next graph node."""
        self.n_updates += 1
        self.first_number = next_number

    def called(self, key: int) -> None:
        """Record that a model is called at the place `key`."""
        self._called[key] = self.n_updates

    def count_step(self, key: int) -> bool:
        """Count a step if a call at the place `key` begins a new one; return True if so."""
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
        """Return True if inspections after the first have taken no more than their allowed share of the time so far."""
        return self._spent - self._exempt <= MOST_TIME * (time.perf_counter() - self._began)

    def _has_grown(self) -> bool:
        """Return True if memory has grown since the last inspection; memory is read at most every _BETWEEN seconds."""
        now = time.perf_counter()
        if now - self._last_read_s < _BETWEEN:
            return False
        self._last_read_s = now
        return _level() - self._level > _LEAST_GROWTH

    def inspected(self, seconds: float) -> None:
        """Record the time that an inspection took, and the memory in use after it."""
        self._spent += seconds
        if self._n <= FIRST:
            self._exempt = self._spent
        self._level = _level()


def _level() -> int:
    """Return the bytes in use: by torch on CUDA, else by the process; 0 where no cheap query exists."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.memory_allocated()
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
