"""Axes of a picture: round ticks over a range, and where a value stands between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """From `low` to `high`, both ticks, with one each `step`."""

    low: float
    high: float
    step: float

    @classmethod
    def over(cls, low: float, high: float, step_for: Callable[[float], float], *, parts: int = 5) -> Axis:
        """Over the whole of a range, in no more than so many `parts` and a bit."""
        step = step_for(max((high - low) / parts, high / 1000, 1e-9))
        first = math.floor(low / step)
        return cls(first * step, max(math.ceil(high / step), first + 1) * step, step)

    def ticks(self) -> Iterator[float]:
        return (self.low + i * self.step for i in range(round((self.high - self.low) / self.step) + 1))

    def at(self, value: float) -> float:
        """Where a value stands, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)


def round_step(least: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... that is not below `least`."""
    tens = 10.0 ** math.floor(math.log10(least))
    return next(tens * digit for digit in (1, 2, 5, 10) if tens * digit >= least * (1 - 1e-9))


def byte_step(least: float) -> float:
    """A round number of `byte_unit(least)`."""
    unit = byte_unit(least)
    return round_step(least / unit) * unit


def byte_unit(n_bytes: float) -> int:
    """The largest binary unit that is no more than `n_bytes`."""
    return 1 << 10 * max(0, math.floor(math.log(n_bytes, 1024)))
