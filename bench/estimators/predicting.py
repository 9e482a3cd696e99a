"""Estimate of one measured run, on a GPU that the machine does not have."""

from __future__ import annotations

import time

import lowtide
from estimators.models import build
from estimators.records import Prediction
from estimators.rows import Row
from estimators.training import Loop
from lowtide.estimator.cuda.gpu_estimate import GpuMemoryEstimate
from lowtide.memory.allocator.config import AllocatorConfig
from lowtide.memory.gpu_specs import GpuSpec

CAPABILITY = {
    "NVIDIA GeForce RTX 4060": (8, 9),
    "NVIDIA GeForce RTX 3060": (8, 6),
    "NVIDIA A100-SXM4-40GB": (8, 0),
}


def predict(row: Row) -> Prediction:
    """Predict the bytes that the run reserves and whether it fits on its GPU, and time the prediction."""
    began = time.perf_counter()
    expected, *others_possible = row.lengths
    estimated = estimate(row, expected)
    peaks = [*estimated.interval, *(estimate(row, lengths).peak_reserved_bytes for lengths in others_possible)]
    return Prediction(
        row=row.id,
        reserved_bytes=estimated.peak_reserved_bytes,
        least_bytes=min(peaks),
        most_bytes=max(peaks),
        allocated_bytes=estimated.peak_allocated_bytes,
        verdict=estimated.verdict,
        seconds=time.perf_counter() - began,
    )


def estimate(row: Row, lengths: tuple[int, ...]) -> GpuMemoryEstimate:
    """Estimate the whole run on its GPU; `lengths` has the tokens of the longest line in each iteration."""
    model = build(row.model)
    loop = Loop(row, model, lengths)
    gpu = GpuSpec(name=row.gpu, total_bytes=row.gpu_bytes, capability=CAPABILITY[row.gpu], source=row.source)
    return lowtide.estimate(model, loop, None, device=gpu, optimizer=loop.optimizer, allocator=AllocatorConfig())
