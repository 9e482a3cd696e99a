"""The text of a plan and of other records."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import lowtide
from lowtide.api.fit_result import Fitted
from lowtide.api.verify import Verdict
from lowtide.estimator.batch_search import LargestBatch
from lowtide.planner import find_smallest_peak, plan
from lowtide.planner.budget_frontier import frontier
from lowtide.report.run_record import build_record
from lowtide.report.text_table import decisions, format_added_time, format_extra_time, operator_name
from planner.profiles import chain, transformer


def test_added_milliseconds_have_their_share_of_the_step() -> None:
    assert format_added_time(12.5, 250) == "+12.5 ms a step (+5 %)"
    assert format_added_time(12.5, 0) == "+12.5 ms a step"


@pytest.mark.parametrize("step_ms", [100.0, 0.0])
def test_where_no_share_can_be_given_the_text_says_how_to_get_it(step_ms: float) -> None:
    profile = replace(chain(6, inner=1), step_ms=step_ms)
    made = plan(profile, 191)
    run = build_record("lowtide run", profile=profile, plan=made)
    for record in (profile, made, frontier(profile, n_budgets=3), run):
        assert ("`lowtide rehearse --plain` times it" in str(record)) == (not step_ms)


def test_extra_time_is_printed_with_its_bound() -> None:
    made = replace(plan(chain(6, inner=1), 191), bound_ms=2.84)  # 3 ms of 100
    assert format_extra_time(made) == ", +3 % time predicted, bound +2.8 %"


def test_a_plan_that_keeps_everything_has_no_bound() -> None:
    assert format_extra_time(plan(transformer(2), "100%")) == ", +0 % time predicted"


def test_without_a_time_of_the_step_nothing_is_said() -> None:
    assert format_extra_time(replace(plan(transformer(2), "70%"), step_ms=0.0)) == ""


def test_operators_whose_operands_are_noted_have_their_own_name() -> None:
    nodes = ("SoftmaxBackward0", "SoftmaxBackward0+noted", "SoftmaxBackward0+noted 0,2", "WhereBackward0+noted 1")
    recompute = {f"#0:{place}": node for place, node in enumerate(nodes)}
    made = replace(plan(chain(6, inner=1), 191), recompute=recompute, replay=())
    assert decisions(made) == "recomputed softmax (3), where (1)"


def test_a_plan_that_keeps_everything_says_why_it_fits() -> None:
    made = plan(transformer(2), "100%")
    assert decisions(made) == "everything is kept: the plain step fits"
    compiled = replace(made, graphs=("38bda055227f6841",), budget_bytes=made.plain.peak_bytes - 1)
    assert decisions(compiled) == "everything is kept: its backward, compiled anew, has fewer temporaries"


def verdict_on(differences: dict[str, tuple[str, ...]], *varying: str) -> Verdict:
    return Verdict(
        budget_bytes=100,
        predicted_peak_bytes=90,
        measured_peak_bytes=90,
        planned_ms=1.0,
        plain_ms=1.0,
        differences=differences,
        nondeterministic={kind: differences[kind] for kind in varying},
    )


def test_a_step_that_is_never_the_same_has_no_proof() -> None:
    kinds = ("loss", "gradients", "random numbers")
    verdict = verdict_on(dict.fromkeys(kinds, ("0",)), *kinds)
    assert not verdict.proven
    assert verdict.proof.startswith("NOT PROVEN: the plain step is not deterministic, so nothing can be compared")


def test_random_numbers_alone_prove_nothing() -> None:
    verdict = verdict_on({"random numbers": ()})
    assert not verdict.proven
    assert verdict.proof.startswith("NOT PROVEN: the step has no result to compare: no loss, no gradients")
    drawn = verdict_on({"loss": ("0",), "random numbers": ()}, "loss")
    assert not drawn.proven
    assert drawn.proof.startswith("NOT PROVEN: the plain step is not deterministic")


def test_records_are_printed_as_the_command_line_prints_them() -> None:
    profile = transformer(2)
    assert str(profile).splitlines()[1].startswith("plain step: ")
    assert "peak predicted (budget " in str(plan(profile, "70%"))
    table = str(lowtide.frontier(profile, n_budgets=4)).splitlines()
    assert table[0].split() == ["peak", "of", "plain", "extra", "time", "extra", "FLOPs"]
    assert table[-1].split() == ["4.19", "KiB", "100", "%", "+0", "%", "0"]


@pytest.mark.parametrize(("peaks", "more"), [({8: 90, 9: 105, 16: 200}, "; size 9 would need 105 B"), ({8: 90}, "")])
def test_the_largest_size_is_printed_with_the_next_one(peaks: dict[int, int], more: str) -> None:
    found = LargestBatch(size=8, estimate=None, budget_bytes=100, peaks=peaks)
    assert str(found) == f"size 8 fits: 90 B peak predicted, and there is 100 B{more}"


def test_the_next_size_is_shown_apart_from_the_available_memory() -> None:
    found = LargestBatch(size=8, estimate=None, budget_bytes=10_000_000, peaks={8: 9_998_600, 9: 10_000_400})
    assert str(found).endswith("there is 10000000 B; size 9 would need 10000400 B")


def test_peaks_that_plans_reach_are_printed_as_budgets_that_are_enough() -> None:
    profile = transformer(2)
    _, least = find_smallest_peak(profile)
    (line,) = (line for line in str(profile).splitlines() if line.startswith("smallest peak: "))
    row = str(lowtide.frontier(profile, n_budgets=4)).splitlines()[1]
    for said in (line.removeprefix("smallest peak: ").partition(" (")[0], " ".join(row.split()[:2])):
        assert plan(profile, said).predicted.peak_bytes == least.peak_bytes


def test_a_step_of_which_plans_save_nothing_has_no_smaller_peak() -> None:
    profile = transformer(2)
    profile = replace(profile, base_bytes=(*profile.base_bytes[:-1], 10**9))
    assert "smallest peak: the plain step's, for no plan needs less" in str(profile).splitlines()


def fitted_with(plain_ms: float | None, *notes: str) -> Fitted:
    profile = transformer(2)
    made = replace(plan(profile, "70%"), notes=notes)
    applied: Any = SimpleNamespace()
    return Fitted(applied, profile, made, replace(verdict_on({"loss": ()}), planned_ms=12.5, plain_ms=plain_ms))


@pytest.mark.parametrize(("plain_ms", "said"), [(11.0, "11 ms -> 12.5 ms a step"), (None, "12.5 ms a step")])
def test_measured_times_are_printed_before_predicted_ones(plain_ms: float | None, said: str) -> None:
    first, *_ = str(fitted_with(plain_ms)).splitlines()
    assert f"), {said} measured, +" in first
    assert " % time predicted" in first


def test_notes_are_printed_last() -> None:
    assert str(fitted_with(11.0, "first", "second")).splitlines()[-3:] == [
        "bit-identical to the plain step: loss",
        "note: first",
        "note: second",
    ]


def test_a_verdict_has_the_measured_time_beside_the_predicted_one() -> None:
    verdict = replace(verdict_on({"loss": ()}), planned_ms=13.0, plain_ms=10.0, predicted_extra=0.25)
    assert str(verdict).splitlines()[1] == "extra time: +25 % predicted, +30 % measured"
    alone = replace(verdict, plain_ms=None)
    assert str(alone).splitlines()[1] == "extra time: +25 % predicted, 13 ms a step measured"


def test_a_verdict_says_what_was_measured_and_what_is_proven() -> None:
    verdict = verdict_on({"loss": (), "gradients": ()})
    assert str(verdict) == (
        "90 B peak measured: within the budget of 100 B\nbit-identical to the plain step: loss and gradients"
    )
    wrong = replace(verdict, measured_peak_bytes=101, differences={"loss": (), "gradients": ("weight",)})
    assert not wrong.proven
    assert str(wrong) == "101 B peak measured: OVER the budget of 100 B\nNOT bit-identical to the plain step: gradients"


def test_names_of_operators_are_words() -> None:
    nodes = ("AvgPool2D", "Log1P", "SmoothL1Loss", "AdaptiveMaxPool2DWithIndices", "NativeGroupNorm")
    names = [operator_name(f"{node}Backward0") for node in nodes]
    assert names == ["avg pool2d", "log1p", "smooth l1 loss", "adaptive max pool2d with indices", "group norm"]
