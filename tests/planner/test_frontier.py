"""The frontier falls from the smallest peak to the plain step, and each point is one that a plan reaches."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from lowtide.errors import LowtideError
from lowtide.planner import find_smallest_peak, plan, predict
from lowtide.planner.budget_frontier import Frontier, frontier, read_points
from lowtide.planner.records import AppliedLever, Decisions, Profile
from lowtide.units import format_bytes
from planner.profiles import chain, profiles


@given(profiles())
@settings(max_examples=12)
def test_less_memory_costs_more_time(profile: Profile) -> None:
    points = frontier(profile, n_budgets=4).points
    peaks = [point.peak_bytes for point in points]
    times = [point.extra_ms for point in points]
    assert peaks == sorted(set(peaks))
    assert times == sorted(set(times), reverse=True)


@given(profiles())
@settings(max_examples=12)
def test_it_ends_at_the_plain_step_which_costs_nothing(profile: Profile) -> None:
    found = frontier(profile, n_budgets=3)
    plain = predict(profile, Decisions())
    last = found.points[-1]
    if last.extra_ms == 0 and last.peak_bytes < plain.peak_bytes:
        return  # a plan that is free takes its place
    assert (last.peak_bytes, last.extra_ms, last.extra_flops, last.share) == (plain.peak_bytes, 0, 0, 1)


def test_a_point_is_what_a_plan_for_that_peak_costs() -> None:
    profile = chain(6)
    found = frontier(profile, n_budgets=5)
    assert len(found.points) > 2
    assert found.points[0].peak_bytes == find_smallest_peak(profile)[1].peak_bytes
    for point in found.points:
        predicted = plan(profile, point.peak_bytes).predicted
        assert predicted.extra_ms == point.extra_ms
        assert point.share == point.peak_bytes / found.plain_bytes


def test_levers_cost_their_time_at_each_point_also_if_nothing_is_decided() -> None:
    lever = AppliedLever(name="micro-batches", what="", exact=False, settings={"n": 2.0}, extra_ms=2.5)
    profile = replace(chain(6), levers=(lever,))
    points = frontier(profile, n_budgets=5).points
    assert [point.extra_ms for point in points] == [p.extra_ms + 2.5 for p in frontier(chain(6), n_budgets=5).points]
    assert points[-1].extra_ms == plan(profile, points[-1].peak_bytes).predicted.extra_ms == 2.5


def test_a_frontier_is_described_in_one_line() -> None:
    found = frontier(chain(3), n_budgets=4)
    smallest = format_bytes(found.points[0].peak_bytes)
    assert f"{len(found.points)} points, {smallest} to {format_bytes(found.plain_bytes)}" in repr(found)


def test_it_survives_json() -> None:
    found = frontier(chain(3), n_budgets=4)
    assert Frontier.from_json(found.to_json()) == found


def test_one_budget_is_no_frontier() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        frontier(chain(2), n_budgets=1)


def test_points_that_were_measured_elsewhere_are_read(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    path.write_text('[{"name": "every block", "peak_bytes": 7, "extra_ms": null, "extra_flops": 3, "share": 0.5}]')
    (point,) = read_points(path)
    assert (point.name, point.peak_bytes, point.extra_ms, point.share) == ("every block", 7, None, 0.5)
    path.write_text('[{"peak": 7}]')
    with pytest.raises(LowtideError, match="is not a list of points"):
        read_points(path)
    with pytest.raises(LowtideError, match=r"missing\.json is not a list of points: "):
        read_points(tmp_path / "missing.json")
