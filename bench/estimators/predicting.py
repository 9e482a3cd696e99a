"""One run, foreseen on a card that is not there."""

from __future__ import annotations

import time

import lowtide
from estimators.models import build
from estimators.records import Prediction
from estimators.rows import Row
from estimators.training import Loop
from lowtide.estimator.cuda.gpu_estimate import CardForesight
from lowtide.memory.allocator.config import AllocatorConfig
from lowtide.memory.gpu_specs import Card

CAPABILITY = {
    "NVIDIA GeForce RTX 4060": (8, 9),
    "NVIDIA GeForce RTX 3060": (8, 6),
    "NVIDIA A100-SXM4-40GB": (8, 0),
}


def predict(row: Row) -> Prediction:
    """What the run reserves, whether it fits on its card, and how long it took to say so."""
    began = time.perf_counter()
    expected, *others_possible = row.lengths
    foreseen = foresee(row, expected)
    peaks = [*foreseen.interval, *(foresee(row, lengths).peak_reserved_bytes for lengths in others_possible)]
    return Prediction(
        row=row.id,
        reserved_bytes=foreseen.peak_reserved_bytes,
        least_bytes=min(peaks),
        most_bytes=max(peaks),
        allocated_bytes=foreseen.peak_allocated_bytes,
        verdict=foreseen.verdict,
        seconds=time.perf_counter() - began,
    )


def foresee(row: Row, lengths: tuple[int, ...]) -> CardForesight:
    """The whole run on its card."""
    model = build(row.model)
    loop = Loop(row, model, lengths)
    card = Card(name=row.card, total_bytes=row.card_bytes, capability=CAPABILITY[row.card], source=row.source)
    return lowtide.foresee(model, loop, None, device=card, optimizer=loop.optimizer, allocator=AllocatorConfig())
