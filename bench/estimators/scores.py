"""Errors of predictions, and claims about these errors."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from estimators.records import Prediction
from estimators.rows import STRATA, TOOLS, Row, Stratum

DOES_NOT_FIT = "does not fit"

OURS = "Lowtide"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A row and the prediction for it."""

    row: Row
    prediction: Prediction

    def error(self, tool: str = OURS) -> float | None:
        """Return the relative error, (predicted - measured) / measured, of a tool; None if the tool has no answer."""
        if tool == OURS:
            predicted = self.prediction.reserved_bytes
        else:
            estimate = self.row.estimates.get(tool)
            predicted = None if estimate is None else estimate.bytes
        return None if predicted is None else predicted / self.row.measured_bytes - 1

    def says_out_of_memory(self, tool: str = OURS) -> bool | None:
        """Return True if the tool said that the run would not fit; None if the tool has no answer."""
        if tool == OURS:
            verdict = self.prediction.verdict
            return None if verdict is None else verdict == DOES_NOT_FIT
        estimate = self.row.estimates.get(tool)
        return None if estimate is None or estimate.bytes is None else estimate.oom


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim about the predictions; `held` is None if no row could decide it."""

    text: str
    found: str
    held: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Absolute errors of a tool and of Lowtide, on the rows of a stratum that both know."""

    tool: str
    stratum: Stratum | None
    n_rows: int
    median: float
    worst: float
    our_median: float
    our_worst: float


def scored(rows: Sequence[Row], predictions: Sequence[Prediction]) -> list[Scored]:
    """Return the rows that were rebuilt, in order, each with its prediction."""
    found = {prediction.row: prediction for prediction in predictions}
    return [
        Scored(row=row, prediction=found[row.id])
        for row in rows
        if row.id in found and found[row.id].reserved_bytes is not None
    ]


def finished(pairs: Sequence[Scored], stratum: Stratum | None = None) -> list[Scored]:
    """Return the pairs whose run finished, so that the measured bytes are its peak; of one stratum if given."""
    return [pair for pair in pairs if not pair.row.oom and stratum in (None, pair.row.stratum)]


def errors(pairs: Sequence[Scored], tool: str = OURS) -> list[float]:
    """Return the absolute errors of a tool, on the rows that it knows."""
    return [abs(error) for pair in pairs if (error := pair.error(tool)) is not None]


def comparisons(pairs: Sequence[Scored]) -> Iterator[Comparison]:
    """Compare each tool with Lowtide: over all rows, then in each stratum that has rows the tool knows."""
    for tool in TOOLS:
        for stratum in (None, *STRATA):
            both = [pair for pair in finished(pairs, stratum) if pair.error(tool) is not None]
            if both:
                theirs, ours = errors(both, tool), errors(both)
                yield Comparison(
                    tool=tool,
                    stratum=stratum,
                    n_rows=len(both),
                    median=statistics.median(theirs),
                    worst=max(theirs),
                    our_median=statistics.median(ours),
                    our_worst=max(ours),
                )


def claims(pairs: Sequence[Scored]) -> Iterator[Claim]:
    """Check all claims about the predictions, and yield each with its result."""
    yield _median("the median error of all runs is at most 2.5 %", errors(finished(pairs)), 0.025)
    large = errors(finished(pairs, "transformer, batch 15 and more"))
    yield _median("the median error of transformers at batch 15 and more is at most 2 %", large, 0.02)
    yield _check_nine_of_ten("nine of ten runs are within 6 %", errors(finished(pairs)))
    known = [pair for pair in finished(pairs) if pair.row.stratum != "transformer, smaller batch"]
    yield _check_nine_of_ten("the same, without small batches of text, whose lengths are unknown", errors(known))
    refused = [pair for pair in pairs if pair.row.oom]
    said = sum(pair.says_out_of_memory() is True for pair in refused)
    yield Claim(
        text="runs that ran out of memory are predicted not to fit",
        found=f"{said} of {len(refused)}",
        held=said == len(refused) if refused else None,
    )
    ended = finished(pairs)
    alarms = sum(pair.says_out_of_memory() is True for pair in ended)
    yield Claim(
        text="no run that finished is predicted not to fit",
        found=f"{len(ended) - alarms} of {len(ended)}",
        held=not alarms if ended else None,
    )


def _median(text: str, found: Sequence[float], most: float) -> Claim:
    if not found:
        return Claim(text=text, found="no rows", held=None)
    median = statistics.median(found)
    return Claim(text=text, found=f"{median:.2%} of {len(found)}", held=median <= most)


def _check_nine_of_ten(text: str, found: Sequence[float]) -> Claim:
    close = sum(error <= 0.06 for error in found)
    held = 10 * close >= 9 * len(found) if found else None
    return Claim(text=text, found=f"{close} of {len(found)}", held=held)
