"""Host and device side by side: the time of a step, plans that prefer what the other clock hides, and valid bounds."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lowtide.errors import Infeasible, LowtideError
from lowtide.planner import plan, predict
from lowtide.planner.records import Decisions, Profile, StepClocks
from lowtide.planner.simulate.simulator import Simulator
from lowtide.planner.simulate.two_clocks import NS_PER_MS, TwoClocks, compute_step_ns, round_to_ns
from lowtide.planner.solve.lower_bound import lower_bound
from lowtide.planner.solve.program_costs import _choose_hand_over_positions
from planner import bruteforce
from planner.profiles import Tape, chain, random_decisions, random_profile

COSTS = (0.0, 0.01, 0.2, 1.0)


def with_clocks(profile: Profile, seed: int = 0) -> Profile:
    """Return `profile` with drawn times of host and device, also of the plain step at each position."""
    draw, n = Random(seed), len(profile.base_bytes)
    host, device = draw.choice([(2.0, 0.5), (0.5, 2.0), (1.0, 1.0), (0.0, 1.0)])
    return replace(
        profile,
        values=tuple(replace(value, host_ms=host * draw.choice(COSTS)) for value in profile.values),
        calls=tuple(replace(c, host_ms=host * draw.choice(COSTS), advance_host_ms=0.1 * host) for c in profile.calls),
        clocks=StepClocks(
            host_ms=tuple(host * draw.random() for _ in range(n)),
            device_ms=tuple(device * draw.random() for _ in range(n)),
            kept_slot_ms=draw.choice([0.0, 0.003]),
            packed_slot_ms=draw.choice([0.0, 0.02]),
        ),
    )


def few_or_many(*, host_ms: float, device_ms: float) -> Profile:
    """A step with ten small tensors that are quick to recompute, and one large tensor that takes the device long.

    Either the ten or the one are enough. Each recompute takes the host 0.05 ms; the device takes 0.01 ms for a small
    one, 0.2 for the large one. `host_ms` and `device_ms`: times of the plain step at each position.
    """
    tape = Tape()
    with tape.call("model#0", refused="the model itself"):
        x = tape.op(1)
        large = tape.op(100, x, saves=[x], recipe="norm", ms=0.2)
        current = tape.op(1, large, saves=[large])
        for _ in range(10):
            small = tape.op(10, x, recipe="act", ms=0.01)
            current = tape.op(1, small, current, saves=[small])
        tape.op(1, current, saves=[current])
    profile = tape.profile(step_ms=30 * max(host_ms, device_ms))
    n = len(profile.base_bytes)
    return replace(
        profile,
        values=tuple(replace(value, host_ms=0.05) for value in profile.values),
        clocks=StepClocks(host_ms=(host_ms,) * n, device_ms=(device_ms,) * n),
    )


def n_recomputed(profile: Profile) -> tuple[int, int]:
    """Return the number of large and of small tensors that the plan within 110 bytes less recomputes."""
    made = plan(profile, predict(profile, Decisions()).peak_bytes - 90)
    values = [profile.values[slot.value] for slot in profile.slots if slot.address in made.recompute]
    return sum(value.bytes == 100 for value in values), sum(value.bytes == 10 for value in values)


def test_where_the_host_is_the_bound_one_large_recompute_beats_many_small_ones() -> None:
    """Ten take the host 0.5 ms and the device 0.1; the large one takes the host 0.05 and the device 0.2."""
    assert n_recomputed(few_or_many(host_ms=1.0, device_ms=0.1)) == (1, 0)


def test_where_the_device_is_the_bound_many_small_recomputes_beat_a_large_one() -> None:
    large, small = n_recomputed(few_or_many(host_ms=0.1, device_ms=1.0))
    assert (large, small >= 9) == (0, True)


def test_without_clocks_times_of_the_host_count_nothing() -> None:
    """On a CPU, host and device are one resource, whose time `cost_ms` has."""
    alone = replace(few_or_many(host_ms=1.0, device_ms=0.1), clocks=None)
    zero = replace(alone, values=tuple(replace(value, host_ms=0.0) for value in alone.values))
    assert n_recomputed(alone) == n_recomputed(zero) == n_recomputed(few_or_many(host_ms=0.1, device_ms=1.0))


def test_a_launch_is_hidden_until_the_device_catches_up() -> None:
    """Host 1, 1, 1 and device 5, 1, 1: the device is done at 1 + 5 + 1 + 1; 3 more of the host at the end hide."""
    clocks = TwoClocks(StepClocks(host_ms=(1.0, 1.0, 1.0), device_ms=(5.0, 1.0, 1.0)))
    assert clocks.plain_ns == 8 * NS_PER_MS

    def extra_ms(host: float, device: float) -> float:
        return clocks.extra_ms(*(clocks.host * 0 + [0, 0, round_to_ns(ms)] for ms in (host, device)))

    assert [extra_ms(host, 0.0) for host in (0.0, 3.0, 4.0, 6.0)] == [0.0, 0.0, 0.0, 2.0]
    assert [extra_ms(0.0, device) for device in (1.0, 2.0)] == [1.0, 2.0]


times = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=12)


@given(times, st.data())
def test_the_time_is_that_of_the_two_recurrences_and_grows_with_each_part(
    parts: list[tuple[int, int]], data: st.DataObject
) -> None:
    host, device = (ones := TwoClocks(StepClocks(host_ms=(0.0,) * len(parts), device_ms=(0.0,) * len(parts)))).host, 0
    launched = done = 0
    for h, d in parts:
        launched += h
        done = max(done, launched) + d
    host = ones.host + [h for h, _ in parts]
    device = ones.device + [d for _, d in parts]
    assert compute_step_ns(host, device) == max(launched, done)
    more = ones.host + data.draw(st.lists(st.integers(0, 9), min_size=len(parts), max_size=len(parts)))
    assert compute_step_ns(host + more, device) >= compute_step_ns(host, device) <= compute_step_ns(host, device + more)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(0, 100))
def test_no_possible_plan_beats_the_bound(seed: int, percent: int) -> None:
    profile = with_clocks(bruteforce.trimmed(random_profile(seed, 8), seed, most=5), seed)
    assume(bruteforce.n_decisions(profile))
    outcomes = bruteforce.predictions(profile)
    smallest = min(outcome.peak_bytes for outcome in outcomes)
    budget = smallest + (predict(profile, Decisions()).peak_bytes - smallest) * percent // 100
    least = min(outcome.extra_ms for outcome in outcomes if outcome.peak_bytes <= budget)
    assert lower_bound(Simulator(profile), budget) <= least + 1e-9


@pytest.mark.slow
@settings(max_examples=40)
@given(st.integers(0, 2**32))
def test_more_budget_never_takes_longer(seed: int) -> None:
    profile = with_clocks(random_profile(seed, 12), seed)
    last = math.inf
    for percent in range(30, 101, 10):
        try:
            made = plan(profile, f"{percent}%")
        except Infeasible:
            continue
        assert made.predicted.extra_ms <= last
        assert made.bound_ms <= made.predicted.extra_ms + 1e-9
        last = made.predicted.extra_ms


@pytest.mark.parametrize("inner", [1, 3])
def test_a_bound_is_close_where_one_clock_decides(inner: int) -> None:
    """Dropping what one block holds at most costs the host's time, which bounds this step."""
    plain = chain(6, inner=inner)
    n = len(plain.base_bytes)
    profile = replace(
        plain,
        values=tuple(replace(v, host_ms=2.0) for v in plain.values),
        calls=tuple(replace(c, host_ms=50.0) for c in plain.calls),
        clocks=StepClocks(host_ms=(10.0,) * n, device_ms=(1.0,) * n),
    )
    made = plan(profile, "70%")
    assert 0 < made.predicted.extra_ms <= 1.3 * made.bound_ms


