"""Interpolate the profile of a size between two that were rehearsed.

Two steps that do the same work on tensors of other sizes have the same slots, values, calls and positions; only bytes
and costs differ. Both are convex in the size: constant, linear, and for attention quadratic parts, all of them
positive. So a point on the straight line between the two is never less than the truth, and a plan made from it keeps to
its budget. The line is exact for linear growth.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from lowtide.planner.records import StepClocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.planner.records import Fingerprint, Profile


PREDICTED = "predicted from two rehearsed sizes"
"""The note of an interpolated profile."""


def alike(one: Profile, other: Profile) -> bool:
    """Return True if two profiles describe the same work: equal in everything but bytes and costs."""
    return _skeleton(one) == _skeleton(other)


def between(small: Profile, large: Profile, share: float, fingerprint: Fingerprint) -> Profile:
    """Interpolate between two profiles, which must be `alike`, at `share` of the way from `small` to `large`.

    Bytes are rounded up.
    """

    def line(a: float, b: float) -> float:
        return a + share * (b - a)

    def whole(a: int, b: int) -> int:
        return math.ceil(line(a, b) - 1e-6)

    def part(a: int, b: int) -> int:
        return math.floor(line(a, b) + 1e-6)

    pairs = zip(small.storages, large.storages, strict=True)
    values = zip(small.values, large.values, strict=True)
    calls = zip(small.calls, large.calls, strict=True)
    peaks = small.measured_plain_peak_bytes, large.measured_plain_peak_bytes
    return replace(
        large,
        fingerprint=fingerprint,
        static=replace(large.static, inputs=whole(small.static.inputs, large.static.inputs)),
        base_bytes=_each(whole, small.base_bytes, large.base_bytes),
        gradient_bytes=_each(whole, small.gradient_bytes, large.gradient_bytes),
        storages=tuple(replace(b, bytes=whole(a.bytes, b.bytes)) for a, b in pairs),
        values=tuple(
            replace(
                b,
                bytes=whole(a.bytes, b.bytes),
                cost_ms=line(a.cost_ms, b.cost_ms),
                host_ms=line(a.host_ms, b.host_ms),
                flops=whole(a.flops, b.flops),
                transient_bytes=whole(a.transient_bytes, b.transient_bytes),
            )
            for a, b in values
        ),
        calls=tuple(
            replace(
                b,
                cost_ms=line(a.cost_ms, b.cost_ms),
                host_ms=line(a.host_ms, b.host_ms),
                flops=whole(a.flops, b.flops),
                advance_ms=line(a.advance_ms, b.advance_ms),
                advance_host_ms=line(a.advance_host_ms, b.advance_host_ms),
                advance_flops=whole(a.advance_flops, b.advance_flops),
                begins_at=None if a.begins_at is None or b.begins_at is None else part(a.begins_at, b.begins_at),
            )
            for a, b in calls
        ),
        in_place=tuple(
            replace(
                b,
                nodes={node: math.floor(line(a.nodes[node], least)) for node, least in b.nodes.items()},
                saved_bytes=_each(part, a.saved_bytes, b.saved_bytes),
                extra_ms=line(a.extra_ms, b.extra_ms),
            )
            for a, b in zip(small.in_place, large.in_place, strict=True)
        ),
        step_ms=line(small.step_ms, large.step_ms),
        clocks=_clocks(small.clocks, large.clocks, line),
        measured_plain_peak_bytes=None if peaks[0] is None or peaks[1] is None else whole(peaks[0], peaks[1]),
        notes=(*large.notes, PREDICTED),
    )


def _clocks(
    small: StepClocks | None, large: StepClocks | None, line: Callable[[float, float], float]
) -> StepClocks | None:
    if small is None or large is None:
        return None
    return StepClocks(
        host_ms=tuple(map(line, small.host_ms, large.host_ms)),
        device_ms=tuple(map(line, small.device_ms, large.device_ms)),
        kept_slot_ms=line(small.kept_slot_ms, large.kept_slot_ms),
        packed_slot_ms=line(small.packed_slot_ms, large.packed_slot_ms),
    )


def _each(line: Callable[[int, int], int], few: tuple[int, ...], many: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(line(a, b) for a, b in zip(few, many, strict=True))


def _skeleton(profile: Profile) -> object:
    values = profile.values
    return (
        len(profile.base_bytes),
        profile.clocks is None,
        profile.implementations,
        profile.phases,
        [(s.allocated_at, s.freed_at, s.category) for s in profile.storages],
        [(v.storage, v.node, v.recipe, v.operands, v.expensive, v.refused is None) for v in values],
        [replace(slot, label="") for slot in profile.slots],
        [sorted(each.nodes) for each in profile.in_place],
        [(c.id, c.cls, c.parent, c.enter, c.exit, c.refused is None, c.result_value) for c in profile.calls],
    )
