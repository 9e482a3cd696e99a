"""Times of several steps that take turns, so that all of them see the same weather on the machine."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contest.step import Steps


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of each step, and the page faults of the last one."""

    seconds: tuple[float, ...]
    faults: int


def take_turns(
    entrants: Sequence[Steps], rounds: int, *, most: int = 0, is_clear: Callable[[list[float]], bool] = lambda _: True
) -> list[Timed]:
    """Run one step of each, `rounds` times; who begins changes from round to round.

    Then until `is_clear` says of the fastest step of each that they tell enough, up to `most` times.
    """
    seconds: list[list[float]] = [[] for _ in entrants]
    faults = [0] * len(entrants)
    gc.collect()
    for turn in range(max(rounds, most)):
        if turn >= rounds and is_clear([min(times) for times in seconds]):
            break
        for place in range(len(entrants)):
            who = (place + turn) % len(entrants)
            before = _faults()
            seconds[who].append(entrants[who].seconds())
            faults[who] = _faults() - before
    return [Timed(tuple(times), count) for times, count in zip(seconds, faults, strict=True)]


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
