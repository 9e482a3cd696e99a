"""Show the memory that estimated steps need, as a table over batch sizes and as JSON, and compare it with a limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowtide.estimator.cuda.gpu_estimate import GpuMemoryEstimate
from lowtide.estimator.memory_estimate import MemoryEstimate
from lowtide.planner.records import Plan
from lowtide.units import compare_with_budget, format_bytes
from lowtide.utils.tables import Table


def sweep(estimates: Mapping[int | None, MemoryEstimate]) -> str:
    """Format estimates for several batch sizes as a table with one line for each size."""
    rows: list[tuple[str, ...]] = []
    title: list[str] = []
    compared: list[str] = []
    headings: tuple[str, ...] = ("batch", "peak")
    for size, estimate in estimates.items():
        if not isinstance(estimate, GpuMemoryEstimate):
            rows.append((str(size), format_bytes(estimate.peak_bytes)))
            continue
        title = [f"on {estimate.gpu.name}, with {format_bytes(estimate.gpu.total_bytes)}:"]
        compared = [f"smallest GPU: {estimate.compared_gpus}"]
        headings = ("batch", "requested", "allocated", "reserved", "at least", "at most", "answer", "smallest GPU")
        peaks = (estimate.peak_requested_bytes, estimate.peak_allocated_bytes, estimate.peak_reserved_bytes)
        sizes = [format_bytes(n) for n in (*peaks, *estimate.interval)]
        smallest = "none" if estimate.smallest_gpu is None else estimate.smallest_gpu.name
        rows.append((str(size), *sizes, estimate.verdict, smallest))
    return "\n".join([*title, *Table(headings=headings, rows=rows, left=frozenset()).lines(), *compared])


def is_within(estimate: MemoryEstimate, budget_bytes: int | None, *, strict: bool) -> bool:
    """Return True if a step fits: on its GPU, or else in the budget, if there is one.

    With `strict`, the answer is False if only bounds are known for some memory.
    """
    if isinstance(estimate, GpuMemoryEstimate):
        return estimate.is_sure if strict else estimate.fits
    if strict and estimate.unknown:
        return False
    return budget_bytes is None or estimate.peak_bytes <= budget_bytes


def under_plan(plan: Plan, estimate: MemoryEstimate) -> str:
    """Compare the peak of a step under `plan` with the plan's budget, and with its prediction if they differ."""
    text = f"under the plan: {compare_with_budget(_choose_bounded_bytes(plan, estimate), plan.budget_bytes)}"
    predicted = plan.predicted.peak_bytes
    return text if predicted == estimate.peak_bytes else f"{text}; {format_bytes(predicted)} was predicted"


def _choose_bounded_bytes(plan: Plan, estimate: MemoryEstimate) -> int:
    """Return the peak in the bytes that the plan's budget bounds: reserved or requested ones."""
    if plan.budget_for == "reserved" and isinstance(estimate, GpuMemoryEstimate):
        return estimate.peak_reserved_bytes
    return estimate.peak_bytes


def record(
    estimate: MemoryEstimate, size: int | None, budget_bytes: int | None = None, plan: Plan | None = None
) -> dict[str, Any]:
    """Return the estimate as plain data for JSON; amounts are bytes."""
    about: dict[str, Any] = {
        "at_peak_bytes": estimate.alive_at_peak(),
        "phases": [{"name": name, "peak_bytes": n_bytes} for name, n_bytes in estimate.phase_peaks()],
        "unknown": list(estimate.unknown),
        "assumed": list(estimate.assumed),
    }
    if plan is not None:
        about["plan"] = {
            "budget_bytes": plan.budget_bytes,
            "predicted_bytes": plan.predicted.peak_bytes,
            "peak_bytes": _choose_bounded_bytes(plan, estimate),
        }
    if not isinstance(estimate, GpuMemoryEstimate):
        static = estimate.static
        return {
            "batch": size,
            "peak_bytes": estimate.peak_bytes,
            "budget_bytes": budget_bytes,
            "parameters_bytes": static.parameters,
            "gradients_bytes": static.gradients,
            "optimizer_bytes": static.optimizer,
            "buffers_bytes": static.buffers,
            "inputs_bytes": static.inputs,
            **about,
        }
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
        "flops": estimate.flops,
        "smallest_gpu": None if estimate.smallest_gpu is None else estimate.smallest_gpu.name,
        "allocator": str(estimate.config),
        **about,
    }
