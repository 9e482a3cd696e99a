"""Format bytes, times, counts and ratios: "7.8 GiB", "12.5 ms", "+4.1 %". Binary units, as torch writes them.

Inside Lowtide an amount of memory is a whole number of bytes. `utils/amounts.py` parses text into bytes.
"""

import math
from collections.abc import Mapping
from fractions import Fraction

BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


def format_bytes(n_bytes: int, *, round_up: bool = False) -> str:
    """Return `n_bytes` in the fitting binary unit, to three figures without trailing zeros: "7.8 GiB", "512 B".

    With `round_up` the text never understates, so that `parse_bytes` returns at least `n_bytes`: for suggested budgets.
    """
    unit = _choose_unit(n_bytes, round_up)
    return f"{_format_in_unit(n_bytes, unit, round_up)} {unit}"


def format_change(before_bytes: int, after_bytes: int) -> str:
    """Return both amounts, with a common unit written once: "14.9 -> 7.8 GiB", "1.2 GiB -> 890 MiB"."""
    before, after = format_bytes(before_bytes), format_bytes(after_bytes)
    number, unit = before.split()
    return f"{number if after.endswith(f' {unit}') else before} -> {after}"


def format_apart(one_bytes: int, other_bytes: int, *, round_up: bool = False) -> tuple[str, str]:
    """Format two amounts of memory: to three figures, or in exact bytes if different amounts would look equal
    otherwise.

    `round_up` applies to `other_bytes`.
    """
    one, other = format_bytes(one_bytes), format_bytes(other_bytes, round_up=round_up)
    if one == other and one_bytes != other_bytes:
        return f"{one_bytes} B", f"{other_bytes} B"
    return one, other


def format_parts(total_bytes: int, parts: Mapping[str, int]) -> str:
    """Format the parts of a total in the total's unit: " = 3.9 parameters + 2.3 loss head + 0.9 other".

    "other" is the rest of the total. Parts too small to show are left out; the text is "" if fewer than two remain.
    """
    unit = _choose_unit(total_bytes)
    named = {**parts, "other": total_bytes - sum(parts.values())}
    large = {name: part for name, part in named.items() if part > 0 and _hundredths(part, unit, False)}
    shown = [f"{_format_in_unit(part, unit)} {name}" for name, part in large.items()]
    return f" = {' + '.join(shown)}" if len(shown) > 1 else ""


def format_time(ms: float) -> str:
    """Return a duration to three significant figures: "12.5 ms", "1.2 s", "3.5 min"."""
    for unit, size in (("min", 60_000), ("s", 1000), ("ms", 1)):
        if ms >= size:
            return f"{float(f'{ms / size:.3g}'):g} {unit}"
    return f"{float(f'{ms * 1000:.3g}'):g} us"


def format_count(n: int, noun: str) -> str:
    """Return a number with its noun, whose plural ends in s: "1 block", "3 blocks"."""
    return f"{n} {noun}{'s' * (n != 1)}"


def format_ratio(ratio: float, *, signed: bool = False) -> str:
    """Return a ratio as a percentage, with one decimal below ten: 0.041 is "4.1 %", or "+4.1 %" if `signed`."""
    percent = 100 * ratio
    text = f"{percent:.0f}" if abs(percent) >= 9.95 else f"{percent:.1f}".removesuffix(".0")
    text = text.removeprefix("-") if text == "-0" else text
    return f"{'+' if signed and not text.startswith('-') else ''}{text} %"


def compare_with_budget(peak_bytes: int, budget_bytes: int) -> str:
    """Compare a peak with a plan's budget in words: "7.9 GiB is above its budget of 7.8 GiB"."""
    budget, peak = format_apart(budget_bytes, peak_bytes)
    return f"{peak} is {'within' if peak_bytes <= budget_bytes else 'above'} its budget of {budget}"


def _choose_unit(n_bytes: int, round_up: bool = False) -> str:
    """Return the smallest binary unit in which the rounded amount is below 1024."""
    return next((unit for unit in BINARY if abs(_hundredths(n_bytes, unit, round_up)) < 102400), "PiB")


def _format_in_unit(n_bytes: int, unit: str, round_up: bool = False) -> str:
    whole, hundredths = divmod(abs(_hundredths(n_bytes, unit, round_up)), 100)
    return ("-" if n_bytes < 0 else "") + f"{whole}.{hundredths:02}".rstrip("0").rstrip(".")


def _hundredths(n_bytes: int, unit: str, round_up: bool) -> int:
    """Return the absolute value of `n_bytes` in hundredths of `unit`, rounded to three significant figures, or to whole
    units above 999.
    """
    exact = Fraction(abs(n_bytes), BINARY[unit])
    step = Fraction(1, 100) if exact < 10 else Fraction(1, 10) if exact < 100 else Fraction(1)
    steps = math.ceil(exact / step) if round_up else round(exact / step)
    return int(steps * step * 100)
