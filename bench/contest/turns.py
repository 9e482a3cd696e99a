"""Times of several steps that take turns, so that all of them see the same weather on the machine.

In a round each runs one step. The steps of one are so minutes apart, and a bad minute meets each of them but once.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from contest.pieces import Taken, undisturbed

SETTLED = 0.01
"""Times are, when one more round moves none of their ratios to the plain step's by more."""


class Entrant(Protocol):
    def taken(self) -> Taken: ...


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of an undisturbed step and of a plain one in the same rounds, how many, and page faults in the last."""

    seconds: float
    plain_seconds: float
    turns: int
    faults: int


@dataclass(slots=True, eq=False)
class AlternatingModels:
    """Steps in rounds: of the plain step, and of whatever is entered beside it by a name of its own."""

    plain: Entrant
    _others: dict[Hashable, Entrant] = field(default_factory=dict)
    _steps: dict[Hashable, list[Taken]] = field(default_factory=dict)
    _faults: dict[Hashable, int] = field(default_factory=dict)

    def enter(self, name: Hashable, entrant: Entrant) -> None:
        """What is entered by a known name already stays as it is."""
        self._others.setdefault(name, entrant)

    def take(self, rounds: int) -> None:
        """So many rounds of all."""
        for _ in range(rounds):
            self._round(self._others)

    def take_until_settled(self, names: Iterable[Hashable], most: int) -> None:
        """Further rounds of these and of the plain step, until their times are SETTLED or each has had `most`."""
        some = list(dict.fromkeys(names))
        known = self._ratios(some)
        while some and len(self._steps[None]) < most:
            self._round(some)
            ratios = self._ratios(some)
            if known and max(abs(now - then) for now, then in zip(ratios, known, strict=True)) <= SETTLED:
                break
            known = ratios

    def timed(self, name: Hashable) -> Timed | None:
        """None for no turns. The plain step's rounds are the same, since nobody joins later."""
        steps = self._steps.get(name)
        if not steps:
            return None
        plain = self._steps[None][: len(steps)]
        return Timed(undisturbed(steps), undisturbed(plain), len(steps), self._faults[name])

    def _ratios(self, names: list[Hashable]) -> list[float]:
        return [timed.seconds / timed.plain_seconds for timed in map(self.timed, names) if timed]

    def _round(self, names: Iterable[Hashable]) -> None:
        """One step of each; every second round goes backwards."""
        gc.collect()
        order = [None, *names]
        for name in reversed(order) if len(self._steps.get(None, ())) % 2 else order:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            taken = (self.plain if name is None else self._others[name]).taken()
            self._faults[name] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            self._steps.setdefault(name, []).append(taken)
