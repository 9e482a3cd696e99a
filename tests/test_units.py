from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import BudgetError
from lowtide.units import (
    format_apart,
    format_bytes,
    format_change,
    format_count,
    format_parts,
    format_ratio,
    format_time,
)
from lowtide.utils.amounts import parse_budget, parse_bytes

SIZES = {
    "B": 1,
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("8GiB", 8 * 2**30),
        ("8gib", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("8 gb", 8 * 10**9),
        ("500MB", 500 * 10**6),
        ("1.5 GB", 15 * 10**8),
        ("  0.3 KiB ", 307),  # 307.2, cut
        ("1b", 1),
        (8 * 2**30, 8 * 2**30),
    ],
)
def test_an_amount_is_read_exactly(text: str | int, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes
    assert parse_budget(text) == n_bytes


@given(st.integers(1, 10**15), st.integers(0, 999), st.sampled_from(sorted(SIZES)), st.data())
def test_every_unit_is_read_exactly_whatever_its_case(whole: int, thousandths: int, unit: str, data: Any) -> None:
    cased = "".join(data.draw(st.sampled_from([letter.lower(), letter.upper()])) for letter in unit)
    expected = int((whole + Fraction(thousandths, 1000)) * SIZES[unit])
    assert parse_bytes(f"{whole}.{thousandths:03}{cased}") == expected


def test_numpy_integers_are_bytes() -> None:
    np = pytest.importorskip("numpy")
    assert parse_bytes(np.int64(4096)) == 4096


@pytest.mark.parametrize(
    ("budget", "why"),
    [
        (0, "less than one byte"),
        (-1, "it is negative"),
        ("0GiB", "less than one byte"),
        ("-8GiB", "it is negative"),
        ("-3", "it is negative"),
        ("0.5B", "less than one byte"),
        ("0%", "less than one byte"),
        ("-5%", "it is negative"),
        (True, "a bool has no unit"),
        (8.0, "a float has no unit"),
        (float("nan"), "a float has no unit"),
        (None, "a NoneType has no unit"),
        ("8", "no unit; write 8B for bytes"),
        ("8589934592", "no unit"),
        ("8G", "write GB or GiB"),
        ("512m", "write MB or MiB"),
        ("8 Gigs", "Gigs is not a unit"),
        ("", "not a number with a unit"),
        ("GiB", "not a number with a unit"),
        ("nan GiB", "not a number with a unit"),
        ("inf", "not a number with a unit"),
        ("nan%", "not a number with a unit"),
        ("1e9 B", "not a number with a unit"),
        ("1,000 MB", "not a number with a unit"),
        ("8 GiB 2", "not a number with a unit"),
        ("٨GiB", "not a number with a unit"),
        ("9" * 30 + "B", "not a number with a unit"),
    ],
)
def test_a_budget_that_is_no_amount_is_refused_and_says_what_is_understood(budget: Any, why: str) -> None:
    with pytest.raises(BudgetError) as caught:
        parse_budget(budget, plain_peak_bytes=2**30)
    message = str(caught.value)
    assert message.startswith(repr(budget))
    assert why in message
    assert '"8GiB"' in message
    assert '"60%"' in message


@pytest.mark.parametrize(
    "budget",
    ["9" * 5000 + "GiB", "8 " + "x" * 5000, -(10**5000), 10**5000, [0] * 5000],
    ids=["number", "unit", "negative int", "int", "list"],
)
def test_a_long_budget_is_not_repeated_in_full(budget: Any) -> None:
    with pytest.raises(BudgetError) as caught:
        parse_budget(budget, plain_peak_bytes=2**30)
    assert len(str(caught.value)) < 320
    assert "is not an amount of memory" in str(caught.value)


def test_a_percentage_is_of_the_plain_peak() -> None:
    assert parse_budget("60%", plain_peak_bytes=1001) == 600
    assert parse_budget("12.5 %", plain_peak_bytes=1000) == 125
    assert parse_budget("120%", plain_peak_bytes=1000) == 1200
    with pytest.raises(BudgetError, match="not known here"):
        parse_budget("60%")
    with pytest.raises(BudgetError, match="not known here") as caught:
        parse_bytes("60%")
    assert '"60%"' not in str(caught.value)


@given(st.integers(1, 100), st.integers(100, 2**50))
def test_a_percentage_is_cut_to_whole_bytes(percent: int, peak_bytes: int) -> None:
    assert parse_budget(f"{percent}%", plain_peak_bytes=peak_bytes) == peak_bytes * percent // 100


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (8 * 2**30, "8 GiB"),
        (78 * 2**30 // 10, "7.8 GiB"),
        (1000 * 2**20, "1000 MiB"),
        (2**20 - 1, "1 MiB"),
        (2**40 - 2**29, "1 TiB"),  # 1023.5 GiB rounds to the even 1024
        (5000 * 2**50, "5000 PiB"),
        (-3 * 2**29, "-1.5 GiB"),
    ],
)
def test_bytes_are_written_in_three_figures(n_bytes: int, text: str) -> None:
    assert format_bytes(n_bytes) == text


