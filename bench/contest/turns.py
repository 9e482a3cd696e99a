"""Times of several steps that take turns, so that all of them see the same weather on the machine."""

from __future__ import annotations

import gc
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from contest.pieces import Taken, undisturbed


class Entrant(Protocol):
    def taken(self) -> Taken: ...


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of an undisturbed step, how many it was found from, and the page faults of the last one."""

    seconds: float
    turns: int
    faults: int


def take_turns(entrants: Sequence[Entrant], rounds: int) -> list[Timed | None]:
    """Run one step of each, `rounds` times; who begins changes from round to round. None for no rounds."""
    steps: list[list[Taken]] = [[] for _ in entrants]
    faults = [0] * len(entrants)
    gc.collect()
    for turn in range(rounds):
        for place in range(len(entrants)):
            who = (place + turn) % len(entrants)
            before = _faults()
            steps[who].append(entrants[who].taken())
            faults[who] = _faults() - before
    return [Timed(undisturbed(s), len(s), n) if s else None for s, n in zip(steps, faults, strict=True)]


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
