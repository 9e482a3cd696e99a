"""Reasons for predictions that are far from the measured peak, where they can be shown, and the spread of measurements.

Nothing here changes a prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from estimators.rows import Stratum
from estimators.scores import Scored, finished

CLOSE = 0.06

MIB = 2**20

_APART = (1 + CLOSE) / (1 - CLOSE)
"""Ratio of two measurements above which no number is close to both."""


_NEAR = 0.01
"""Tolerance for kernels loaded during the run, which measurements include and predictions do not."""


def far(pairs: Sequence[Scored]) -> list[Scored]:
    """Return the finished rows whose prediction is not within 6 % of the measured peak."""
    return [pair for pair in finished(pairs) if not is_close(pair.prediction.reserved_bytes, pair.row.measured_bytes)]


def is_close(found: int | None, measured: int) -> bool:
    """Return True if `found` is within 6 % of `measured`."""
    return found is not None and abs(found / measured - 1) <= CLOSE


def reason(pair: Scored, pairs: Sequence[Scored]) -> str:
    """Describe the reason that can be shown for a row's error, or state that no reason is known."""
    predicted, measured = pair.prediction.reserved_bytes, pair.row.measured_bytes
    assert predicted is not None
    again = dict(_again(pair, pairs))
    found = ", ".join(f"{_mib(n_bytes)} MiB ({where})" for n_bytes, where in again.items())
    apart = [n_bytes for n_bytes in again if max(n_bytes, measured) > _APART * min(n_bytes, measured)]
    if apart:
        return f"measured again: {found}. No number is within 6 % of both"
    near = [n_bytes for n_bytes in again if is_close(predicted, n_bytes)]
    if near:
        errors = ", ".join(f"{predicted / n_bytes - 1:+.1%}" for n_bytes in near)
        return f"measured again: {found}. The prediction is {errors} from that"
    said = f"measured again: {found}. " if found else ""
    if pair.row.limited:
        peaks = ", ".join(f"{_mib(one.bytes)} MiB (of {_mib(one.limit)})" for one in pair.row.limited)
        said += f"run again with less memory: {peaks}. "
        error = min((predicted / one.bytes - 1 for one in pair.row.limited), key=abs)
        if abs(error) <= CLOSE:
            return f"{said}The prediction is {error:+.1%} from the nearest"
    least, most = pair.prediction.least_bytes, pair.prediction.most_bytes
    assert least is not None
    assert most is not None
    if least * (1 - _NEAR) <= measured <= most * (1 + _NEAR):
        return f"{said}The range contains it, to 1 %: {_RANGES[pair.row.stratum]}"
    return f"{said}No reason is known"


_RANGES: Mapping[Stratum, str] = {
    "transformer, batch 15 and more": "another order of addresses",
    "transformer, smaller batch": "another order of addresses, or other lengths",
    "CNN": "bounds of cuDNN's workspaces, or another order of addresses",
}


def repeats(pairs: Sequence[Scored]) -> tuple[int, int]:
    """Count the repeats of finished rows, and those within 6 % of the first measurement."""
    found = [(n_bytes, pair.row.measured_bytes) for pair in finished(pairs) for n_bytes in pair.row.repeats]
    return len(found), sum(is_close(*each) for each in found)


def count_close_to_one(pairs: Sequence[Scored]) -> tuple[int, int]:
    """Count the predictions within 6 % of at least one measurement of their run, and all finished rows.

    Runs with limited memory count as measurements, too.
    """
    found = finished(pairs)
    n_close = sum(any(is_close(pair.prediction.reserved_bytes, n) for n in _all(pair, pairs)) for pair in found)
    return n_close, len(found)


def _all(pair: Scored, pairs: Sequence[Scored]) -> list[int]:
    others = [n_bytes for n_bytes, _ in _again(pair, pairs)]
    return [pair.row.measured_bytes, *others, *(one.bytes for one in pair.row.limited)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Above:
    """Amount, at least and at most, by which the first measurement of a row exceeds all others of the same run."""

    name: str
    least_bytes: int
    most_bytes: int


def find_above_repeats(some: Sequence[Scored], pairs: Sequence[Scored]) -> list[Above]:
    """Find rows of `some` whose first measurement is more than 6 % above every other one, runs with limited memory
    included.
    """
    found = []
    for pair in some:
        first = pair.row.measured_bytes
        others = [n_bytes for n_bytes, _ in _again(pair, pairs)] + [one.bytes for one in pair.row.limited]
        if others and max(others) * (1 + CLOSE) < first:
            found.append(Above(name=pair.row.id, least_bytes=first - max(others), most_bytes=first - min(others)))
    return found


def _again(pair: Scored, pairs: Sequence[Scored]) -> Iterator[tuple[int, str]]:
    """Yield other measurements of the same model, batch and optimizer, each with its origin."""
    for n_bytes in pair.row.repeats:
        yield n_bytes, "the same run, repeated"
    for other in finished(pairs):
        same = (other.row.model, other.row.batch, other.row.optimizer)
        if other is not pair and same == (pair.row.model, pair.row.batch, pair.row.optimizer):
            yield other.row.measured_bytes, other.row.id


def _mib(n_bytes: int) -> str:
    return f"{n_bytes // MIB:,}"
