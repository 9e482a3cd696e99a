"""Branch and bound: as good as trying everything where its rows say all, and close to the bound on deep models."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lowtide.errors import Infeasible
from lowtide.planner import find_smallest_peak, plan, predict
from lowtide.planner.records import Decisions, Profile
from lowtide.planner.simulate.simulator import Simulator
from lowtide.planner.solve.exact import BranchAndBound, is_rough
from lowtide.planner.solve.greedy import GreedySearch
from lowtide.planner.solve.lower_bound import lower_bound
from lowtide.planner.solve.moves import Moves
from lowtide.planner.solve.pareto_pool import Candidate, CostRange, ParetoPool, build_pareto_front
from planner import bruteforce
from planner.profiles import Tape, chain, profiles, random_profile, transformer


def searched(profile: Profile, limit: int) -> tuple[float, Candidate | None]:
    """The bound and the best choice that one search by branch and bound finds for `limit` bytes beyond `static`."""
    moves = Moves(Simulator(profile))
    search = GreedySearch(moves)
    nothing = Candidate(limit, 0.0, 0, moves.simulator.keep_everything())
    anything = Candidate(0, float("inf"), 1 << 60, moves.simulator.keep_everything())
    span = CostRange(nothing, anything)
    bound, _ = BranchAndBound(moves.simulator, moves).search(search, limit, span, {})
    return bound, search.pool.best(limit, span)


@pytest.mark.parametrize("inner", [1, 2])
def test_one_search_finds_what_trying_everything_finds(inner: int) -> None:
    profile = chain(3, inner=inner)
    outcomes = bruteforce.predictions(profile)
    for limit in sorted({outcome.peak_bytes for outcome in outcomes}):
        _, found = searched(profile, limit)
        assert found is not None
        assert found.extra_ms == min(outcome.extra_ms for outcome in outcomes if outcome.peak_bytes <= limit)


def test_what_two_calls_of_the_model_save_at_one_address_is_recomputed_in_both() -> None:
    tape = Tape()
    for _ in range(2):
        with tape.call("model#0", refused="the model itself"):
            x = tape.op(10)
            y = tape.op(40, x, saves=[x], recipe="gelu", ms=2.0)
            tape.op(1, y, saves=[y])
    profile = tape.profile()
    plain = predict(profile, Decisions())
    smallest = min(outcome.peak_bytes for outcome in bruteforce.predictions(profile))
    assert smallest < plain.peak_bytes
    bound, found = searched(profile, smallest)
    assert found is not None
    assert found.extra_ms == 4.0
    assert bound <= 4.0


def test_addresses_whose_decisions_hold_in_some_calls_only_are_ambiguous() -> None:
    """The second of two values comes from another node in each call; the third is the same in both."""
    tape = Tape()
    for _ in range(2):
        with tape.call("model#0", refused="the model itself"):
            x = tape.op(10)
            y = tape.op(40, x, saves=[x], recipe="gelu")
            z = tape.op(40, x, saves=[y], recipe="relu")
            tape.op(1, z, saves=[z])
    profile = tape.profile()
    values = [
        replace(value, node="SiluBackward0" if n == y else "GeluBackward0") for n, value in enumerate(profile.values)
    ]
    profile = replace(profile, values=tuple(values))
    made = plan(profile, min(outcome.peak_bytes for outcome in bruteforce.predictions(profile)))
    assert set(made.recompute) == {"model#0:1", "model#0:2"}
    assert made.ambiguous_addresses == ("model#0:1",)


def test_variables_of_a_solution_stand_for_decisions_of_each_kind() -> None:
    simulator = Simulator(replace(chain(3), offload_bytes_per_ms=100.0))
    exact = BranchAndBound(simulator, Moves(simulator))
    n_variables = exact.covering.variables.n_fixed
    assert simulator.decisions(exact.choice(np.zeros(n_variables))) == Decisions()
    choice = exact.choice(np.ones(n_variables))
    assert all(choice.offload[group.addresses].all() for group in exact.moves.offloads)
    assert choice.recompute.any()
    assert choice.replay.any()


def test_infeasible_problems_have_an_infinite_bound() -> None:
    assert searched(chain(3), 20) == (float("inf"), None)


@given(profiles(max_ops=20), st.integers(20, 99))
def test_search_results_fit_and_are_predicted_exactly(profile: Profile, percent: int) -> None:
    limit = (predict(profile, Decisions()).peak_bytes - profile.static.total) * percent // 100
    _, found = searched(profile, limit)
    if found is not None:
        simulator = Simulator(profile)
        prediction = simulator.predict(simulator.decisions(found.choice))
        assert prediction.peak_bytes - profile.static.total == found.peak <= limit
        assert (prediction.extra_ms, prediction.extra_flops) == (found.extra_ms, found.extra_flops)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("percent", [85, 70, 60, 50, 40])
def test_plans_of_a_transformer_are_close_to_the_bound_that_they_carry(percent: int) -> None:
    made = plan(transformer(8), f"{percent}%")
    assert 0 < made.bound_ms <= made.predicted.extra_ms <= 1.15 * made.bound_ms


def test_the_bound_of_a_plan_is_that_of_its_budget() -> None:
    profile = transformer(4)
    made = plan(profile, "60%")
    assert made.bound_ms == lower_bound(Simulator(profile), made.budget_bytes, known_ms=made.predicted.extra_ms)
    assert plan(profile, "100%").bound_ms == 0


def test_branch_and_bound_beats_greedy_searches_on_a_transformer() -> None:
    profile = transformer(6)
    plans = [plan(profile, f"{percent}%") for percent in (80, 60, 45)]
    by_greedy_searches = sum(greedy_ms(profile, made.budget_bytes) for made in plans)
    assert sum(made.predicted.extra_ms for made in plans) <= by_greedy_searches


def greedy_ms(profile: Profile, budget_bytes: int) -> float:
    """Extra time of the best choice that greedy searches find alone."""
    limit = budget_bytes - profile.static.total
    search = GreedySearch(Moves(Simulator(profile)))
    nothing, cheap = search.simulator.keep_everything(), search.moves.recompute_all(expensive=False)
    choices = [search.prune(choice, limit) for choice in search.find_fitting_choices(limit, nothing, cheap)]
    return min(search.cost(choice) for choice in choices)


@settings(max_examples=30)
@given(profiles(max_ops=20), st.integers(30, 99))
@example(random_profile(69, 19), 60)  # only run forward again for its result
def test_inputs_are_recomputed_only_where_their_call_runs_again(profile: Profile, percent: int) -> None:
    try:
        made = plan(profile, f"{percent}%")
    except Infeasible:
        return
    assert {address.partition("@")[0] for address in made.recompute if "@" in address} <= {*made.replay, *made.advance}


def test_a_measured_plain_peak_within_the_budget_asks_for_nothing() -> None:
    profile = transformer(3)
    peak = predict(profile, Decisions()).peak_bytes
    measured = replace(profile, measured_plain_peak_bytes=peak - 10)
    assert plan(measured, peak - 10).decisions == Decisions()


def test_the_smallest_peak_can_be_planned_for() -> None:
    profile = transformer(5)
    _, smallest = find_smallest_peak(profile)
    assert plan(replace(profile), smallest.peak_bytes).predicted.peak_bytes == smallest.peak_bytes


@pytest.mark.parametrize(("omitted", "rough"), [({}, False), ({1: 10}, False), ({1: 3, 2: 11}, True)])
def test_rows_that_leave_out_more_than_a_tenth_of_the_limit_are_rough(omitted: dict[int, int], *, rough: bool) -> None:
    assert is_rough(omitted, 100) is rough


def found(peak: int, ms: float, flops: int) -> Candidate:
    return Candidate(peak, ms, flops, Simulator(chain(1)).keep_everything())


def test_a_staircase_falls_in_time_and_in_flops_for_the_same_time() -> None:
    span = CostRange(found(100, 1.0, 10), found(50, 9.0, 90))
    seen = [
        found(40, 8.0, 8),
        found(60, 9.0, 95),
        found(70, 5.0, 99),
        found(75, 5.0, 50),
        found(80, 6.0, 4),
        found(95, 0.5, 2),
    ]
    assert [step.peak for step in build_pareto_front([span.least, *seen], span)] == [50, 70, 75, 100]


def test_a_pool_keeps_what_is_best_in_peak_or_cost() -> None:
    pool, simulator = ParetoPool(), Simulator(chain(1))
    sweep = simulator.sweep(simulator.keep_everything())
    for peak, ms, flops in ((50, 9.0, 9), (50, 9.0, 9), (60, 5.0, 9), (60, 9.0, 1), (70, 5.0, 8), (40, 8.0, 8)):
        pool.add(simulator.keep_everything(), replace(sweep, peak=peak, extra_ms=ms, extra_flops=flops))
    assert [(f.peak, f.extra_ms, f.extra_flops) for f in pool.candidates] == [(60, 5.0, 9), (70, 5.0, 8), (40, 8.0, 8)]
