"""Times of several steps that take turns, so that disturbances of the machine affect all of them alike.

In each round every step runs once. Two runs of the same step are minutes apart, so that a bad minute affects each step
at most once.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from contest.pieces import Taken, undisturbed

SETTLED = 0.01
"""Largest change of any ratio to the plain step's time in one more round for times to count as settled."""


class Entrant(Protocol):
    def taken(self) -> Taken: ...


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of an undisturbed step and of a plain step in the same rounds, their number, and page faults in the last
    round.
    """

    seconds: float
    plain_seconds: float
    turns: int
    faults: int


@dataclass(slots=True, eq=False)
class AlternatingModels:
    """Steps that run in rounds: the plain step, and further steps, each with a name."""

    plain: Entrant
    _others: dict[Hashable, Entrant] = field(default_factory=dict)
    _steps: dict[Hashable, list[Taken]] = field(default_factory=dict)
    _faults: dict[Hashable, int] = field(default_factory=dict)

    def enter(self, name: Hashable, entrant: Entrant) -> None:
        """Add an entrant under `name`, unless the name is known already."""
        self._others.setdefault(name, entrant)

    def take(self, rounds: int) -> None:
        """Run `rounds` rounds of all steps."""
        for _ in range(rounds):
            self._round(self._others)

    def take_until_settled(self, names: Iterable[Hashable], most: int) -> None:
        """Run more rounds of the named steps and the plain step, until times are SETTLED or `most` rounds have run."""
        some = list(dict.fromkeys(names))
        known = self._ratios(some)
        while some and len(self._steps[None]) < most:
            self._round(some)
            ratios = self._ratios(some)
            if known and max(abs(now - then) for now, then in zip(ratios, known, strict=True)) <= SETTLED:
                break
            known = ratios

    def timed(self, name: Hashable) -> Timed | None:
        """Return the times of the step called `name`; None if it had no turn.

        The plain step's times are from the same rounds: every step takes part from the first round on.
        """
        steps = self._steps.get(name)
        if not steps:
            return None
        plain = self._steps[None][: len(steps)]
        return Timed(undisturbed(steps), undisturbed(plain), len(steps), self._faults[name])

    def _ratios(self, names: list[Hashable]) -> list[float]:
        return [timed.seconds / timed.plain_seconds for timed in map(self.timed, names) if timed]

    def _round(self, names: Iterable[Hashable]) -> None:
        """Run one step of each entrant; every second round runs in reverse order."""
        gc.collect()
        order = [None, *names]
        for name in reversed(order) if len(self._steps.get(None, ())) % 2 else order:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            taken = (self.plain if name is None else self._others[name]).taken()
            self._faults[name] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            self._steps.setdefault(name, []).append(taken)
