"""What steps need on a card that is not there, as a table over batch sizes and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.estimator.cuda.gpu_estimate import CardForesight

_HEADER = ("batch", "requested", "allocated", "reserved", "at least", "at most", "answer", "smallest card")


def sweep(found: Mapping[int, CardForesight]) -> str:
    """One line for each size of the batch."""
    rows: list[tuple[str, ...]] = [_HEADER]
    for size, foresight in found.items():
        peaks = (foresight.peak_requested_bytes, foresight.peak_allocated_bytes, foresight.peak_reserved_bytes)
        sizes = [format_bytes(n) for n in (*peaks, *foresight.interval)]
        smallest = "none" if foresight.smallest_card is None else foresight.smallest_card.name
        rows.append((str(size), *sizes, foresight.verdict, smallest))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    card = next(iter(found.values())).card
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([f"on {card.name}, with {format_bytes(card.total_bytes)}:", *lines])


def record(foresight: CardForesight, size: int | None) -> dict[str, Any]:
    """All that is known as plain data; amounts are bytes."""
    least, most = foresight.interval
    return {
        "batch": size,
        "card": foresight.card.name,
        "card_bytes": foresight.card.total_bytes,
        "verdict": foresight.verdict,
        "fits": foresight.fits,
        "is_sure": foresight.is_sure,
        "peak_requested_bytes": foresight.peak_requested_bytes,
        "peak_allocated_bytes": foresight.peak_allocated_bytes,
        "peak_reserved_bytes": foresight.peak_reserved_bytes,
        "least_reserved_bytes": least,
        "most_reserved_bytes": most,
        "left_bytes": foresight.left_bytes,
        "smallest_card": None if foresight.smallest_card is None else foresight.smallest_card.name,
        "allocator": str(foresight.config),
        "unknown": list(foresight.unknown),
        "assumed": list(foresight.assumed),
    }