@given(st.integers(0, 2**32), st.integers(0, 2**32))
@settings(max_examples=40)
def test_predictions_are_those_of_host_and_device_added_up_where_one_of_them_does_nothing(seed: int, of: int) -> None:
    """If the device takes all the time, and packing none, the extra time is that without clocks."""
    alone = replace(random_profile(seed, 10), offload_bytes_per_ms=None)
    n = len(alone.base_bytes)
    profile = replace(alone, clocks=StepClocks(host_ms=(0.0,) * n, device_ms=(1.0,) * n))
    decisions = random_decisions(profile, of)
    expected = predict(alone, decisions)
    assert predict(profile, decisions) == replace(
        expected,
        extra_ms=pytest.approx(expected.extra_ms, abs=1e-6),  # type: ignore[arg-type]
    )


def test_a_packed_slot_costs_its_hooks_and_so_do_the_kept_ones_beside_it() -> None:
    tape = Tape()
    with tape.call("model#0", refused="the model itself"):
        x = tape.op(1)
        y = tape.op(50, x, saves=[x], recipe="act", ms=0.0)
        with tape.call("model.far#0"):
            z = tape.op(1, y)
            tape.op(1, z, saves=[z])
        tape.op(1, y, saves=[y])
    plain = tape.profile()
    n = len(plain.base_bytes)
    clocks = StepClocks(host_ms=(1.0,) * n, device_ms=(0.0,) * n, kept_slot_ms=0.25, packed_slot_ms=2.0)
    profile = replace(plain, clocks=clocks)
    assert predict(profile, Decisions()).extra_ms == 0.0
    assert predict(profile, Decisions(recompute=frozenset({"model#0:1"}))).extra_ms == 2.25


def test_extra_time_is_bounded_from_all_on_the_device_to_all_on_the_host() -> None:
    index = Simulator(with_clocks(chain(4))).index
    assert index.clocks is not None
    positions = _choose_hand_over_positions(index.clocks, index.end)
    assert (positions[0], positions[-1]) == (0, index.end - 1)


def test_times_for_another_number_of_positions_are_refused() -> None:
    profile = few_or_many(host_ms=1.0, device_ms=1.0)
    short = replace(profile, clocks=StepClocks(host_ms=(1.0,), device_ms=(1.0,)))
    with pytest.raises(LowtideError, match=r"1 and 1 of \d+ positions have times"):
        predict(short, Decisions())


def test_clocks_survive_a_round_trip() -> None:
    profile = few_or_many(host_ms=1.0, device_ms=0.5)
    assert Profile.from_json(profile.to_json()) == profile
