"""Check that the parts of a profile fit each other, before anything is computed from them."""

from __future__ import annotations

from dataclasses import fields

from lowtide.errors import LowtideError
from lowtide.planner.records import Profile

DEEPEST = 256
"""Largest number of enclosing calls of a call: Python cannot run deeper nested modules."""
MOST = 2**60
"""Upper limit for the sum of all bytes, FLOPs or milliseconds of a step."""


def check_profile(profile: Profile) -> None:
    """Raise LowtideError if parts of `profile` contradict each other: indices out of range, lengths that differ."""
    end, n_storages = len(profile.base_bytes), len(profile.storages)
    if not end or len(profile.gradient_bytes) != end:
        raise contradiction(f"{end} positions of base_bytes, {len(profile.gradient_bytes)} of gradient_bytes")
    _check_amounts(profile)
    for phase, at in profile.phases.items():
        if not 0 <= at <= end:
            raise contradiction(f"{phase} begins at {at} of {end} positions")
    for group in profile.in_place:
        if len(group.saved_bytes) != end:
            raise contradiction(f"gradients in place are given for {len(group.saved_bytes)} of {end} positions")
    if (clocks := profile.clocks) is not None and {len(clocks.host_ms), len(clocks.device_ms)} != {end}:
        raise contradiction(f"{len(clocks.host_ms)} and {len(clocks.device_ms)} of {end} positions have times")
    measured = profile.measured_plain_peak_bytes
    if measured is not None and not 0 < measured <= MOST:
        raise contradiction(f"a peak of {measured} bytes was measured")
    for index, storage in enumerate(profile.storages):
        if storage.allocated_at < 0 or storage.bytes < 0:
            raise contradiction(f"storage {index} has {storage.bytes} bytes and is allocated at {storage.allocated_at}")
    for index, value in enumerate(profile.values):
        if not all(0 <= need < index for need in value.operands):
            raise contradiction(f"value {index} needs {value.operands}, and not only values before it")
        if value.overwrites is not None and value.overwrites not in value.operands:
            raise contradiction(f"value {index} overwrites value {value.overwrites}, and needs {value.operands}")
        if value.storage is not None and not 0 <= value.storage < n_storages:
            raise contradiction(f"value {index} is in storage {value.storage} of {n_storages}")
    _check_calls(profile, end)
    _check_slots(profile, end)


def _check_calls(profile: Profile, end: int) -> None:
    """Raise LowtideError unless each call follows its parent, and spans positions of its parent, before `end`."""
    depth: list[int] = []
    for index, call in enumerate(profile.calls):
        if call.parent is not None and not 0 <= call.parent < index:
            raise contradiction(f"call {index} ({call.id}) is in call {call.parent}, which does not come before it")
        depth.append(0 if call.parent is None else depth[call.parent] + 1)
        if depth[index] > DEEPEST:
            raise contradiction(f"call {index} ({call.id}) is in more than {DEEPEST} calls")
        if call.result_value is not None and not 0 <= call.result_value < len(profile.values):
            raise contradiction(f"call {index} ({call.id}) gives value {call.result_value} of {len(profile.values)}")
        if not 0 <= call.enter <= call.exit <= end:
            raise contradiction(f"call {index} ({call.id}) spans [{call.enter}, {call.exit}) of {end} positions")
        outer = call if call.parent is None else profile.calls[call.parent]
        if not outer.enter <= call.enter <= call.exit <= outer.exit:
            spans = f"[{call.enter}, {call.exit}), and its parent [{outer.enter}, {outer.exit})"
            raise contradiction(f"call {index} ({call.id}) spans {spans}")


def _check_slots(profile: Profile, end: int) -> None:
    """Raise LowtideError unless each slot's value, call and storage exist, and backward reads the slot before `end`."""
    n_storages = len(profile.storages)
    for slot in profile.slots:
        if not (0 <= slot.value < len(profile.values) and 0 <= slot.call < len(profile.calls)):
            raise contradiction(f"slot {slot.address} has value {slot.value} and call {slot.call}")
        if slot.storage is not None and not 0 <= slot.storage < n_storages:
            raise contradiction(f"slot {slot.address} is in storage {slot.storage} of {n_storages}")
        if slot.need is not None and not 0 <= slot.need < end:
            raise contradiction(f"slot {slot.address} is read at {slot.need} of {end} positions")
        if slot.release is not None and slot.release < 0:
            raise contradiction(f"slot {slot.address} is released at {slot.release}")


def _check_amounts(profile: Profile) -> None:
    """Raise LowtideError if bytes, FLOPs or times are negative, or if their sum is above MOST."""
    static = profile.static
    ms: list[float] = [profile.step_ms, *(group.extra_ms for group in profile.in_place)]
    ms += (lever.extra_ms for lever in profile.levers)
    flops: list[int] = []
    n_bytes = [getattr(static, field.name) for field in fields(static) if field.name != "margin"]
    n_bytes += (storage.bytes for storage in profile.storages)
    least_bytes = [n for group in profile.in_place for n in group.nodes.values()]
    for value in profile.values:
        n_bytes += (value.bytes, value.transient_bytes)
        flops.append(value.flops)
        ms += (value.cost_ms, value.host_ms)
    for call in profile.calls:
        n_bytes.append(call.state_bytes)
        flops += (call.flops, call.advance_flops)
        ms += (call.cost_ms, call.host_ms, call.advance_ms, call.advance_host_ms)
    if profile.clocks is not None:
        clocks = profile.clocks
        ms += (*clocks.host_ms, *clocks.device_ms, clocks.kept_slot_ms, clocks.packed_slot_ms)
    for unit, amounts in (("bytes", n_bytes), ("bytes", least_bytes), ("FLOPs", flops), ("milliseconds", ms)):
        if not (min(amounts, default=0) >= 0 and sum(amounts) <= MOST):  # NaN is refused, too
            raise contradiction(f"it has from {min(amounts)} to {max(amounts)} {unit} at a place")
    levels = (
        static.margin,  # negative where compiled code needs less than its forecast
        *profile.base_bytes,
        *profile.gradient_bytes,
        *(n for group in profile.in_place for n in group.saved_bytes),
        *(lever.bytes for lever in profile.levers),
        *(call.begins_at for call in profile.calls if call.begins_at is not None),
    )
    if max(map(abs, levels)) > MOST:
        raise contradiction(f"it has {max(levels, key=abs)} bytes at a position")
    if profile.offload_bytes_per_ms is not None and not profile.offload_bytes_per_ms > 0:
        raise contradiction(f"{profile.offload_bytes_per_ms} bytes are copied to the host in a millisecond")
    if static.total + max(profile.base_bytes) < 0 or sum(n_bytes) + max(profile.base_bytes) <= 0:
        raise contradiction("its step uses no memory")


def contradiction(reason: str) -> LowtideError:
    return LowtideError(f"this Profile contradicts itself: {reason}. Rehearse again.")
