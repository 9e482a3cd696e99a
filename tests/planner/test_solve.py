"""Solvers: never over the budget, no more than needed, the same each time, and honest about what cannot be done."""

import re
from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Literal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lowtide.errors import BudgetError, Infeasible
from lowtide.planner import find_smallest_peak, plan, predict
from lowtide.planner.planning import get_simulator, with_free_recomputes
from lowtide.planner.records import Decisions, Plan, Profile
from lowtide.planner.simulate.assignment import DecisionVector
from lowtide.planner.simulate.simulator import Simulator
from lowtide.planner.solve.greedy import GreedySearch
from lowtide.planner.solve.ladder import BudgetLadder
from lowtide.units import format_bytes
from planner import bruteforce
from planner.profiles import Tape, chain, profiles, random_profile, transformer

TRANSFORMER = transformer(4)


def plain_peak(profile: Profile) -> int:
    return predict(profile, Decisions()).peak_bytes


# --- what can be worked out by hand


def test_a_budget_above_the_plain_peak_asks_for_nothing() -> None:
    made = plan(chain(4), plain_peak(chain(4)))
    assert made.decisions == Decisions()
    assert made.predicted == made.plain


def test_early_blocks_are_dropped_and_late_ones_kept() -> None:
    """X has 10 bytes, h 40: 6 blocks peak at 311 plain, and each dropped early block takes 40 off."""
    profile = chain(6, inner=1)
    assert plain_peak(profile) == 70 + 240 + 1
    for dropped in range(6):
        made = plan(profile, 311 - 40 * dropped)
        assert set(made.recompute) == {f"blocks.{block}#0:1" for block in range(dropped)}
        assert made.predicted.peak_bytes == 311 - 40 * dropped
        assert made.replay == ()


def test_the_last_block_is_dropped_too_only_where_that_helps() -> None:
    profile = chain(6, inner=1)
    with pytest.raises(Infeasible) as caught:
        plan(profile, 109)
    assert caught.value.smallest_peak_bytes == 70 + 40
    assert plan(profile, 110).predicted.peak_bytes == 110


def test_values_without_a_recipe_are_replayed() -> None:
    profile = chain(6, inner=2)
    without = replace(profile, values=tuple(replace(value, recipe=None) for value in profile.values))
    peak = plain_peak(without)
    made = plan(without, peak - 80)
    assert made.replay == ("blocks.0#0",)
    assert made.recompute == {}
    assert made.predicted.peak_bytes == peak - 80
    assert made.predicted.extra_ms == 6.0


def test_cheap_recomputes_come_before_expensive_ones_and_replays() -> None:
    made = plan(TRANSFORMER, "80%")
    assert made.predicted.extra_flops == 0
    assert made.replay == ()
    assert set(made.recompute.values()) == {"OpBackward0"}


def test_cheap_plans_redo_no_product() -> None:
    for share in (90, 80, 70):
        assert plan(TRANSFORMER, f"{share}%", allow="cheap").predicted.extra_flops == 0
    with pytest.raises(Infeasible) as caught:
        plan(TRANSFORMER, "45%", allow="cheap")
    assert plan(TRANSFORMER, caught.value.smallest_peak_bytes, allow="cheap").predicted.extra_flops == 0
    assert plan(TRANSFORMER, "45%").predicted.extra_flops > 0


def test_few_flops_or_little_time() -> None:
    slow = tuple(v if v.flops else replace(v, cost_ms=60 * v.cost_ms) for v in TRANSFORMER.values)
    profile = replace(TRANSFORMER, values=slow)
    quick, frugal = plan(profile, "80%"), plan(profile, "80%", minimize="flops")
    assert frugal.predicted.extra_flops == 0 < quick.predicted.extra_flops
    assert frugal.predicted.extra_ms > quick.predicted.extra_ms >= quick.bound_ms
    assert frugal.predicted == predict(profile, frugal.decisions)
    with pytest.raises(Infeasible) as least_time:
        plan(profile, 1)
    with pytest.raises(Infeasible, match=re.escape(str(least_time.value))):
        plan(profile, 1, minimize="flops")


def test_an_activation_module_without_flops_may_be_replayed_in_a_cheap_plan() -> None:
    profile = chain(4, inner=2)
    calls = tuple(replace(call, flops=0) for call in profile.calls)
    only_replays = replace(profile, calls=calls, values=tuple(replace(v, recipe=None) for v in profile.values))
    assert plan(only_replays, plain_peak(profile) - 80, allow="cheap").replay == ("blocks.0#0",)
    with pytest.raises(Infeasible):
        plan(replace(only_replays, calls=profile.calls), plain_peak(profile) - 80, allow="cheap")


