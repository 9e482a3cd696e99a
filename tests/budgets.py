"""A model's step within a budget, as a user gets it: rehearsed, planned, verified."""

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import lowtide
from lowtide.planner import find_smallest_peak, predict
from lowtide.planner.records import Decisions, Plan, Profile


def step_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Forward and backward."""

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return step


def within(
    model: nn.Module, step: Callable[[Any], Any], batch: Any, part: int
) -> tuple[Profile, Plan, lowtide.Verdict]:
    """For `part` per cent of the way from the smallest peak to the plain one. A warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        profile = lowtide.rehearse(model, step, batch)
        low, high = find_smallest_peak(profile)[1].peak_bytes, predict(profile, Decisions()).peak_bytes
        plan = lowtide.plan(profile, low + (high - low) * part // 100)
        return profile, plan, lowtide.verify(model, step, batch, plan)
