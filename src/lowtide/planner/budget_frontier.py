"""The frontier of a step: the least extra cost for each budget, from the smallest peak that a plan reaches to the plain
step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from lowtide.errors import LowtideError
from lowtide.memory.untrusted_files import check_numbers, in_one_line, unpacked
from lowtide.planner.planning import (
    cheapest,
    find_smallest_peak,
    plain_peak_bytes,
    predict_unplanned_step,
    with_lever_costs,
)
from lowtide.planner.records import Fingerprint, Prediction, Profile
from lowtide.planner.serialization import FORMAT, Record
from lowtide.units import format_bytes
from lowtide.utils.rendering import text_of

N_BUDGETS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Point(Record):
    """One way to run the training step: its peak memory, and its extra cost over the plain step."""

    peak_bytes: int
    extra_ms: float | None
    """Extra time over the plain step; None if not measured."""
    extra_flops: int
    share: float
    """Share of the plain step's peak."""
    name: str = ""
    """Name of another method, for points that are not a plan's: `checkpoint every block`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier(Record):
    """Least extra time of a step for each peak memory: `points` lead from the smallest peak to the plain step's."""

    fingerprint: Fingerprint
    plain_bytes: int
    """Predicted peak of the plain step."""
    step_ms: float
    """Time of the plain step; 0.0 if it was not run."""
    points: tuple[Point, ...]
    format: int = FORMAT

    def __str__(self) -> str:
        return text_of(self)

    def _summary(self) -> str:
        smallest = format_bytes(self.points[0].peak_bytes) if self.points else "nothing"
        return f"{self.fingerprint.model}: {len(self.points)} points, {smallest} to {format_bytes(self.plain_bytes)}"


def frontier(profile: Profile, *, n_budgets: int = N_BUDGETS) -> Frontier:
    """Plan for `n_budgets` budgets, evenly spaced from the smallest reachable peak to the plain one; list their costs.

    Peaks and costs are predicted. A budget adds no point if its plan is no cheaper than a smaller budget's plan, so
    there may be fewer points than budgets.

    Args:
        profile: The profile of the step, from `rehearse`.
        n_budgets: Number of budgets, at least 2.

    Returns:
        The frontier: a point for each cost, smallest peak first; `print` it, or save it with `to_json`.

    Raises:
        ValueError: For less than two budgets.

    Example:
        >>> import torch, lowtide
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> batch = torch.ones(128, 64)
        >>> def step(batch):
        ...     model(batch).square().mean().backward()
        >>> frontier = lowtide.frontier(lowtide.rehearse(model, step, batch), n_budgets=2)
        >>> [point.peak_bytes for point in frontier.points]
        [658184, 789256]
    """
    Profile.expect(profile, "frontier")
    if n_budgets < 2:
        raise ValueError(f"n_budgets must be at least 2, the smallest peak and the plain step; found {n_budgets}.")
    plain = with_lever_costs(profile, predict_unplanned_step(profile))
    _, smallest = find_smallest_peak(profile)
    span = plain.peak_bytes - smallest.peak_bytes
    budgets = [smallest.peak_bytes + span * i // (n_budgets - 1) for i in range(n_budgets - 1)]
    predictions = [cheapest(profile, budget) for budget in budgets if budget < plain_peak_bytes(profile)]
    points: list[Point] = []
    for prediction in sorted([*predictions, plain], key=lambda p: (p.peak_bytes, p.extra_ms, p.extra_flops)):
        if not points or _cheaper(prediction, points[-1]):
            points.append(_point(prediction, plain.peak_bytes))
    return Frontier(
        fingerprint=profile.fingerprint, plain_bytes=plain.peak_bytes, step_ms=profile.step_ms, points=tuple(points)
    )


def read_points(path: Path) -> tuple[Point, ...]:
    """Read points from a file that holds a JSON list of points, such as a benchmark's. Raises LowtideError for any
    other file.
    """
    try:
        points = msgspec.json.decode(unpacked(path), type=tuple[Point, ...])
        check_numbers(points)
        return points
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise LowtideError(
            f"{path} is not a list of points: {in_one_line(str(error))}. "
            "Each has name, peak_bytes, extra_ms, extra_flops and share."
        ) from error


def _cheaper(prediction: Prediction, point: Point) -> bool:
    return point.extra_ms is not None and prediction.extra_ms < point.extra_ms


def _point(prediction: Prediction, plain_bytes: int) -> Point:
    return Point(
        peak_bytes=prediction.peak_bytes,
        extra_ms=prediction.extra_ms,
        extra_flops=prediction.extra_flops,
        share=prediction.peak_bytes / plain_bytes,
    )
