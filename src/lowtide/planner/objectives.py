"""Objectives of a plan: time, FLOPs, or the smallest peak regardless of measured times."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from lowtide.planner.records import Call, Profile, Value

Objective = Literal["time", "flops"]
FLOP_WEIGHT = 10
"""Weight of a FLOP relative to the time that it takes, in plans that minimize FLOPs."""


def with_flops_costs(profile: Profile) -> Profile:
    """Return `profile` with costs in which FLOPs count FLOP_WEIGHT times as much as time, to minimize FLOPs.

    The milliseconds in the result are no longer times: predict a plan's time with the original profile.
    """
    costs: list[Value | Call] = [*profile.values, *profile.calls]
    flops = sum(cost.flops for cost in costs)
    if not flops:
        return profile
    ms_of_flop = FLOP_WEIGHT * sum(cost.cost_ms for cost in costs if cost.flops) / flops

    def weigh(call: Call) -> Call:
        return replace(
            call,
            cost_ms=call.cost_ms + ms_of_flop * call.flops,
            advance_ms=call.advance_ms + ms_of_flop * call.advance_flops,
        )

    return replace(
        profile,
        clocks=None,
        values=tuple(replace(value, cost_ms=value.cost_ms + ms_of_flop * value.flops) for value in profile.values),
        calls=tuple(map(weigh, profile.calls)),
    )


def with_work_costs(profile: Profile) -> Profile:
    """Return `profile` with costs independent of any clock: one per byte produced, and one per FLOP.

    With such costs every rehearsal of a step leads to the same smallest peak. Counting a FLOP like a byte makes matrix
    products more expensive than they are, so that the search recomputes them last, and finds a smaller peak.
    """
    end = len(profile.base_bytes)
    allocated_bytes = np.zeros(end + 1, np.int64)
    for storage in profile.storages:
        allocated_bytes[min(storage.allocated_at, end)] += storage.bytes
    allocated_before = np.concatenate(([0], allocated_bytes.cumsum()))

    def compute_cost(call: Call) -> int:
        return int(allocated_before[min(call.exit, end)] - allocated_before[min(call.enter, end)])

    return replace(
        profile,
        clocks=None,
        values=tuple(replace(v, cost_ms=float(v.bytes + v.flops) if v.cost_ms else 0.0) for v in profile.values),
        calls=tuple(
            replace(
                call,
                cost_ms=float(compute_cost(call) + call.flops),
                advance_ms=float(compute_cost(call) + call.advance_flops),
            )
            for call in profile.calls
        ),
        offload_bytes_per_ms=None if profile.offload_bytes_per_ms is None else 1.0,
    )
