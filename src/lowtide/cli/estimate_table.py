"""Show the memory that steps need on an absent GPU, as a table over batch sizes and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.estimator.cuda.gpu_estimate import GpuMemoryEstimate

_HEADER = ("batch", "requested", "allocated", "reserved", "at least", "at most", "answer", "smallest GPU")


def sweep(found: Mapping[int, GpuMemoryEstimate]) -> str:
    """Format one line for each size of the batch."""
    rows: list[tuple[str, ...]] = [_HEADER]
    for size, estimate in found.items():
        peaks = (estimate.peak_requested_bytes, estimate.peak_allocated_bytes, estimate.peak_reserved_bytes)
        sizes = [format_bytes(n) for n in (*peaks, *estimate.interval)]
        smallest = "none" if estimate.smallest_gpu is None else estimate.smallest_gpu.name
        rows.append((str(size), *sizes, estimate.verdict, smallest))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    gpu = next(iter(found.values())).gpu
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([f"on {gpu.name}, with {format_bytes(gpu.total_bytes)}:", *lines])


def record(estimate: GpuMemoryEstimate, size: int | None) -> dict[str, Any]:
    """Return the estimate as plain data; amounts are bytes."""
    least, most = estimate.interval
    return {
        "batch": size,
        "gpu": estimate.gpu.name,
        "gpu_bytes": estimate.gpu.total_bytes,
        "n_gpus": 1 if estimate.processes is None else estimate.processes.size,
        "rank": 0 if estimate.processes is None else estimate.processes.rank,
        "nccl_bytes": list(estimate.nccl),
        "verdict": estimate.verdict,
        "fits": estimate.fits,
        "is_sure": estimate.is_sure,
        "peak_requested_bytes": estimate.peak_requested_bytes,
        "peak_allocated_bytes": estimate.peak_allocated_bytes,
        "peak_reserved_bytes": estimate.peak_reserved_bytes,
        "least_reserved_bytes": least,
        "most_reserved_bytes": most,
        "left_bytes": estimate.left_bytes,
        "smallest_gpu": None if estimate.smallest_gpu is None else estimate.smallest_gpu.name,
        "allocator": str(estimate.config),
        "unknown": list(estimate.unknown),
        "assumed": list(estimate.assumed),
    }
