"""Plans for compiled code are measured one after the other until one is within the budget."""

from dataclasses import replace

import torch
from torch import nn

import lowtide
from lowtide.api.compiled_fit import CLOSE, cheapest_within
from lowtide.levers.selection import Choice
from lowtide.planner.planning import smallest_plan, unplanned_step
from lowtide.planner.records import Plan


def test_plans_with_larger_forecasts_are_measured_if_the_smallest_is_little_over_the_budget() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(40)))

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    profile = lowtide.rehearse(model, step, torch.randn(256, 64))
    smallest, peaks = smallest_plan(profile), list[int]()
    first = replace(smallest, budget_bytes=int(smallest.predicted.peak_bytes * (1 - 2 * CLOSE)))

    def peak_of(tried: Plan) -> int:
        """Return a peak below the forecast, and for the smallest plan only one over the budget."""
        share = 1 + CLOSE / 2 if tried.decisions == smallest.decisions else 0.99
        peaks.append(int(tried.budget_bytes * share))
        return peaks[-1]

    _, best = cheapest_within(Choice(profile, unplanned_step(profile)), first, peak_of, 4)
    assert len(peaks) == 2
    assert best is not None
    assert best.predicted.peak_bytes == peaks[1] <= best.budget_bytes < peaks[0]