def test_percentages_are_of_the_measured_peak_where_there_is_one() -> None:
    assert plan(TRANSFORMER, "90%").budget_bytes == plain_peak(TRANSFORMER) * 90 // 100
    measured = replace(TRANSFORMER, measured_plain_peak_bytes=6000)
    assert plan(measured, "90%").budget_bytes == 5400
    with pytest.raises(BudgetError):
        plan(TRANSFORMER, "a lot")


def test_a_plan_says_what_it_is_for() -> None:
    made = plan(TRANSFORMER, "60%")
    assert made.fingerprint == TRANSFORMER.fingerprint
    assert made.step_ms == TRANSFORMER.step_ms
    assert made.plain == predict(TRANSFORMER, Decisions())
    assert made.predicted == predict(TRANSFORMER, made.decisions)
    assert Plan.from_json(made.to_json()) == made


def test_more_budget_never_costs_more_on_a_transformer() -> None:
    low = find_smallest_peak(TRANSFORMER)[1].peak_bytes
    costs = [
        plan(TRANSFORMER, budget).predicted.extra_ms
        for budget in range(low, plain_peak(TRANSFORMER) + 300, (plain_peak(TRANSFORMER) - low) // 20)
    ]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == 0


def costs_by_budget(profile: Profile, shares: Iterable[int]) -> list[tuple[float, float]]:
    """Extra time and then FLOPs, infinite if none fits, for budgets of so many thousandths of the plain peak."""
    found = []
    for share in shares:
        made = attempt(
            replace(profile), plain_peak(profile) * share // 1000 or 1
        )  # a copy: nothing found before counts
        infinite = (float("inf"), float("inf"))
        spent = infinite if isinstance(made, Infeasible) else (made.predicted.extra_ms, made.predicted.extra_flops)
        found.append(spent)
    return found


@settings(max_examples=20)
@given(profiles(max_ops=24), st.lists(st.integers(0, 1000), min_size=2, max_size=6))
def test_more_budget_never_costs_more_on_any_step(profile: Profile, shares: list[int]) -> None:
    costs = costs_by_budget(profile, sorted(shares))
    assert costs == sorted(costs, reverse=True)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("costs_seed", range(2))
def test_more_budget_never_costs_more_with_noisy_costs(costs_seed: int) -> None:
    """Identical blocks are never measured to take identical times."""
    noise = Random(costs_seed)
    noisy = tuple(replace(v, cost_ms=v.cost_ms * noise.uniform(0.7, 1.4)) for v in TRANSFORMER.values)
    costs = costs_by_budget(replace(TRANSFORMER, values=noisy), range(1000, 500, -110))
    assert costs == sorted(costs)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.slow
def test_how_far_down_plans_can_go_is_no_matter_of_measured_times(seed: int) -> None:
    """Else the budget that an error offers could be refused by the next call, which rehearses again."""
    noise, profile = Random(seed), random_profile(seed, 60)

    def measured(cost_ms: float) -> float:
        return cost_ms * noise.uniform(0.7, 1.4)

    def again() -> Profile:
        values = (replace(value, cost_ms=measured(value.cost_ms)) for value in profile.values)
        calls = (
            replace(call, cost_ms=measured(call.cost_ms), advance_ms=measured(call.advance_ms))
            for call in profile.calls
        )
        return replace(profile, values=tuple(values), calls=tuple(calls))

    rehearsals = [again() for _ in range(8)]
    smallest = {find_smallest_peak(each)[1].peak_bytes for each in rehearsals}
    assert len(smallest) == 1
    for each in rehearsals:
        assert plan(each, min(smallest)).predicted.peak_bytes <= min(smallest)


@pytest.mark.slow
def test_earlier_plans_change_nothing() -> None:
    asked = [plan(TRANSFORMER, f"{share}%") for share in (90, 50, 65, 51)]
    for made in asked:
        assert plan(Profile.from_json(TRANSFORMER.to_json()), made.budget_bytes) == made


def test_a_simulator_is_made_once_for_each_question() -> None:
    assert get_simulator(TRANSFORMER, "cheap") is get_simulator(TRANSFORMER, "cheap")
    assert get_simulator(TRANSFORMER, "cheap") is not get_simulator(TRANSFORMER, "all")


def test_the_smallest_peak_is_searched_for_once_for_all_objectives_and_margins(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[GreedySearch] = []
    own = GreedySearch.search_smallest

    def search_smallest(search: GreedySearch) -> list[DecisionVector]:
        searches.append(search)
        return own(search)

    monkeypatch.setattr(GreedySearch, "search_smallest", search_smallest)
    profile = transformer(3, width=96)
    by_time, by_flops = find_smallest_peak(profile)[1], find_smallest_peak(profile, "flops")[1]
    with_margin = replace(profile, static=replace(profile.static, margin=100))
    assert by_time.peak_bytes == by_flops.peak_bytes == find_smallest_peak(with_margin)[1].peak_bytes - 100
    assert len(searches) == 1
    assert find_smallest_peak(replace(profile, base_bytes=tuple(b + 1 for b in profile.base_bytes)))[1] != by_time
    assert len(searches) == 2


def test_free_recomputes_are_added_and_others_are_not() -> None:
    tape = Tape()
    with tape.call("model#0"):
        free = tape.op(10, recipe="shape", ms=0.0)
        costly = tape.op(20, free, saves=[free], operands=[], recipe="zeros", ms=1.0)
        tape.op(1, costly, saves=[costly])
    added = with_free_recomputes(Simulator(tape.profile()), Decisions())
    assert added.recompute == {"model#0:0"}


def test_budgets_that_an_extreme_plan_meets_need_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    ladder = BudgetLadder(Simulator(chain(4)))
    monkeypatch.setattr(ladder.exact, "search", None)
    assert ladder.best(ladder.bottom.peak - 1) is None
    assert ladder.best(ladder.bottom.peak) is ladder.bottom
    assert ladder.best(ladder.top.peak) is ladder.best(ladder.top.peak + 1) is ladder.top


def test_where_rows_are_no_guide_at_a_small_budget_they_may_be_one_at_a_larger_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ladder, given = BudgetLadder(Simulator(transformer(6))), list[tuple[int, dict[int, float]]]()

    def search(_: object, limit: int, __: object, left_out: dict[int, float], *___: object) -> object:
        given.append((limit, left_out))
        return 0.0, {0: float(limit)}  # as much as there is

    monkeypatch.setattr(ladder.exact, "search", search)
    low, high = ladder.bottom.peak, ladder.top.peak
    for part in (30, 60, 90):
        ladder.best(low + (high - low) * part // 100)
    assert len(given) > 5
    assert all(bytes_ > limit for limit, left_out in given for bytes_ in left_out.values())


def test_offloading_is_used_only_on_request() -> None:
    """At 10 bytes a millisecond the norms' inputs go, and a matrix product is not redone."""
    profile = replace(TRANSFORMER, offload_bytes_per_ms=100.0)
    assert plan(profile, "60%").offload == ()
    made = plan(profile, "60%", offload=True)
    assert made.offload
    assert made.predicted.host_bytes > 0
    assert 0 < made.bound_ms <= made.predicted.extra_ms < plan(profile, "60%").predicted.extra_ms
    least, without = find_smallest_peak(profile, offload=True)[1], find_smallest_peak(profile)[1]
    assert least.peak_bytes < without.peak_bytes == find_smallest_peak(TRANSFORMER)[1].peak_bytes
    assert plan(TRANSFORMER, "60%", offload=True).decisions == plan(TRANSFORMER, "60%").decisions


def test_the_error_offers_a_budget_that_works() -> None:
    profile = transformer(3, width=1000)
    with pytest.raises(Infeasible) as caught:
        plan(profile, "20%")
    error = caught.value
    assert error.budget_bytes == plain_peak(profile) * 20 // 100
    assert sum(error.parts.values()) == error.smallest_peak_bytes
    offered = str(error).split('budget="')[1].split('"')[0]
    made = plan(profile, offered)
    assert error.smallest_peak_bytes <= made.budget_bytes
    assert made.predicted.peak_bytes <= made.budget_bytes
    assert f"Smallest peak: {format_bytes(error.smallest_peak_bytes, round_up=True)}" in str(error)


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (0, "before forward, are temporaries."),
        (1, "in forward, are temporaries, of which smaller batches need less."),
        (-2, "in backward, are temporaries, of which smaller batches need less."),
        (-1, "after backward, are temporaries, as of the update."),
    ],
)
def test_the_error_says_where_plans_save_nothing(at: int, reason: str) -> None:
    profile = transformer(3)
    base = [*profile.base_bytes]
    base[at] = 1000 * max(base)
    last = len(base) - 1
    phases = {"forward": 1, "backward": 2, "after backward": last}
    with pytest.raises(Infeasible) as caught:
        plan(replace(profile, base_bytes=tuple(base), phases=phases), "50%")
    temporaries = format_bytes(caught.value.parts["temporaries"])
    assert f"Note: plans save next to nothing of this step: {temporaries} at its peak, {reason}" in str(caught.value)


@pytest.mark.parametrize("is_freed", [False, True])
def test_the_error_says_what_the_step_before_has_left_at_the_peak(is_freed: bool) -> None:
    profile = transformer(3)
    static = replace(profile.static, carried_over=plain_peak(profile) // 10)
    base = [max(profile.base_bytes), *(n_bytes - is_freed * static.carried_over for n_bytes in profile.base_bytes[1:])]
    with pytest.raises(Infeasible) as caught:
        plan(replace(profile, static=static, base_bytes=tuple(base)), 1)
    note = f"Note: {format_bytes(static.carried_over)} at its peak are left from the step before, such as an output"
    assert (note in str(caught.value)) != is_freed


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("limit_s", [0.0, 0.3])
def test_a_time_limit_gives_the_best_so_far_and_its_gap(limit_s: float) -> None:
    profile = replace(TRANSFORMER)
    without = plan(TRANSFORMER, "55%")
    made = plan(profile, "55%", time_limit_s=limit_s)
    assert made.predicted.peak_bytes <= made.budget_bytes
    assert 0 < made.bound_ms <= made.predicted.extra_ms
    assert made.predicted.extra_ms < 3 * without.predicted.extra_ms
    assert plan(profile, "55%") == without  # what the clock cut short is not taken for an answer


def test_another_solver_can_be_given() -> None:
    def all_of_it(simulator: Simulator, budget_bytes: int) -> Decisions:
        return Decisions(recompute=frozenset(a for a in simulator.index.slots.addresses if "blocks" in a and ":1" in a))

    made = plan(chain(3, inner=1), 90, solver=all_of_it)
    assert len(made.recompute) == 3


# --- any step


def attempt(profile: Profile, budget: int | str, allow: Literal["all", "cheap"] = "all") -> Plan | Infeasible:
    try:
        return plan(profile, budget, allow=allow)
    except Infeasible as error:
        return error


@settings(max_examples=50)
@given(profiles(max_ops=24), st.integers(0, 100), st.sampled_from(["all", "cheap"]))
def test_a_plan_is_never_over_its_budget(profile: Profile, percent: int, allow: Literal["all", "cheap"]) -> None:
    budget = max(1, plain_peak(profile) * percent // 100)
    made = attempt(profile, budget, allow)
    if isinstance(made, Infeasible):
        assert made.smallest_peak_bytes > budget
        nearest = plan(profile, made.smallest_peak_bytes, allow=allow)
        assert nearest.predicted.peak_bytes <= made.smallest_peak_bytes
    else:
        assert made.predicted.peak_bytes <= made.budget_bytes == budget
        assert made.predicted == predict(profile, made.decisions)
        costly = {call.id for call in profile.calls if call.flops}
        assert allow == "all" or not costly & set(made.replay)


@settings(max_examples=20)
@given(profiles(max_ops=24), st.integers(30, 100))
def test_the_same_problem_has_the_same_plan(profile: Profile, percent: int) -> None:
    one, other = attempt(profile, f"{percent}%"), attempt(Profile.from_json(profile.to_json()), f"{percent}%")
    assert (str(one), type(one)) == (str(other), type(other))


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_greedy_is_never_better_than_trying_everything(seed: int) -> None:
    profile = bruteforce.trimmed(random_profile(seed, 7), seed)
    assume(bruteforce.n_decisions(profile))
    outcomes = bruteforce.predictions(profile)
    _, smallest = find_smallest_peak(profile, offload=True)
    assert smallest.peak_bytes >= min(outcome.peak_bytes for outcome in outcomes)
    made = plan(profile, smallest.peak_bytes, offload=True)
    least = min(outcome.extra_ms for outcome in outcomes if outcome.peak_bytes <= smallest.peak_bytes)
    assert made.predicted.extra_ms >= least - 1e-9


def test_larger_batches_get_the_smallest_peak_unless_the_plan_is_of_compiled_code() -> None:
    profile = chain(3)
    smallest, _ = find_smallest_peak(profile)
    made = plan(profile, "80%")
    assert made.fallback is not None
    assert made.fallback.decisions == smallest
    assert plan(replace(profile, graphs=("hash",)), "80%").fallback is None
