"""What a plan is made for: time, or FLOPs."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from lowtide.planner.records import Call, Profile, Value

Objective = Literal["time", "flops"]
DEARER = 10
"""How many times more a FLOP counts than the time it takes, where plans are made for FLOPs."""


def flops_first(profile: Profile) -> Profile:
    """`profile` with costs that make the solver look for few FLOPs, and among those for little time.

    Its milliseconds are no time any more: what a plan takes is to be predicted with the profile as it was.
    """
    costs: list[Value | Call] = [*profile.values, *profile.calls]
    flops = sum(cost.flops for cost in costs)
    if not flops:
        return profile
    ms_of_flop = DEARER * sum(cost.cost_ms for cost in costs if cost.flops) / flops

    def weighed(call: Call) -> Call:
        return replace(
            call,
            cost_ms=call.cost_ms + ms_of_flop * call.flops,
            advance_ms=call.advance_ms + ms_of_flop * call.advance_flops,
        )

    return replace(
        profile,
        values=tuple(replace(value, cost_ms=value.cost_ms + ms_of_flop * value.flops) for value in profile.values),
        calls=tuple(map(weighed, profile.calls)),
    )
