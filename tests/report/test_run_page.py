"""The page of a run, as text: its numbers are the record's, and it needs nothing from anywhere."""

import html
import re
from dataclasses import replace

import pytest

from lowtide.planner.records import Fingerprint, InPlace
from lowtide.report.decision_tree import Branch, decision_tree
from lowtide.report.page import render_run_page
from lowtide.report.run_record import RunRecord, build_record, with_frontier, with_step_time
from lowtide.report.run_text import describe_peak, verdict
from lowtide.units import format_bytes, format_ratio, format_time
from report.runs import FINDINGS, NEED, PLAN, PROFILE, run

RUN = replace(run(), findings=FINDINGS, n_steps=3)
PAGE = render_run_page(RUN)


def tile(name: str) -> int:
    found = re.search(rf'data-tile="{name}" data-bytes="(\d+)"', PAGE)
    assert found is not None
    return int(found[1])


def test_its_numbers_are_the_records() -> None:
    assert tile("budget") == RUN.budget_bytes
    assert tile("before") == RUN.plain_peak_bytes
    assert tile("after") == RUN.peak_bytes
    assert RUN.after is not None
    parts = dict(re.findall(r'<tr data-category="([^"]+)">.*?data-bytes="(\d+)"', PAGE))
    assert {name: int(n) for name, n in parts.items() if int(n)} == RUN.after.parts_at(RUN.after.peak_moment)
    assert html.escape(verdict(RUN)[1]) in PAGE
    assert html.escape(describe_peak(RUN.after)) in PAGE


def test_the_page_says_which_sizes_were_measured_and_what_a_recompute_is() -> None:
    assert "under the plan: 35 % less, measured" in PAGE
    assert "peak without Lowtide, predicted" in PAGE
    assert "computed again in backward: by their own operator" in PAGE
    made = run()
    assert made.plan is not None
    untimed = render_run_page(replace(made, proof=None, plan=replace(made.plan, step_ms=0.0)))
    assert "per step, predicted; the step without Lowtide was not timed" in untimed
    assert "less, predicted" in untimed
    assert made.proof is not None
    peak_bytes = made.proof.measured_peak_bytes
    assert peak_bytes
    for over_bytes, n_exact in ((0, 0), (1, 2)):  # three figures would not tell a peak from a budget below it
        close = replace(made, plan=replace(made.plan, budget_bytes=peak_bytes - over_bytes))
        assert verdict(close)[1].count(" B)") == n_exact


def test_added_times_have_shares_where_only_the_step_under_the_plan_was_timed() -> None:
    made = run()
    assert made.plan is not None
    assert made.profile is not None
    assert made.proof is not None
    untimed = replace(
        made,
        proof=replace(made.proof, plain_ms=None),
        plan=replace(made.plan, step_ms=0.0),
        profile=replace(made.profile, step_ms=0.0),
        frontier=None,
    )
    extra_ms = made.plan.predicted.extra_ms
    assert with_step_time(untimed, extra_ms).extra is None  # that step took less than was predicted to be added
    timed = with_step_time(untimed, 11 * extra_ms)
    assert timed.extra == pytest.approx(0.1)
    assert "time of the plain step: that of a step under the plan, less the extra time" in timed.predicted
    assert f"extra time: +{format_time(extra_ms)} a step (+10 %) predicted" in str(timed).splitlines()
    page = html.unescape(render_run_page(with_frontier(timed)))
    assert "<b>+10 %</b>" in page
    assert f"predicted: {format_time(extra_ms)} per step" in page
    assert re.findall(r"\+[\d.]+ ms", page)
    assert not re.findall(r"\+[\d.]+ ms(?! \(\+)", page)


def test_a_page_without_a_plan_asks_what_its_command_answers() -> None:
    bare = RunRecord(command="lowtide estimate train.py", versions=RUN.versions, before=RUN.before)
    assert ">What was found</h2>" in render_run_page(bare)
    compared = render_run_page(replace(bare, plain_budget_bytes=2**20))
    assert ">Does it fit?</h2>" in compared
    assert "It does not fit" in compared


def test_a_page_says_that_memory_of_compiled_code_is_not_exact() -> None:
    compiled = replace(PROFILE, graphs=("38bda055227f6841",))
    assert any("peaks in the chart may be off" in line for line in build_record("", profile=compiled).predicted)
    assert not any("may be off" in line for line in RUN.predicted)


def test_a_page_of_a_refused_budget_shows_it_beside_the_smallest_one() -> None:
    assert RUN.frontier is not None
    least = RUN.frontier.points[0]
    budget_bytes = least.peak_bytes - 2**20
    refused = replace(
        RUN, plan=None, after=None, proof=None, findings=None, refusal="no plan fits", plain_budget_bytes=budget_bytes
    )
    page = render_run_page(refused)
    tiles = dict(re.findall(r'data-tile="([^"]+)" data-bytes="(\d+)"', page))
    assert {name: int(n) for name, n in tiles.items()} == {
        "budget": budget_bytes,
        "peak-of-a-step": RUN.plain_peak_bytes,
        "smallest-peak": least.peak_bytes,
    }
    cost = f"{format_ratio((least.extra_ms or 0) / RUN.frontier.step_ms, signed=True)} time"
    reached = f"Plans take it down to {format_bytes(least.peak_bytes, round_up=True)}, for {cost}."
    assert f"It does not fit: no plan fits {reached}" in page
    assert reached in str(refused)
    assert page.count(f"budget {format_bytes(budget_bytes)}") == 2  # in the step's chart, and in that of other budgets


