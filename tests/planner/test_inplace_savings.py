"""Gradients in place: what costs nothing is in every plan, what costs time where the whole takes less with it."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.api.shape_buckets.interpolate import alike, between
from lowtide.errors import Infeasible
from lowtide.planner import find_smallest_peak, plan, predict
from lowtide.planner.planning import predict_in_place_peak
from lowtide.planner.records import Decisions, InPlace, Plan, Profile
from planner.profiles import FINGERPRINT, chain, random_profile, transformer

FREE, SLOW = frozenset({"ReluBackward0"}), frozenset({"ReluBackward0", "NativeBatchNormBackward0"})


def with_groups(profile: Profile, free: dict[int, int], slow: dict[int, int], ms: float = 1.0) -> Profile:
    """`profile` with both groups: by position, how many bytes each leaves out of its base."""

    def at(saved: dict[int, int]) -> tuple[int, ...]:
        return tuple(saved.get(position, 0) for position in range(len(profile.base_bytes)))

    base = tuple(sum(levels) for levels in zip(profile.base_bytes, at(free), at(slow), strict=True))
    groups = (
        InPlace(nodes={"ReluBackward0": 4096}, saved_bytes=at(free)),
        InPlace(nodes={"NativeBatchNormBackward0": 2**20}, saved_bytes=at(slow), extra_ms=ms),
    )
    return replace(profile, base_bytes=base, in_place=groups)


def everywhere(profile: Profile, n_bytes: int) -> dict[int, int]:
    return dict.fromkeys(range(len(profile.base_bytes)), n_bytes)


def test_it_lowers_the_base_and_takes_its_time() -> None:
    profile = with_groups(chain(4), everywhere(chain(4), 30), everywhere(chain(4), 20))
    plain, free, slow = (predict(profile, Decisions(in_place=nodes)) for nodes in (frozenset[str](), FREE, SLOW))
    assert (plain.peak_bytes - free.peak_bytes, free.peak_bytes - slow.peak_bytes) == (30, 20)
    assert (plain.extra_ms, free.extra_ms, slow.extra_ms) == (0, 0, 1)
    assert slow.parts["temporaries"] == plain.parts["temporaries"] - 50
    assert sum(slow.parts.values()) == slow.peak_bytes


def test_nodes_unknown_to_the_profile_are_refused() -> None:
    profile = with_groups(chain(4), {}, {})
    with pytest.raises(ValueError, match="TanhBackward0"):
        predict(profile, Decisions(in_place=frozenset({"TanhBackward0"})))
    with pytest.raises(ValueError, match="NativeBatchNorm"):  # the second one without the first
        predict(profile, Decisions(in_place=frozenset({"NativeBatchNormBackward0"})))


def test_the_plain_step_stays_as_it_is() -> None:
    profile = with_groups(chain(4), everywhere(chain(4), 30), everywhere(chain(4), 20))
    made = plan(profile, predict(profile, Decisions()).peak_bytes)
    assert (made.in_place, made.decisions) == ({}, Decisions())


def test_free_gradients_come_first() -> None:
    profile = with_groups(chain(4), everywhere(chain(4), 30), everywhere(chain(4), 20))
    plain = predict(profile, Decisions()).peak_bytes
    assert predict_in_place_peak(profile) == plain - 30
    for less in (1, 30):
        made = plan(profile, plain - less)
        assert made.decisions == Decisions(in_place=FREE)
        assert made.in_place == {"ReluBackward0": 4096}
        assert (made.predicted.extra_ms, made.bound_ms) == (0, 0)
        assert made.predicted.peak_bytes == plain - 30


@pytest.mark.parametrize(("ms", "nodes"), [(0.5, SLOW), (1.5, FREE)])
def test_costly_gradients_are_used_where_the_whole_takes_less(ms: float, nodes: frozenset[str]) -> None:
    """Each block of the chain that is dropped takes 1 ms and leaves out 40 bytes."""
    profile = with_groups(chain(6, inner=1), {}, everywhere(chain(6, inner=1), 40), ms)
    made = plan(profile, predict(profile, Decisions()).peak_bytes - 40)
    assert made.decisions.in_place == nodes
    assert made.predicted.extra_ms == min(ms, 1)
    assert made.bound_ms <= made.predicted.extra_ms


def test_where_nothing_else_fits_it_is_done_at_any_price() -> None:
    profile = with_groups(chain(6), everywhere(chain(6), 5), everywhere(chain(6), 7), 1e6)
    least = find_smallest_peak(replace(profile, base_bytes=chain(6).base_bytes, in_place=()))[1].peak_bytes
    decisions, found = find_smallest_peak(profile)
    assert (decisions.in_place, found.peak_bytes) == (SLOW, least)
    made = plan(profile, least)
    assert made.decisions.in_place == SLOW
    assert made.predicted.peak_bytes == least
    with pytest.raises(Infeasible) as caught:
        plan(profile, least - 1)
    assert caught.value.smallest_peak_bytes == least


def test_for_flops_time_comes_second() -> None:
    profile = with_groups(transformer(3), {}, everywhere(transformer(3), 64), 1e3)
    budget = predict(profile, Decisions()).peak_bytes - 64
    made = plan(profile, budget, minimize="flops")
    assert made.predicted.extra_flops == 0
    assert plan(profile, budget).predicted.extra_ms <= made.predicted.extra_ms


@given(st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
@pytest.mark.slow
def test_guarantees_hold_with_it(seed: int) -> None:
    random = Random(seed)
    plain = random_profile(seed, 8)
    base = {position: random.randrange(60) for position in range(len(plain.base_bytes))}
    profile = with_groups(plain, base, {p: n // 2 for p, n in base.items()}, random.random() * 3)
    low, high = find_smallest_peak(profile)[1].peak_bytes, predict(profile, Decisions()).peak_bytes
    before = float("inf")
    for step in range(5):
        budget = low + (high - low) * step // 4
        made = plan(profile, budget)
        assert made.predicted.peak_bytes <= budget
        assert made.predicted == predict(profile, made.decisions)
        assert made.predicted.extra_ms <= before + 1e-9
        assert made.bound_ms <= made.predicted.extra_ms + 1e-9
        assert plan(replace(profile), budget) == made
        before = made.predicted.extra_ms


def test_it_survives_json_and_older_files_have_none() -> None:
    profile = with_groups(chain(4), everywhere(chain(4), 30), everywhere(chain(4), 20))
    made = plan(profile, find_smallest_peak(profile)[1].peak_bytes)
    assert Profile.from_json(profile.to_json()) == profile
    assert Plan.from_json(made.to_json()) == made
    assert made.in_place
    text = plan(chain(4), "90%").to_json()
    assert Plan.from_json(text.replace('"in_place":{},', "")).in_place == {}


def test_between_two_sizes() -> None:
    small = with_groups(chain(4), everywhere(chain(4), 11), everywhere(chain(4), 8), 1.0)
    large = with_groups(chain(4), everywhere(chain(4), 30), everywhere(chain(4), 20), 2.0)
    assert alike(small, large)
    assert not alike(small, replace(large, in_place=large.in_place[:1]))
    free, slow = between(small, large, 0.5, FINGERPRINT).in_place
    assert (set(free.saved_bytes), set(slow.saved_bytes)) == ({20}, {14})  # 20.5: no more than is left out for sure
    assert slow.extra_ms == 1.5
