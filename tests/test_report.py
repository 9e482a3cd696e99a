"""What is printed with a plan."""

from dataclasses import replace

from lowtide.planner import plan
from lowtide.report.text import decisions, extra_time, proof
from lowtide.verification import Verdict
from planner.profiles import chain, transformer


def test_extra_time_is_printed_with_its_bound() -> None:
    made = replace(plan(chain(6, inner=1), 191), bound_ms=2.84)  # 3 ms of 100
    assert extra_time(made) == ", +3 % time predicted, bound +2.8 %"


def test_a_plan_that_keeps_everything_has_no_bound() -> None:
    assert extra_time(plan(transformer(2), "100%")) == ", +0 % time predicted"


def test_without_a_time_of_the_step_nothing_is_said() -> None:
    assert extra_time(replace(plan(transformer(2), "70%"), step_ms=0.0)) == ""


def test_operators_whose_operands_are_noted_have_their_own_name() -> None:
    nodes = ("SoftmaxBackward0", "SoftmaxBackward0+noted", "SoftmaxBackward0+noted 0,2", "WhereBackward0+noted 1")
    remake = {f"#0:{place}": node for place, node in enumerate(nodes)}
    made = replace(plan(chain(6, inner=1), 191), remake=remake, replay=())
    assert decisions(made) == "remade softmax (3), where (1)"


def test_a_step_that_is_never_the_same_has_no_proof() -> None:
    kinds = ("loss", "gradients", "random numbers")
    verdict = Verdict(
        budget_bytes=2,
        predicted_peak_bytes=1,
        measured_peak_bytes=1,
        planned_ms=1.0,
        plain_ms=1.0,
        differences=dict.fromkeys(kinds, ("0",)),
        unsteady=kinds,
    )
    assert "bit-identical" not in proof(verdict)
    assert proof(verdict).startswith("the plain step is not deterministic, so that nothing can be compared with it")