def test_a_page_names_the_batch_whose_step_is_drawn() -> None:
    needs = (replace(NEED, batch=8), replace(NEED, batch=64))
    page = render_run_page(RunRecord(command="lowtide estimate", versions=RUN.versions, before=RUN.before, needs=needs))
    assert "<b>Batch 64:</b> The peak is" in page
    assert "Batch 64:" not in render_run_page(RunRecord(command="", versions={}, before=RUN.before, needs=needs[1:]))


def test_a_page_says_which_peak_a_gpu_is_asked_for() -> None:
    needs = replace(NEED, peak_of="both steps, in the second one, with 16.2 MiB of cuBLAS's workspaces")
    estimate = RunRecord(command="lowtide estimate", versions=RUN.versions, before=RUN.before, needs=(needs,))
    page = html.unescape(render_run_page(estimate))
    said = f"the bytes of all tensors, at the peak of {needs.peak_of}."
    assert f"<p>Requested: {said}" in page
    assert "Reserved: what PyTorch's allocator takes from the GPU for them." in page
    batches = [replace(needs, batch=8), replace(needs, batch=16), replace(needs, batch=32, peak_of="the only step")]
    page = html.unescape(render_run_page(replace(estimate, needs=tuple(batches))))
    assert page.count(said) == 1
    assert f"<p>Requested with batch 8 and 16: {said}" in page
    assert "<p>Requested with batch 32: the bytes of all tensors, at the peak of the only step." in page


def test_a_long_list_of_modules_alike_is_shortened() -> None:
    assert Branch("{0,2,4,6-8,10}").short_name == "{0,2,4,6-8,10}"
    assert Branch("{0,2,4,6,8,10}").short_name == "{0,2,4,…,10}"
    assert Branch("encoder").short_name == "encoder"


def test_exact_bytes_of_a_proof_are_grouped() -> None:
    assert RUN.proof is not None
    page = render_run_page(
        replace(RUN, proof=replace(RUN.proof, text="70682552 B peak measured: within the budget of 9 MiB"))
    )
    assert "70,682,552 B peak measured: within the budget of 9 MiB." in page


def test_the_page_explains_a_gradient_in_place_where_there_is_one() -> None:
    explained = "written over the gradient that it is computed from"
    assert RUN.plan is not None
    assert RUN.profile is not None
    assert explained not in PAGE
    saving = InPlace(nodes={"GeluBackward0": 1}, saved_bytes=(0,) * len(RUN.profile.base_bytes))
    profile, plan = replace(RUN.profile, in_place=(saving,)), replace(RUN.plan, in_place={"GeluBackward0": 1})
    assert explained in render_run_page(replace(RUN, profile=profile, plan=plan))


def test_reserved_bytes_are_kept_apart_from_requested_ones() -> None:
    made = run()
    assert made.plan is not None
    assert made.proof is not None
    plan = replace(made.plan, budget_for="reserved", budget_bytes=made.plan.budget_bytes * 2)
    reserved_bytes = made.plan.predicted.peak_bytes + 1000
    found = replace(made, plan=plan, proof=replace(made.proof, measured_peak_bytes=reserved_bytes))
    assert found.peak_bytes == plan.predicted.peak_bytes
    page = render_run_page(found)
    assert re.search(rf'data-tile="reserved" data-bytes="{reserved_bytes}"', page)
    assert re.search(rf'data-tile="after" data-bytes="{plan.predicted.peak_bytes}"', page)
    assert "reserved, within the budget of" in verdict(found)[1]
    assert 'class="lt-hbudget"' not in page  # the budget is of other bytes than the bars


def test_saved_bytes_by_decision_add_up_to_all_saved_bytes() -> None:
    tree = decision_tree(PROFILE, PLAN)
    held = {slot.storage for slot in PROFILE.slots if not slot.is_input and slot.storage is not None}
    assert tree.total == sum(PROFILE.storages[storage].bytes for storage in held)
    for decision, n_bytes in tree.bytes.items():
        assert f'lt-decision-{decision}" data-bytes="{n_bytes}"' in PAGE
        assert format_bytes(n_bytes) in PAGE


def test_its_sections_come_in_the_order_of_the_questions() -> None:
    assert re.findall(r'<section id="(\w+)"', PAGE) == ["fits", "memory", "decided", "else", "outlives", "how"]


def test_it_loads_nothing() -> None:
    assert not re.findall(r"""https?://|src=|url\(|@import|<link(?! rel="icon" href="data:,")""", PAGE)
    assert len(PAGE) < 3_000_000


def test_names_are_no_markup() -> None:
    bad = "<script>alert(1)</script>&\"'"
    made_for = Fingerprint(torch=bad, model=bad, batch=bad, device=bad)
    page = render_run_page(build_record(bad, profile=replace(PROFILE, fingerprint=made_for)))
    assert "<script>alert" not in page
    assert page.count("<script") == PAGE.count("<script")


@pytest.mark.parametrize("answer", ["yes", "no", "plain"])
def test_the_verdict_is_the_first_sentence(answer: str) -> None:
    made: RunRecord = RUN
    if answer == "no":
        made = replace(RUN, plan=replace(PLAN, budget_bytes=1000))
    elif answer == "plain":
        made = build_record("lowtide rehearse train.py", profile=PROFILE)
    assert verdict(made)[0] == answer
    assert 0 < render_run_page(made).index(f"lt-verdict is-{answer}") < render_run_page(made).index('class="lt-plot')