@given(st.integers(1, 1023), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB", "PiB"]))
def test_whole_units_survive_the_round_trip(count: int, unit: str) -> None:
    assert format_bytes(count * SIZES[unit]) == f"{count} {unit}"
    assert parse_bytes(format_bytes(count * SIZES[unit])) == count * SIZES[unit]


@given(st.integers(1, 2**60))
def test_any_amount_survives_the_round_trip_within_half_a_percent(n_bytes: int) -> None:
    assert abs(parse_bytes(format_bytes(n_bytes)) - n_bytes) <= n_bytes / 200 + 1  # and the byte that reading cuts


@given(st.integers(1, 2**90))
def test_rounding_up_never_understates_and_costs_at_most_one_percent(n_bytes: int) -> None:
    read_back = parse_bytes(format_bytes(n_bytes, round_up=True))
    assert n_bytes <= read_back <= n_bytes * 1.01


def test_a_change_says_a_shared_unit_once() -> None:
    assert format_change(149 * 2**30 // 10, 78 * 2**30 // 10) == "14.9 -> 7.8 GiB"
    assert format_change(3 * 2**29, 890 * 2**20) == "1.5 GiB -> 890 MiB"


def test_amounts_that_differ_by_a_little_are_shown_to_the_byte() -> None:
    assert format_apart(2**30, 2**31) == ("1 GiB", "2 GiB")
    assert format_apart(2**30, 2**30 + 1) == ("1073741824 B", "1073741825 B")
    assert format_apart(2**30, 2**30) == ("1 GiB", "1 GiB")


def test_parts_are_in_the_unit_of_their_total() -> None:
    assert format_parts(10 * 2**30, {"parameters": 4 * 2**30, "loss head": 512 * 2**20, "inputs": 8}) == (
        " = 4 parameters + 0.5 loss head + 5.5 other"
    )
    assert format_parts(3 * 2**30, {"a": 2 * 2**30, "b": 2 * 2**30}) == " = 2 a + 2 b"  # no negative "other"
    assert format_parts(2**30, {"parameters": 2**30}) == ""
    assert format_parts(0, {}) == ""


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0 us"), (0.0125, "12.5 us"), (0.5, "500 us"), (1, "1 ms"), (12.52, "12.5 ms"), (999.96, "1000 ms"),
     (1234, "1.23 s"), (210_000, "3.5 min"), (36_000_000, "600 min")],
)  # fmt: skip
def test_durations_are_written_in_three_figures(ms: float, text: str) -> None:
    assert format_time(ms) == text


@pytest.mark.parametrize(
    ("ratio", "plain", "signed"),
    [(0.041, "4.1 %", "+4.1 %"), (0.31, "31 %", "+31 %"), (0, "0 %", "+0 %"), (-0.0001, "0 %", "+0 %"),
     (-0.06, "-6 %", "-6 %"), (0.0996, "10 %", "+10 %"), (1.5, "150 %", "+150 %")],
)  # fmt: skip
def test_ratios_are_written_as_percentages(ratio: float, plain: str, signed: str) -> None:
    assert format_ratio(ratio) == plain
    assert format_ratio(ratio, signed=True) == signed


def test_a_number_goes_with_its_noun() -> None:
    assert [format_count(n, "block") for n in (0, 1, 2)] == ["0 blocks", "1 block", "2 blocks"]
