"""Parse amounts of memory from text: "8GiB", "500 MB", "60%".

Both decimal and binary units are read, and never mixed up: 1 GB is 10^9 bytes, 1 GiB is 2^30. `units.py` formats them.
"""

import operator
import re
import reprlib
from collections.abc import Mapping
from fractions import Fraction
from typing import Literal, SupportsIndex

from lowtide.errors import BudgetError
from lowtide.units import BINARY

BudgetFor = Literal["requested", "reserved"]
"""Bytes that a budget limits: those that tensors request, or those that the CUDA caching allocator reserves."""

_DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BYTES_PER_UNIT = {unit.lower(): Fraction(size) for unit, size in (BINARY | _DECIMAL).items()}

_REFUSED_UNITS = {
    "": "it has no unit; write {0}B for bytes",
    "%": "the peak that it is a share of is not known here",
    **{
        letter.lower(): f"{letter} can mean powers of 1000 or of 1024; write {letter}B or {letter}iB"
        for letter in "KMGTP"
    },
}
_AMOUNT = re.compile(r"\s*(-?[0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-z]*|%)\s*", re.IGNORECASE | re.ASCII)
_LARGEST = 2**128
_ACCEPTED = 'a number with a unit, as in "8GiB", "1.5 GB" or "500MB"; in Python an int, which is bytes'


def parse_bytes(amount: str | SupportsIndex) -> int:
    """Return the bytes in `amount`: text with a unit ("8GiB", "500 MB", "1.5gb"), or an int, which is bytes already.

    Case does not matter, and a fraction of a byte is cut off. "8G" is refused, because it can mean 8 GB or 8 GiB.
    Raises BudgetError for anything but a positive amount below 2^128: no unit, zero, negatives, floats, bools.
    """
    return _parse(amount, _BYTES_PER_UNIT, _ACCEPTED)


def parse_budget(budget: str | SupportsIndex, plain_peak_bytes: int | None = None) -> int:
    """Return the bytes in `budget`: an amount for `parse_bytes`, or "60%" of `plain_peak_bytes`, rounded down.

    `plain_peak_bytes` is the peak of the training step without a plan. Raises BudgetError as `parse_bytes` does, and
    for a percentage when `plain_peak_bytes` is None.
    """
    units = _BYTES_PER_UNIT
    if plain_peak_bytes is not None:
        units = units | {"%": Fraction(plain_peak_bytes, 100)}
    return _parse(budget, units, f'{_ACCEPTED}, or a share of the plain step\'s peak, as in "60%"')


AUTO = "auto"
"""Budget that means all free GPU memory."""

_OF_GPU = re.compile(r"\s*([0-9]{1,3}(?:\.[0-9]{1,20})?)\s*%\s*of\s+gpu\s*", re.IGNORECASE | re.ASCII)


def parse_gpu_share(budget: str) -> Fraction | None:
    """Return the share of a GPU's memory that a budget states: 0.9 for "90% of gpu". Return None for other budgets.

    Raises BudgetError for 0% and for more than 100%.
    """
    match = _OF_GPU.fullmatch(budget)
    if match is None:
        return None
    share = Fraction(match[1]) / 100
    if not 0 < share <= 1:
        raise BudgetError(
            f"{_quoting.repr(budget)} is not a part of a GPU's memory.\n  Understood: more than 0%, and up to 100%."
        )
    return share


def is_of_gpu(budget: object) -> bool:
    """Return True for a budget relative to a GPU: "auto" or "90% of gpu".

    Raises BudgetError as `parse_gpu_share` does.
    """
    return isinstance(budget, str) and (budget.strip().lower() == AUTO or parse_gpu_share(budget) is not None)


def check_budget(budget: str | SupportsIndex, *, of_gpu: bool = False) -> None:
    """Raise BudgetError if `budget` is invalid. The peak that a percentage refers to need not be known yet.

    Budgets relative to a GPU, such as "90% of gpu", are valid only if `of_gpu` is set; `memory/device_budget.py` says
    on which devices.
    """
    if not (of_gpu and is_of_gpu(budget)):
        parse_budget(budget, plain_peak_bytes=2**40)


_quoting = reprlib.Repr()
_quoting.maxstring = _quoting.maxother = _quoting.maxlong = 60


def _parse(amount: object, bytes_per_unit: Mapping[str, Fraction], understood: str) -> int:
    def build_error(why: str) -> BudgetError:
        is_huge = isinstance(amount, int) and abs(amount) >= _LARGEST  # Python may refuse to print it
        quoted = "an int of more than 128 bits" if is_huge else _quoting.repr(amount)
        return BudgetError(f"{quoted} is not an amount of memory: {why}.\n  Understood: {understood}.")

    if is_of_gpu(amount):
        raise build_error("it depends on a GPU and what is on it, which fit, within and `lowtide run` look up")
    if isinstance(amount, str):
        match = _AMOUNT.fullmatch(amount)
        if match is None:
            raise build_error("it is not a number with a unit")
        number, unit = match[1], match[2]
        if number.startswith("-"):  # before its unit: a unit would not help
            raise build_error("it is negative")
        if unit.lower() not in bytes_per_unit:
            raise build_error(_REFUSED_UNITS.get(unit.lower(), f"{unit[:20]} is not a unit of memory").format(number))
        n_bytes = int(Fraction(number) * bytes_per_unit[unit.lower()])
    elif isinstance(amount, SupportsIndex) and not isinstance(amount, bool):
        n_bytes = operator.index(amount)
    else:
        raise build_error(f"a {type(amount).__name__} has no unit")
    if n_bytes < 1:
        raise build_error("it is negative" if n_bytes < 0 else "it is less than one byte")
    if n_bytes >= _LARGEST:
        raise build_error("no computer can address that much")
    return n_bytes
