"""Compute the cost of one recompute: unheld values are computed on the way, each freed once its successor exists.

A value with no other reader may also be overwritten by its successor.

Values are computed in the engine's order (`materialize` in `runtime/saved_values.py`): of the missing operands the last
one comes first, after the values that it needs in turn. So the bytes in use are known at every moment, and also when an
operand is demanded that may itself have to be recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.planner.records import Value


class Recipe(NamedTuple):
    """Cost of one recompute, including values that exist only while it runs; or of a replay, or an advance."""

    operands: tuple[int, ...]
    """Values that have to exist first."""
    ms: float
    flops: int
    ahead_bytes: tuple[int, ...] = ()
    """For each operand of a recompute the bytes computed on the way before it is demanded."""
    scratch_bytes: int = 0
    """Most bytes allocated while it runs, beyond its result; not given for replays and advances."""
    expensive: bool = False


def recipe_of(
    value: int, values: Sequence[Value], operands: Sequence[Sequence[int]], passes: npt.NDArray[np.bool_]
) -> Recipe:
    """Return the recipe for `value`, with the values that `passes` flags computed on the way."""
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
        room = 0 if current == value and not is_over else values[value].bytes  # the result's own, not allocated yet
        most = max(most, there + (0 if is_over else result) + values[current].transient_bytes - room)
        there = before + result if result else there  # a view holds its base
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
