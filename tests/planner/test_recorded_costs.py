"""Plans cost no more than they did when these numbers were recorded, so that no change of a solver loses quality."""

import pytest

from lowtide.planner import find_smallest_peak, plan, predict
from lowtide.planner.records import Decisions, Profile
from planner.profiles import random_profile, transformer

RECORDED: dict[str, tuple[int, tuple[float, ...]]] = {
    "transformer 3": (2392, (106.2, 25.6, 4.6)),
    "random 0": (161, (2.5, 1.5, 1.0)),
    "random 1": (113, (22.5, 18.5, 18.0)),
    "random 2": (207, (63.5, 10.0, 2.5)),
    "random 3": (137, (6.5, 1.5, 1.0)),
    "random 4": (146, (5.5, 2.0, 0.0)),
    "random 5": (133, (4.0, 2.0, 1.0)),
}
"""Smallest peak, and milliseconds of plans for it, and for a quarter and half of the way to the plain peak."""


def profile_of(name: str) -> Profile:
    kind, number = name.split()
    return transformer(int(number)) if kind == "transformer" else random_profile(int(number), 24)


@pytest.mark.parametrize("name", RECORDED)
def test_plans_cost_no_more_than_they_did(name: str) -> None:
    profile, (lowest, costs) = profile_of(name), RECORDED[name]
    assert find_smallest_peak(profile)[1].peak_bytes <= lowest
    plain = predict(profile, Decisions()).peak_bytes
    for quarters, most in enumerate(costs):
        budget = lowest + (plain - lowest) * quarters // 4
        assert plan(profile, budget).predicted.extra_ms <= most + 1e-6
