"""Published measurements: one row predicted, one that ran out of memory, what can't be rebuilt, and the arithmetic."""

import pytest
from estimators.page import page
from estimators.predicting import predict
from estimators.reasons import count_close_to_one, far, find_above_repeats, reason, repeats
from estimators.records import Prediction, Predictions
from estimators.rows import STRATA, load
from estimators.scores import Scored, claims, comparisons, scored

MIB = 2**20
ROWS = {row.id: row for row in load()}


@pytest.mark.slow
def test_distilgpt2_comes_out_within_two_percent() -> None:
    row = ROWS["x053"]
    found = predict(row)
    assert (row.model, row.batch, row.optimizer) == ("distilbert/distilgpt2", 30, "AdamW")
    assert found.reserved_bytes is not None
    assert abs(found.reserved_bytes / row.measured_bytes - 1) < 0.02  # 0.3 % with the transformers that it ran with
    assert found.verdict == "fits"


@pytest.mark.slow
def test_a_run_that_ended_out_of_memory_does_not_fit() -> None:
    row = ROWS["x088"]
    found = predict(row)
    assert row.oom
    assert found.reserved_bytes is not None
    assert found.reserved_bytes > row.gpu_bytes
    assert found.verdict == "does not fit"


def test_rows_are_all_there_and_belong_to_a_stratum() -> None:
    assert len(ROWS) == 91
    assert sum(row.oom for row in ROWS.values()) == 11
    assert {row.stratum for row in ROWS.values()} == set(STRATA)
    assert [row.id for row in ROWS.values() if row.unknown] == ["x045", "x067", "x068", "x069", "x072"]


def test_errors_of_others_are_those_that_were_published() -> None:
    """The stored estimates of the 80 runs that finished: medians as the artefact has them."""
    measured = [Prediction(row=row.id, reserved_bytes=row.measured_bytes) for row in ROWS.values()]
    found = {(c.tool, c.stratum): c for c in comparisons(scored(tuple(ROWS.values()), measured))}
    assert [(found[tool, None].n_rows, round(found[tool, None].median, 3)) for tool in ("xMem", "DNNMem")] == [
        (80, 0.029),
        (77, 0.226),
    ]
    assert found["xMem", None].our_worst == 0


def test_claims_fail_where_they_do_not_hold() -> None:
    rows = tuple(ROWS.values())
    half = [
        Prediction(row=row.id, reserved_bytes=row.measured_bytes // 2, verdict="does not fit" if row.oom else "fits")
        for row in rows
    ]
    assert [claim.held for claim in claims(scored(rows, half))] == [False, False, False, False, True, True]
    swapped = [Prediction(row=row.id, reserved_bytes=1, verdict="fits" if row.oom else "does not fit") for row in rows]
    assert [claim.held for claim in claims(scored(rows, swapped))][4:] == [False, False]
    assert [claim.held for claim in claims([])] == [None] * 6


def test_the_page_names_what_was_left_out() -> None:
    row, left = ROWS["x053"], ROWS["x067"]
    found = (
        Prediction(row=row.id, reserved_bytes=2 * row.measured_bytes, least_bytes=MIB, most_bytes=2 * MIB),
        Prediction(row=left.id, refusal="nobody knows"),
    )
    text = page((row, left), Predictions(versions={"torch": "1"}, found=found))
    assert "gemma-2-2b-it 1 Adafactor: nobody knows" in text
    assert "| +100.0% |" in text
    assert Scored(row=row, prediction=found[0]).error() == 1


def test_a_row_that_is_far_off_has_its_reason() -> None:
    """Measured twice, far apart; near a repeat; in the range; and where nothing can be shown."""

    def reasons(least: int, most: int, **predicted: int) -> dict[str, str]:
        found = [
            Prediction(row=name, reserved_bytes=n * MIB, least_bytes=least * MIB, most_bytes=most * MIB)
            for name, n in predicted.items()
        ]
        pairs = scored(tuple(ROWS.values()), found)
        return {pair.row.id: reason(pair, pairs) for pair in far(pairs)}

    assert "x058" not in reasons(1, 1, x058=8238)
    assert reasons(1, 1, x058=7200, x057=7200)["x058"].endswith("7,198 MiB (x057). No number is within 6 % of both")
    assert reasons(1, 1, x031=2886)["x031"].endswith("The prediction is +1.5% from that")
    less = "run again with less memory: 10,888 MiB (of 11,194). "
    assert reasons(10912, 11772, x071=11772)["x071"].startswith(f"{less}The range contains it")
    assert reasons(11772, 11772, x071=11772)["x071"] == f"{less}No reason is known"


def test_a_run_that_took_less_when_it_was_limited_says_so() -> None:
    """The first run of x017 took 3,352 MiB; one that was allowed 3,370 took 2,554."""
    found = [Prediction(row="x017", reserved_bytes=2786 * MIB, least_bytes=MIB, most_bytes=MIB)]
    pairs = scored(tuple(ROWS.values()), found)
    assert reason(pairs[0], pairs) == (
        "run again with less memory: 2,856 MiB (of 2,888), 2,614 MiB (of 2,648), 2,554 MiB (of 3,370). "
        "The prediction is -2.5% from the nearest"
    )
    (first,) = find_above_repeats(pairs, pairs)
    assert [(first.name, first.least_bytes // MIB, first.most_bytes // MIB)] == [("x017", 496, 798)]
    text = page((ROWS["x017"],), Predictions(versions={}, found=(*found,)))
    assert "The first measurement of x017 lies 0.5 to 0.8 GiB above every other measurement of the same run" in text


def test_measurements_themselves_are_not_repeated_to_six_percent() -> None:
    measured = [Prediction(row=row.id, reserved_bytes=row.measured_bytes) for row in ROWS.values()]
    assert repeats(scored(tuple(ROWS.values()), measured)) == (28, 17)


def test_predictions_are_near_one_of_several_measurements() -> None:
    """x031 took 2,600 MiB and then 2,842, x017 also 2,856 in less memory; x009 took 3,776 and 3,764."""
    near = {"x031": 2886, "x017": 2786, "x009": 4004}
    found = [Prediction(row=name, reserved_bytes=n * MIB) for name, n in near.items()]
    assert count_close_to_one(scored(tuple(ROWS.values()), found)) == (2, 3)
