"""The Pareto front of the plans found so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lowtide.planner.simulate.assignment import DecisionVector
from lowtide.planner.simulate.memory_sweep import Sweep


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A choice (decisions as flags) with its simulated peak in bytes beyond `static`, extra time and extra FLOPs."""

    peak: int
    extra_ms: float
    extra_flops: int
    choice: DecisionVector

    @classmethod
    def of(cls, choice: DecisionVector, sweep: Sweep) -> Candidate:
        return cls(sweep.peak, sweep.extra_ms, sweep.extra_flops, choice)

    @property
    def cost(self) -> tuple[float, int]:
        """Return the pair by which candidates are ordered: time, then FLOPs."""
        return self.extra_ms, self.extra_flops


class CostRange(NamedTuple):
    """The costs that a choice may have: no less than the candidate `least`, and no more than the candidate `most`."""

    least: Candidate
    most: Candidate

    def contains(self, cost: tuple[float, int]) -> bool:
        return self.least.cost <= cost <= self.most.cost

    def is_narrow(self, share: float) -> bool:
        """Return True if the times of the two ends differ by no more than `share` of the longer time."""
        return self.most.extra_ms - self.least.extra_ms <= share * self.most.extra_ms


class ParetoPool:
    """Simulated choices, none matched or beaten by another in both peak and cost. Among equal choices the first
    stays.
    """

    def __init__(self) -> None:
        self.candidates: list[Candidate] = []

    def add(self, choice: DecisionVector, sweep: Sweep) -> None:
        """Add `choice`, with the peak and cost in `sweep`, unless a choice in the pool is as good in both. Drop choices
        that it beats.
        """
        new = Candidate.of(choice, sweep)
        if not any(f.peak <= new.peak and f.cost <= new.cost for f in self.candidates):
            self.candidates = [f for f in self.candidates if f.peak < new.peak or f.cost < new.cost]
            self.candidates.append(new)

    def best(self, limit: int, span: CostRange) -> Candidate | None:
        """Return the cheapest choice with a peak of at most `limit` and a cost within `span`, or None."""
        fitting = (f for f in self.candidates if f.peak <= limit and span.contains(f.cost))
        return min(fitting, key=lambda candidate: candidate.cost, default=None)


def build_pareto_front(candidates: Iterable[Candidate], span: CostRange) -> list[Candidate]:
    """Return `span.most`, and then the candidates within `span` with ever larger peaks and ever lower costs."""
    chain = [span.most]
    for candidate in sorted(candidates, key=lambda candidate: (candidate.peak, candidate.cost)):
        if candidate.peak > chain[-1].peak and span.least.cost <= candidate.cost < chain[-1].cost:
            chain.append(candidate)
    return chain
