"""Search for the recomputed values that change the bits of compiled code, so that a plan can keep them.

inductor fuses recomputed values into other kernels than those of the plain step, which may round differently, or add up
in another order. In most models a single value does so. Each trial compiles the step once, so there are few.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from lowtide.planner.records import Profile

TRIALS = 5
"""Largest number of trials: enough to find one value among 32."""
REFUSED = "recomputed, it would change bits of compiled code"
"""Reason why a plan keeps such a value."""


def differing_addresses(
    addresses: Collection[str], is_identical: Callable[[tuple[str, ...]], bool], trials: int = TRIALS
) -> tuple[str, ...]:
    """Return the fewest addresses found whose values change bits when they are recomputed.

    A bisection for a single such value. If only several together change bits, the returned addresses are not all of
    them, and the plan without these has to be compared again.

    Args:
        addresses: Addresses that change bits if all of them are recomputed, in the order of the graph.
        is_identical: Function that runs the step with just these addresses recomputed, and returns True if its bits are
            those of the plain step.
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
    """Return `profile` with the values at `addresses` kept by any plan."""
    kept = {slot.value for slot in profile.slots if slot.address in addresses}
    values = (replace(v, refused=REFUSED) if i in kept else v for i, v in enumerate(profile.values))
    return replace(profile, values=tuple(values))
