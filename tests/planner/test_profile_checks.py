"""Profiles whose parts do not fit each other are refused with what does not; what is just possible is not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lowtide.errors import LowtideError
from lowtide.planner.profile_checks import check_profile
from lowtide.planner.records import AppliedLever, Call, InPlace, Profile, Static, StepClocks
from planner.profiles import chain

DEEPEST = 256
MOST = 2**60  # sums of two fit into the integers that a simulation computes with
PROFILE = chain(1)
END = len(PROFILE.base_bytes)
N_VALUES, N_STORAGES = len(PROFILE.values), len(PROFILE.storages)


def first(part: str, **fields: Any) -> Callable[[Profile], Profile]:
    """Return a function that changes fields of the first record in a part of a profile."""

    def changed(profile: Profile) -> Profile:
        records = getattr(profile, part)
        return replace(profile, **{part: (replace(records[0], **fields), *records[1:])})

    return changed


def of(**fields: Any) -> Callable[[Profile], Profile]:
    return lambda profile: replace(profile, **fields)


def nested(depth: int) -> tuple[Call, ...]:
    """Return the calls of PROFILE, and `depth` ones, each in the one before and the first in call 0."""
    call, n = PROFILE.calls[0], len(PROFILE.calls)
    inner = (replace(call, id=f"{i}#0", parent=n + i - 1 if i else 0) for i in range(depth))
    return (*PROFILE.calls, *inner)


def clocks(host: int, device: int) -> StepClocks:
    return StepClocks(host_ms=(0.0,) * host, device_ms=(0.0,) * device)


def in_place(n: int, least: int = 1) -> tuple[InPlace, ...]:
    return (InPlace(nodes={"GeluBackward0": least}, saved_bytes=(0,) * n),)


def lever(*, bytes: int = 0, extra_ms: float = 0.0) -> tuple[AppliedLever, ...]:
    return (AppliedLever(name="outputs", what="", exact=True, bytes=bytes, extra_ms=extra_ms),)


def inside(*, call: tuple[int, int], parent: tuple[int, int]) -> Callable[[Profile], Profile]:
    """Return a function that gives a profile two calls, one the parent of the other, with these positions."""

    def changed(profile: Profile) -> Profile:
        outer = replace(profile.calls[0], enter=parent[0], exit=parent[1])
        inner = replace(outer, id="inner#0", parent=0, enter=call[0], exit=call[1])
        return replace(profile, calls=(outer, inner), slots=())

    return changed


@pytest.mark.parametrize(
    "possible",
    [
        of(),
        of(phases={"forward": 0, "backward": END}),
        of(clocks=clocks(END, END)),
        of(in_place=in_place(END)),
        of(base_bytes=(*PROFILE.base_bytes[1:], MOST)),
        of(gradient_bytes=(*PROFILE.gradient_bytes[1:], -MOST)),
        of(step_ms=float(MOST)),
        of(calls=nested(DEEPEST)),
        of(offload_bytes_per_ms=0.5),
        of(measured_plain_peak_bytes=MOST),
        of(levers=lever(bytes=-MOST)),
        first("calls", begins_at=-MOST),
        first("values", operands=(), overwrites=None),
        inside(call=(END, END), parent=(END, END)),
        inside(call=(1, 2), parent=(1, 2)),
        first("slots", need=END - 1, release=0),
        first("slots", need=0),
        first("values", storage=N_STORAGES - 1),
        first("calls", result_value=N_VALUES - 1),
        of(base_bytes=(0,) * END, storages=tuple(replace(s, bytes=0) for s in PROFILE.storages)),
    ],
)
def test_what_is_just_possible_passes(possible: Callable[[Profile], Profile]) -> None:
    check_profile(possible(PROFILE))


@pytest.mark.parametrize(
    ("impossible", "why"),
    [
        (of(base_bytes=()), "0 positions of base_bytes"),
        (of(gradient_bytes=()), f"{END} positions of base_bytes, 0 of gradient_bytes"),
        (of(phases={"backward": END + 1}), f"backward begins at {END + 1} of {END} positions"),
        (of(phases={"backward": -1}), "backward begins at -1"),
        (of(clocks=clocks(END, END - 1)), f"{END} and {END - 1} of {END} positions have times"),
        (of(clocks=clocks(END + 1, END)), f"{END + 1} and {END} of {END} positions have times"),
        (of(in_place=in_place(END + 1)), f"gradients in place are given for {END + 1} of {END} positions"),
        (of(base_bytes=(*PROFILE.base_bytes[1:], MOST + 1)), f"it has {MOST + 1} bytes at a position"),
        (of(gradient_bytes=(*PROFILE.gradient_bytes[1:], -MOST - 1)), f"it has -{MOST + 1} bytes at a position"),
        (of(step_ms=2.0 * MOST), "milliseconds at a place"),
        (of(step_ms=float("nan")), "milliseconds at a place"),
        (of(step_ms=-0.5), "it has from -0.5 to .* milliseconds at a place"),
        (first("values", flops=-1), "it has from -1 to .* FLOPs at a place"),
        (first("calls", flops=2 * MOST), "FLOPs at a place"),
        (of(static=Static(parameters=MOST, buffers=1)), "bytes at a place"),
        (of(static=Static(inputs=-1)), "it has from -1 to .* bytes at a place"),
        (of(static=Static(others=-1)), "it has from -1 to .* bytes at a place"),
        (of(static=Static(others=MOST + 1)), f"to {MOST + 1} bytes at a place"),
        (of(static=Static(margin=-MOST - 1)), f"it has -{MOST + 1} bytes at a position"),
        (of(static=Static(margin=MOST + 1)), f"it has {MOST + 1} bytes at a position"),
        (of(in_place=in_place(END, least=-1)), "it has from -1 to .* bytes at a place"),
        (of(levers=lever(extra_ms=-1.0)), "milliseconds at a place"),
        (of(levers=lever(bytes=MOST + 1)), f"it has {MOST + 1} bytes at a position"),
        (first("calls", begins_at=-MOST - 1), f"it has -{MOST + 1} bytes at a position"),
        (first("values", overwrites=0), r"value 0 overwrites value 0, and needs \(\)"),
        (first("storages", allocated_at=-1), "storage 0 has 10 bytes and is allocated at -1"),
        (first("values", operands=(0,)), r"value 0 needs \(0,\), and not only values before it"),
        (first("values", storage=N_STORAGES), f"value 0 is in storage {N_STORAGES} of {N_STORAGES}"),
        (first("values", storage=-1), "value 0 is in storage -1"),
        (first("calls", parent=0), r"call 0 \(model#0\) is in call 0, which does not come before it"),
        (of(calls=nested(DEEPEST + 1)), f"is in more than {DEEPEST} calls"),
        (first("calls", result_value=N_VALUES), f"gives value {N_VALUES} of {N_VALUES}"),
        (inside(call=(0, 2), parent=(1, 2)), r"call 1 \(inner#0\) spans \[0, 2\), and its parent \[1, 2\)"),
        (inside(call=(1, 3), parent=(1, 2)), r"call 1 \(inner#0\) spans \[1, 3\), and its parent \[1, 2\)"),
        (first("calls", exit=END + 1), f"spans .* of {END} positions"),
        (first("calls", enter=2, exit=1), r"spans \[2, 1\)"),
        (first("slots", value=N_VALUES), f"has value {N_VALUES} and call"),
        (first("slots", call=len(PROFILE.calls)), f"and call {len(PROFILE.calls)}"),
        (first("slots", storage=N_STORAGES), f"is in storage {N_STORAGES} of {N_STORAGES}"),
        (first("slots", need=END), f"is read at {END} of {END} positions"),
        (first("slots", need=-1), "is read at -1"),
        (first("slots", release=-1), "is released at -1"),
        (of(offload_bytes_per_ms=-1.0), "-1.0 bytes are copied to the host in a millisecond"),
        (of(measured_plain_peak_bytes=0), "a peak of 0 bytes was measured"),
        (of(measured_plain_peak_bytes=-1), "a peak of -1 bytes was measured"),
        (of(measured_plain_peak_bytes=MOST + 1), f"a peak of {MOST + 1} bytes was measured"),
        (of(base_bytes=(-1,) * END), "its step uses no memory"),
    ],
)
def test_what_does_not_fit_is_named(impossible: Callable[[Profile], Profile], why: str) -> None:
    with pytest.raises(LowtideError, match=why):
        check_profile(impossible(PROFILE))
