"""The bound: never above what any plan takes, and close to it where the best plan is known."""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lowtide.errors import Infeasible
from lowtide.planner import plan, predict
from lowtide.planner.records import Decisions, Profile
from lowtide.planner.simulate.simulator import Simulator
from lowtide.planner.solve.lower_bound import lower_bound
from planner import bruteforce
from planner.profiles import chain, profiles, random_profile, transformer


def test_a_budget_above_the_plain_peak_costs_nothing() -> None:
    profile = chain(4)
    assert lower_bound(Simulator(profile), predict(profile, Decisions()).peak_bytes) == 0


@pytest.mark.parametrize("dropped", [1, 3, 5])
def test_it_is_exact_where_one_drop_takes_what_one_block_holds(dropped: int) -> None:
    """Each of 6 blocks gives 40 bytes for 1 ms; dropping `dropped` of them is the best that can be done."""
    profile = chain(6, inner=1)
    assert lower_bound(Simulator(profile), 311 - 40 * dropped) == pytest.approx(dropped, abs=1e-3)


@pytest.mark.parametrize("budget", [60, 0, -5])
def test_a_budget_that_nothing_reaches_has_no_bound(budget: int) -> None:
    assert lower_bound(Simulator(chain(6, inner=1)), budget) == math.inf


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(0, 100))
@pytest.mark.slow
def test_no_possible_plan_beats_it(seed: int, percent: int) -> None:
    profile = bruteforce.trimmed(random_profile(seed, 8), seed)
    assume(bruteforce.n_decisions(profile))
    outcomes = bruteforce.predictions(profile)
    smallest = min(outcome.peak_bytes for outcome in outcomes)
    plain = predict(profile, Decisions()).peak_bytes
    budget = smallest + (plain - smallest) * percent // 100
    least = min(outcome.extra_ms for outcome in outcomes if outcome.peak_bytes <= budget)
    assert lower_bound(Simulator(profile), budget) <= least
    if smallest > 1:
        assert lower_bound(Simulator(profile), smallest - 1) >= lower_bound(Simulator(profile), smallest)


@pytest.mark.slow
@given(profiles(max_ops=24), st.integers(20, 100))
def test_no_plan_that_was_found_beats_it(profile: Profile, percent: int) -> None:
    try:
        made = plan(profile, f"{percent}%")
    except Infeasible:
        return
    assert lower_bound(Simulator(profile), made.budget_bytes) <= made.predicted.extra_ms


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("percent", [85, 70, 60, 50, 40])
def test_plans_of_a_transformer_are_close_to_it(percent: int) -> None:
    profile = transformer(6)
    made = plan(profile, f"{percent}%")
    bound = lower_bound(Simulator(profile), made.budget_bytes)
    assert bound <= made.predicted.extra_ms <= 1.25 * bound
