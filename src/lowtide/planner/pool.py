"""The plans found so far of which none is beaten by another, in peak and in extra time at once."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from lowtide.planner.predict import Choice, Sweep


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """One choice and what it needs. `peak` is in bytes beyond `static`."""

    peak: int
    extra_ms: float
    extra_flops: int
    choice: Choice

    @property
    def cost(self) -> tuple[float, int]:
        """What is compared: time, and FLOPs between what takes the same time."""
        return self.extra_ms, self.extra_flops


class Pool:
    """Choices by peak; each costs less than all with a smaller peak. Of equal ones the first that came stays."""

    def __init__(self) -> None:
        self.found: list[Found] = []

    def add(self, choice: Choice, sweep: Sweep) -> None:
        """Take `choice` in unless one in here is as good in both, and drop those that it beats."""
        new = Found(sweep.peak, sweep.extra_ms, sweep.extra_flops, choice)
        at = bisect.bisect_right(self.found, new.peak, key=lambda found: found.peak)
        if at and self.found[at - 1].cost <= new.cost:
            return
        end = at
        while end < len(self.found) and self.found[end].cost >= new.cost:
            end += 1
        start = at - 1 if at and self.found[at - 1].peak == new.peak else at
        self.found[start:end] = [new]

    def best(self, limit: int, *, at_least: tuple[float, int] = (0.0, 0)) -> Found | None:
        """The cheapest choice with a peak of at most `limit` that costs at least `at_least`, or None.

        More `limit` never gives a costlier one.
        """
        at = bisect.bisect_right(self.found, limit, key=lambda found: found.peak)
        while at and self.found[at - 1].cost < at_least:
            at -= 1
        return self.found[at - 1] if at else None
