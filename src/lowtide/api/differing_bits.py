"""Find the recomputed values that change result bits of compiled code, so that a plan can keep these values.

inductor fuses recomputed values into other kernels than the plain step's, which may round differently, or add up in
another order. In most models a single value causes this. Each trial compiles the step once, so there are few trials.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from lowtide.planner.records import Profile

TRIALS = 5
"""Largest number of trials: enough to find one value among 32."""
REFUSED = "recomputed, it would change bits of compiled code"
"""Reason that a plan states for keeping a value whose recompute changes bits."""


def find_differing_addresses(
    addresses: Collection[str], is_identical: Callable[[tuple[str, ...]], bool], trials: int = TRIALS
) -> tuple[str, ...]:
    """Search, by bisection, for the value of a compiled graph that changes result bits when it is recomputed.

    Returns the addresses of the values among which it is after the last trial.

    The bisection assumes a single such value. If bits change only when several values are recomputed together, the
    result lacks some of them, so the caller has to compare again with the returned values kept.

    Args:
        addresses: Addresses of values, in the order of the graph, that change bits if all of them are recomputed.
        is_identical: Function that runs the step with only the values at the given addresses recomputed, and returns
            True if the results have the plain step's bits.
        trials: Largest number of calls of `is_identical`.
    """
    suspects = tuple(addresses)
    for _ in range(trials):
        if len(suspects) < 2:
            break
        half = suspects[: len(suspects) // 2]
        suspects = suspects[len(half) :] if is_identical(half) else half
    return suspects


def with_kept(profile: Profile, addresses: Collection[str]) -> Profile:
    """Return a copy of `profile` from which every plan keeps the values at `addresses`."""
    kept = {slot.value for slot in profile.slots if slot.address in addresses}
    values = (replace(v, refused=REFUSED) if i in kept else v for i, v in enumerate(profile.values))
    return replace(profile, values=tuple(values))
