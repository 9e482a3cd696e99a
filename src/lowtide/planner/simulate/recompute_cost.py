"""Compute the cost of one recompute, including values on the way that are not held: they are computed, used and freed.

A recipe may overwrite an operand that has no other reader.

Values are computed in the engine's order (`materialize` in `runtime/saved_fields.py`): the last missing operand comes
first, after the values that it needs itself. So the bytes in use are known at every moment, also when an operand is
demanded that may have to be recomputed too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.planner.records import Value


class RecomputeCost(NamedTuple):
    """Cost of one recompute, including the values that exist only while it runs; or of one replay or advance."""

    operands: tuple[int, ...]
    """Values that have to exist first."""
    ms: float
    """Time on the device, or of host and device together where both are one resource."""
    flops: int
    ahead_bytes: tuple[int, ...] = ()
    """For each operand of a recompute, the bytes of values on the way that exist when the operand is demanded."""
    scratch_bytes: int = 0
    """Peak of the bytes allocated during the recompute, beyond its result; 0 for replays and advances."""
    expensive: bool = False
    host_ms: float = 0.0


def compute_recompute_cost(
    value: int, values: Sequence[Value], operands: Sequence[Sequence[int]], passes: npt.NDArray[np.bool_]
) -> RecomputeCost:
    """Return the cost of recomputing `value`, including the recompute of needed values that `passes` flags."""
    ahead: dict[int, int] = {}
    computed: dict[int, int] = {}
    held_bytes = most = 0

    def compute(current: int) -> None:
        nonlocal held_bytes, most
        before = held_bytes
        for need in reversed(operands[current]):
            if not passes[need]:
                ahead.setdefault(need, held_bytes)
            elif need not in computed:
                compute(need)
        is_over = values[current].overwrites in computed
        result = 0 if current == value else values[current].bytes
        # bytes of the result, which is not allocated yet
        room = 0 if current == value and not is_over else values[value].bytes
        most = max(most, held_bytes + (0 if is_over else result) + values[current].transient_bytes - room)
        held_bytes = before + result if result else held_bytes  # a view holds its base
        computed[current] = held_bytes - before

    compute(value)
    parts = [values[index] for index in computed]
    return RecomputeCost(
        operands=tuple(ahead),
        ahead_bytes=tuple(ahead.values()),
        ms=sum(part.cost_ms for part in parts),
        flops=sum(part.flops for part in parts),
        scratch_bytes=most,
        expensive=any(part.expensive for part in parts),
        host_ms=sum(part.host_ms for part in parts),
    )
