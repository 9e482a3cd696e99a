"""What was predicted."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.planner.serialization import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Record):
    """Of one row. A row that was not rebuilt has a `refusal` and nothing else."""

    row: str
    reserved_bytes: int | None = None
    """Peak of what the allocator takes from the GPU, with the addresses that a driver is expected to give."""
    least_bytes: int | None = None
    most_bytes: int | None = None
    """The same at least and at most: with other addresses, and with the bounds of what is known only within bounds."""
    allocated_bytes: int | None = None
    verdict: str | None = None
    """Whether it fits on the row's GPU: "fits", "does not fit" or "unknown"."""
    seconds: float = 0.0
    refusal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions(Record):
    """Of all rows that were asked for, with the versions of what they were rebuilt with."""

    versions: dict[str, str]
    found: tuple[Prediction, ...]
