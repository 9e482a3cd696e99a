"""Times of several steps that take turns, so that all of them see the same weather on the machine."""

from __future__ import annotations

import gc
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from contest.pieces import Taken, undisturbed

SETTLED = 0.01
"""Times are, when one more turn moves none of their ratios to the first entrant's by more."""


class Entrant(Protocol):
    def taken(self) -> Taken: ...


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of an undisturbed step, how many it was found from, and the page faults of the last one."""

    seconds: float
    turns: int
    faults: int


def take_turns(entrants: Sequence[Entrant], least: int, most: int) -> list[Timed | None]:
    """Run one step of each in turns, who begins changes: `least` times, and up to `most` until the times are SETTLED.

    None for no turns.
    """
    steps: list[list[Taken]] = [[] for _ in entrants]
    faults = [0] * len(entrants)
    known: list[float] | None = None
    gc.collect()
    for turn in range(most):
        for place in range(len(entrants)):
            who = (place + turn) % len(entrants)
            before = _faults()
            steps[who].append(entrants[who].taken())
            faults[who] = _faults() - before
        first, *others = (undisturbed(taken) for taken in steps)
        ratios = [other / first for other in others]
        moved = max((abs(now - then) for now, then in zip(ratios, known or ratios, strict=True)), default=0.0)
        if known is not None and turn + 1 >= least and moved <= SETTLED:
            break
        known = ratios
    return [Timed(undisturbed(taken), len(taken), n) if taken else None for taken, n in zip(steps, faults, strict=True)]


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
