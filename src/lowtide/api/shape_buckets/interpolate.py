"""Interpolate the profile of a batch size between two rehearsed sizes.

Two steps that do the same work on tensors of other sizes have the same slots (saved tensors), values, calls and
positions; only bytes and costs differ. Bytes and costs are convex in the size: constant, linear, and for attention
quadratic terms, all of them positive. So the straight line between two sizes is never below the true value, and a plan
made from it keeps to its budget. For linear growth the line is exact.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from lowtide.planner.records import StepClocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.planner.records import Call, Fingerprint, InPlace, Profile, Value


PREDICTED = "predicted from two rehearsed sizes"
"""The note of an interpolated profile."""


def alike(one: Profile, other: Profile) -> bool:
    """Return True if two profiles describe the same work: equal in everything but bytes and costs."""
    return _list_sizeless_parts(one) == _list_sizeless_parts(other)


def between(small: Profile, large: Profile, share: float, fingerprint: Fingerprint) -> Profile:
    """Interpolate between the profiles `small` (`share` 0) and `large` (`share` 1), which must describe the same work.

    Bytes are rounded up. The result has the given fingerprint.
    """
    line = _Line(share)
    peaks = small.measured_plain_peak_bytes, large.measured_plain_peak_bytes
    return replace(
        large,
        fingerprint=fingerprint,
        static=replace(large.static, inputs=line.up(small.static.inputs, large.static.inputs)),
        base_bytes=_interpolate_each(line.up, small.base_bytes, large.base_bytes),
        gradient_bytes=_interpolate_each(line.up, small.gradient_bytes, large.gradient_bytes),
        storages=tuple(
            replace(b, bytes=line.up(a.bytes, b.bytes)) for a, b in zip(small.storages, large.storages, strict=True)
        ),
        values=tuple(map(line.value, small.values, large.values)),
        calls=tuple(map(line.call, small.calls, large.calls)),
        in_place=tuple(map(line.in_place, small.in_place, large.in_place)),
        step_ms=line.at(small.step_ms, large.step_ms),
        clocks=None if small.clocks is None or large.clocks is None else line.clocks(small.clocks, large.clocks),
        measured_plain_peak_bytes=None if peaks[0] is None or peaks[1] is None else line.up(peaks[0], peaks[1]),
        notes=(*large.notes, PREDICTED),
    )


class _Line(NamedTuple):
    """Linear interpolation between a part `a` of a small profile and the same part `b` of a large one.

    `share` is 0 for the small profile and 1 for the large one.
    """

    share: float

    def at(self, a: float, b: float) -> float:
        return a + self.share * (b - a)

    def up(self, a: int, b: int) -> int:
        return math.ceil(self.at(a, b) - 1e-6)

    def down(self, a: int, b: int) -> int:
        return math.floor(self.at(a, b) + 1e-6)

    def value(self, a: Value, b: Value) -> Value:
        return replace(
            b,
            bytes=self.up(a.bytes, b.bytes),
            cost_ms=self.at(a.cost_ms, b.cost_ms),
            host_ms=self.at(a.host_ms, b.host_ms),
            flops=self.up(a.flops, b.flops),
            transient_bytes=self.up(a.transient_bytes, b.transient_bytes),
        )

    def call(self, a: Call, b: Call) -> Call:
        return replace(
            b,
            cost_ms=self.at(a.cost_ms, b.cost_ms),
            host_ms=self.at(a.host_ms, b.host_ms),
            flops=self.up(a.flops, b.flops),
            advance_ms=self.at(a.advance_ms, b.advance_ms),
            advance_host_ms=self.at(a.advance_host_ms, b.advance_host_ms),
            advance_flops=self.up(a.advance_flops, b.advance_flops),
            begins_at=None if a.begins_at is None or b.begins_at is None else self.down(a.begins_at, b.begins_at),
        )

    def in_place(self, a: InPlace, b: InPlace) -> InPlace:
        return replace(
            b,
            nodes={node: math.floor(self.at(a.nodes[node], least)) for node, least in b.nodes.items()},
            saved_bytes=_interpolate_each(self.down, a.saved_bytes, b.saved_bytes),
            extra_ms=self.at(a.extra_ms, b.extra_ms),
        )

    def clocks(self, a: StepClocks, b: StepClocks) -> StepClocks:
        return StepClocks(
            host_ms=tuple(map(self.at, a.host_ms, b.host_ms)),
            device_ms=tuple(map(self.at, a.device_ms, b.device_ms)),
            kept_slot_ms=self.at(a.kept_slot_ms, b.kept_slot_ms),
            packed_slot_ms=self.at(a.packed_slot_ms, b.packed_slot_ms),
        )


def _interpolate_each(line: Callable[[int, int], int], few: tuple[int, ...], many: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(line(a, b) for a, b in zip(few, many, strict=True))


def _list_sizeless_parts(profile: Profile) -> object:
    values = profile.values
    return (
        len(profile.base_bytes),
        profile.clocks is None,
        profile.implementations,
        profile.phases,
        [(s.allocated_at, s.freed_at, s.category) for s in profile.storages],
        [(v.storage, v.node, v.recipe, v.operands, v.expensive, v.refused is None) for v in values],
        [replace(slot, label="") for slot in profile.slots],
        [sorted(group.nodes) for group in profile.in_place],
        [(c.id, c.cls, c.parent, c.enter, c.exit, c.refused is None, c.result_value) for c in profile.calls],
    )
