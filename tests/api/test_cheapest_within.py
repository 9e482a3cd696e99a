"""Plans for compiled code are measured one after the other until one is within the budget."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import lowtide
from lowtide.api.compiled_fit import CLOSE, find_cheapest_within
from lowtide.levers.selection import Choice
from lowtide.planner.planning import (
    find_smallest_plan,
    predict_unplanned_step,
    recompute_arithmetic,
    recompute_products,
)
from lowtide.planner.records import Plan


@pytest.fixture(scope="module")
def profile() -> lowtide.Profile:
    """Rehearse a model for which there are many plans."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(24)))

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    return lowtide.rehearse(model, step, torch.randn(256, 64))


def test_plans_with_larger_forecasts_are_measured_if_the_smallest_is_little_over_the_budget(
    profile: lowtide.Profile,
) -> None:
    smallest, peaks = find_smallest_plan(profile), list[int]()
    first = replace(smallest, budget_bytes=int(smallest.predicted.peak_bytes * (1 - 2 * CLOSE)))

    def peak_of(tried: Plan) -> int:
        """Return a peak below the forecast, and for the smallest plan only one over the budget."""
        share = 1 + CLOSE / 2 if tried.decisions == smallest.decisions else 0.99
        peaks.append(int(tried.budget_bytes * share))
        return peaks[-1]

    _, best = find_cheapest_within(Choice(profile, predict_unplanned_step(profile)), first, peak_of, 4)
    assert len(peaks) == 2
    assert best is not None
    assert best.predicted.peak_bytes == peaks[1] <= best.budget_bytes < peaks[0]


@pytest.mark.parametrize("most", [3, 4])
@pytest.mark.parametrize("over", [0.002, 0.3])
def test_the_last_plan_that_is_measured_is_the_smallest_if_all_others_are_over_the_budget(
    profile: lowtide.Profile, over: float, most: int
) -> None:
    smallest, tried = find_smallest_plan(profile), list[Plan]()
    first = lowtide.plan(profile, "85%")

    def peak_of(plan: Plan) -> int:
        """Return a peak within the budget for the smallest plan alone."""
        tried.append(plan)
        return int(plan.budget_bytes * (1.0 if plan.decisions == smallest.decisions else 1 + over))

    n_tried, best = find_cheapest_within(Choice(profile, predict_unplanned_step(profile)), first, peak_of, most)
    assert n_tried == len(tried) <= most
    assert best is not None
    assert best.decisions == smallest.decisions
    assert best.predicted.peak_bytes <= best.budget_bytes


def test_the_smallest_plan_is_measured_where_corrected_forecasts_lead_to_plans_that_were_over_the_budget(
    profile: lowtide.Profile,
) -> None:
    """Each next plan is measured less over its forecast than the one before, which then seems to fit."""
    smallest = find_smallest_plan(profile)
    first = lowtide.plan(profile, "85%")
    excess = iter([0.05, 0.001])

    def peak_of(plan: Plan) -> int:
        if plan.decisions == smallest.decisions:
            return plan.budget_bytes
        return int(plan.budget_bytes * (1 + next(excess)))

    _, best = find_cheapest_within(Choice(profile, predict_unplanned_step(profile)), first, peak_of, 3)
    assert best is not None
    assert best.decisions == smallest.decisions


@pytest.mark.parametrize("tries_one_kind", [False, True])
def test_a_plan_without_flops_is_measured_if_the_forecast_leads_to_no_cheaper_plan(
    profile: lowtide.Profile, monkeypatch: pytest.MonkeyPatch, tries_one_kind: bool
) -> None:
    """Its own forecast is above the budget."""
    arithmetic, smallest = recompute_arithmetic(profile), find_smallest_plan(profile)
    assert arithmetic.recompute
    assert not arithmetic.predicted.extra_flops
    first = replace(smallest, budget_bytes=arithmetic.predicted.peak_bytes - 64)
    assert first.predicted.extra_flops

    def peak_of(plan: Plan) -> int:
        return plan.budget_bytes if plan.decisions == arithmetic.decisions else plan.predicted.peak_bytes

    monkeypatch.setattr("lowtide.api.compiled_fit.plan_by_forecast", lambda *_: smallest)
    choice = Choice(profile, predict_unplanned_step(profile))
    n_tried, best = find_cheapest_within(choice, first, peak_of, 4, tries_one_kind=tries_one_kind)
    assert n_tried == 1 + tries_one_kind
    assert best is not None
    assert best.decisions == (arithmetic if tries_one_kind else smallest).decisions
    assert best.predicted.peak_bytes <= best.budget_bytes


def test_products_are_recomputed_alone_if_the_plan_with_the_smallest_forecast_is_over_the_budget(
    profile: lowtide.Profile,
) -> None:
    products, smallest = recompute_products(profile), find_smallest_plan(profile)
    assert products.predicted.extra_flops
    first = replace(smallest, budget_bytes=smallest.predicted.peak_bytes - 64)

    def peak_of(plan: Plan) -> int:
        return plan.budget_bytes + (0 if plan.decisions == products.decisions else 64)

    choice = Choice(profile, predict_unplanned_step(profile))
    n_tried, best = find_cheapest_within(choice, first, peak_of, 4, tries_one_kind=True)
    assert n_tried == 2
    assert best is not None
    assert best.decisions == products.decisions
