"""The plans found so far of which none is beaten by another, and the order among them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lowtide.planner.fates import Choice
from lowtide.planner.sweeping import Sweep


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


class Span(NamedTuple):
    """What a plan may cost: between two others, in time and in FLOPs."""

    least: Found
    most: Found

    def holds(self, extra_ms: float, extra_flops: int) -> bool:
        return (
            self.least.extra_ms <= extra_ms <= self.most.extra_ms
            and self.least.extra_flops <= extra_flops <= self.most.extra_flops
        )

    def is_narrow(self, share: float) -> bool:
        """Whether the two ends differ by no more than `share` of what they cost."""
        least, most = self.least, self.most
        return (most.extra_ms - least.extra_ms <= share * most.extra_ms) and (
            most.extra_flops - least.extra_flops <= share * most.extra_flops
        )


class Pool:
    """Choices of which none is beaten by another in peak, time and FLOPs at once. Of equal ones the first stays."""

    def __init__(self) -> None:
        self.found: list[Found] = []

    def add(self, choice: Choice, sweep: Sweep) -> None:
        """Take `choice` in unless one in here is as good in all, and drop those that it beats."""
        peak, ms, flops = sweep.peak, sweep.extra_ms, sweep.extra_flops
        if not any(f.peak <= peak and f.extra_ms <= ms and f.extra_flops <= flops for f in self.found):
            self.found = [f for f in self.found if f.peak < peak or f.extra_ms < ms or f.extra_flops < flops]
            self.found.append(Found(peak, ms, flops, choice))

    def best(self, limit: int, span: Span) -> Found | None:
        """The cheapest choice in here with a peak of at most `limit` that costs what `span` allows, or None."""
        fitting = (f for f in self.found if f.peak <= limit and span.holds(f.extra_ms, f.extra_flops))
        return min(fitting, key=lambda found: found.cost, default=None)


def staircase(found: Iterable[Found], span: Span) -> list[Found]:
    """Of `found` and `span` a chain with ever larger peaks and ever lower costs, in time and in FLOPs."""
    chain = [span.most]
    for each in sorted(found, key=lambda each: (each.peak, each.cost)):
        less = Span(span.least, chain[-1])
        if each.peak > chain[-1].peak and each.cost < chain[-1].cost and less.holds(each.extra_ms, each.extra_flops):
            chain.append(each)
    return chain
