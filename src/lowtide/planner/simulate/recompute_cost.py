"""What one recompute takes: values that nobody holds are made on the way, and each is gone when the next one is there.

Or it has become the next one: what is made for nothing else may be written over.

They are made in the engine's order (`materialize` in `runtime/saved_values.py`): of what is missing the last operand
comes first, and before it whatever that needs. So it is known how much of them is there at any moment, and how much
already when an operand is asked for, which may have to be made again itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.planner.records import Value


class Recipe(NamedTuple):
    """What one recompute takes, together with the values that exist only while it runs; or a replay, or an advance."""

    operands: tuple[int, ...]
    """Values that have to be there first."""
    ms: float
    flops: int
    ahead_bytes: tuple[int, ...] = ()
    """For each operand of a recompute what has been made on the way when it is asked for."""
    scratch_bytes: int = 0
    """The most that is allocated while it runs, beyond its result; not told for replays and advances."""
    expensive: bool = False


def recipe_of(
    value: int, values: Sequence[Value], operands: Sequence[Sequence[int]], passes: npt.NDArray[np.bool_]
) -> Recipe:
    """What recomputing `value` takes, where the values that `passes` flags are made on the way."""
    ahead: dict[int, int] = {}
    made: dict[int, int] = {}
    there = most = 0

    def make(current: int) -> None:
        nonlocal there, most
        before = there
        for need in reversed(operands[current]):
            if not passes[need]:
                ahead.setdefault(need, there)
            elif need not in made:
                make(need)
        is_over = values[current].overwrites in made
        result = 0 if current == value else values[current].bytes
        room = 0 if current == value and not is_over else values[value].bytes  # the result's own, not there yet
        most = max(most, there + (0 if is_over else result) + values[current].transient_bytes - room)
        there = before + result if result else there  # a view holds what it was made from
        made[current] = there - before

    make(value)
    parts = [values[index] for index in made]
    return Recipe(
        operands=tuple(ahead),
        ahead_bytes=tuple(ahead.values()),
        ms=sum(part.cost_ms for part in parts),
        flops=sum(part.flops for part in parts),
        scratch_bytes=most,
        expensive=any(part.expensive for part in parts),
    )
