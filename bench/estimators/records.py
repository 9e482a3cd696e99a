"""Records of predictions."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.planner.serialization import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Record):
    """Prediction for one row. A row that was not rebuilt has a `refusal` and nothing else."""

    row: str
    reserved_bytes: int | None = None
    """Peak of the bytes that the allocator takes from the GPU, if the driver gives addresses in the expected order."""
    least_bytes: int | None = None
    most_bytes: int | None = None
    """Bounds of `reserved_bytes`: with other orders of addresses, and for memory that is known only within bounds."""
    allocated_bytes: int | None = None
    verdict: str | None = None
    """The answer for the row's GPU: "fits", "does not fit" or "unknown"."""
    seconds: float = 0.0
    refusal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions(Record):
    """Predictions for all requested rows, with the versions of the packages that they were rebuilt with."""

    versions: dict[str, str]
    found: tuple[Prediction, ...]
