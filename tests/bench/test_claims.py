"""The claims of the benchmark: each holds on results that keep it, and falls with one cell that breaks it."""

from dataclasses import replace

import pytest
from contest.claims import claims, loses
from contest.page import line, page
from contest.records import Cell, Contest, Results

EQUAL = {"equal_loss": True, "equal_gradients": True, "equal_buffers": True}


def ours(kind: str, name: str, budget: int, peak: int, flops: int, **more: object) -> Cell:
    fields = {"predicted_peak_bytes": peak, "seconds": 1.02, "plain_seconds": 1.0, **EQUAL, **more}
    return Cell(kind=kind, name=name, budget_bytes=budget, peak_bytes=peak, flops=flops, **fields)  # type: ignore[arg-type]


def contest(**changed: object) -> Contest:
    """A contest in which every claim holds."""
    peer = {"kind": "peer", "seconds": 1.2, "plain_seconds": 1.0, **EQUAL}
    every_block = "checkpoint every block"
    cells = {
        "plain": Cell(kind="plain", name="plain", peak_bytes=1000, flops=100, **EQUAL),
        "peer": Cell(name=every_block, peak_bytes=500, flops=130, **peer),  # type: ignore[arg-type]
        "at_peer": ours("peer's peak", "at it", 500, 499, 110, rival=every_block),
        "half": ours("half", "half", 600, 600, 105),
        "rung_1": ours("ladder", "rung 1", 400, 400, 115),
        "rung_2": ours("ladder", "rung 2", 700, 690, 104),
    }
    return Contest(
        model="gpt2",
        description="GPT-2",
        batch="",
        versions={"torch": "2.13.0"},
        processor="a processor",
        threads=2,
        quick=False,
        static_bytes=100,
        gradient_bytes=100,
        gradients_at_peak_bytes=20,
        rehearsal_seconds=1.0,
        wall_seconds=60.0,
        cells=tuple({**cells, **changed}.values()),  # type: ignore[arg-type]
    )


def results(*contests: Contest) -> Results:
    return Results(command="python bench/peers.py", contests=contests)


def not_held(found: Contest) -> list[str]:
    return [claim.text for claim in claims(results(found)) if claim.held is False]


def test_all_claims_hold_on_results_that_keep_them() -> None:
    assert not_held(contest()) == []


def test_a_claim_about_time_is_not_measured_without_times() -> None:
    untimed = contest(at_peer=replace(AT_PEER, seconds=None), half=replace(HALF, seconds=None))
    assert not_held(untimed) == []
    assert [claim.held for claim in claims(results(untimed))].count(None) == 2


def test_activations_are_the_peak_without_what_no_plan_changes() -> None:
    assert contest().activation_bytes == 1000 - 100 - 100
    assert contest().beyond_static_bytes == 1000 - 100 - 20


AT_PEER = contest().cells[2]
HALF, RUNG_1, RUNG_2 = contest().cells[3:]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"at_peer": replace(AT_PEER, peak_bytes=501, budget_bytes=501, predicted_peak_bytes=501)}, "own peak"),
        ({"at_peer": replace(AT_PEER, flops=131)}, "own peak"),
        ({"at_peer": replace(AT_PEER, peak_bytes=None, refusal="no plan fits")}, "own peak"),
        ({"at_peer": replace(AT_PEER, flops=116)}, "half of the peers'"),
        ({"at_peer": replace(AT_PEER, seconds=1.3)}, "every block"),
        ({"half": replace(HALF, seconds=1.09)}, "Halving the activations"),
        ({"half": replace(HALF, seconds=None, peak_bytes=None, refusal="no plan fits")}, "Halving the activations"),
        ({"at_peer": replace(AT_PEER, peak_bytes=None, refusal="no plan fits")}, "half of the peers'"),
        ({"half": replace(HALF, predicted_peak_bytes=593)}, "within 1 %"),
        ({"half": replace(HALF, budget_bytes=599)}, "above its budget"),
        ({"half": replace(HALF, equal_buffers=False)}, "bit for bit"),
        ({"rung_1": replace(RUNG_1, flops=103)}, "twenty budgets"),
        ({"rung_2": replace(RUNG_2, peak_bytes=399, predicted_peak_bytes=399)}, "twenty budgets"),
        ({"rung_1": replace(RUNG_1, peak_bytes=None, refusal="no plan fits")}, "twenty budgets"),
    ],
)
def test_a_claim_falls_with_one_cell_that_breaks_it(changed: dict[str, Cell], text: str) -> None:
    assert any(text in claim for claim in not_held(contest(**changed)))


def test_a_peer_that_needs_less_is_said_to_win() -> None:
    found = contest()
    ((peer, mine),) = found.duels()
    assert loses(found, peer, mine) is None
    more = replace(mine, flops=140)
    assert loses(found, peer, replace(more, seconds=1.5)) == (
        "FLOPs +40.00%, and the peer has +30.00%; 1 B of its peak unused"
    )
    assert (loses(found, peer, more) or "").endswith("unused; in less time, 1.02 x instead of 1.20 x")
    assert loses(found, replace(peer, peak_bytes=400), mine) == "the peak is 99 bytes above"


def test_resnet_may_take_15_percent() -> None:
    slower = replace(contest(half=replace(HALF, seconds=1.14)), model="resnet")
    assert not any("Halving the activations" in text for text in not_held(slower))


def test_the_page_says_of_every_claim_whether_it_held_and_what_is_against_it() -> None:
    text = page(results(contest(half=replace(HALF, seconds=1.09))))
    for claim in claims(results(contest())):
        assert claim.text in text
    assert "- gpt2: +9.0%; at most 8% is claimed" in text
    assert text.count("**no**") == 1
    assert "| checkpoint every block | 50.0% | +30.0% | 1.20 x | yes | 49.9% | +10.0% | 1.02 x | Lowtide |" in text


def test_the_page_says_what_is_not_equal_and_what_did_not_run() -> None:
    broken = Cell(kind="peer", name="broken", refusal="RuntimeError: no")
    text = page(results(contest(broken=broken, half=replace(HALF, equal_gradients=False, equal_buffers=False))))
    assert "**not gradients, buffers**" in text
    assert "| broken | did not run: RuntimeError: no |" in text


def test_a_line_has_peak_flops_and_time_beside_the_plain_step() -> None:
    assert line(contest(), AT_PEER).split() == ["at", "it", "49.9%", "+10.0%", "FLOPs", "1.02", "x"]
    assert line(contest(), replace(AT_PEER, equal_loss=False)).endswith("other bits")


def test_results_go_to_json_and_back() -> None:
    assert Results.from_json(results(contest()).to_json()) == results(contest())


def test_a_newer_contest_takes_the_place_of_the_old_one_of_its_model() -> None:
    old, other = contest(), replace(contest(), model="vit")
    new = replace(contest(), threads=1)
    assert results(old, other).merged(results(new)).contests == (new, other)
    assert results(old).merged(results(other)).contests == (old, other)


def test_a_time_ratio_is_of_the_fastest_steps() -> None:
    assert Cell(kind="share", name="", seconds=3.0, plain_seconds=2.0).time_ratio == 1.5
    assert Cell(kind="share", name="").time_ratio is None
