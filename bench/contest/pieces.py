"""Time of a step without disturbances: the step is cut into pieces, and the fastest run of each piece counts.

On a shared processor other processes take time in almost every second, and disturb another part of each step. So a step
is cut into pieces wherever one of torch's operators begins; the code between two operators, Python included, is a
piece, and there are some thousands. Of each piece the fastest of several steps counts, and the sum over pieces is the
step's time. The plain step is timed in the same way, in turns with the other steps and as often.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch.autograd.profiler import profile

from lowtide.utils.stderr_filter import without_noise


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """Times of one step's pieces. Steps with the same operators have the same pieces."""

    operators: tuple[str, ...]
    seconds: npt.NDArray[np.float64]
    """Time before the first operator and after the last, together; then the times from each operator's start to the
    next.
    """


def taken(step: Callable[[], object]) -> Taken:
    """Run one step, and return the times of its pieces, measured by torch's profiler."""
    with without_noise(2, b"USDT:"), profile(use_cpu=True) as clock:
        began = time.perf_counter()
        step()
        whole = time.perf_counter() - began
    assert clock.kineto_results is not None
    events = sorted((event.start_ns(), event.name()) for event in clock.kineto_results.events())  # raw events
    pieces = np.diff([start for start, _ in events]) / 1e9
    return Taken(tuple(name for _, name in events), np.array([whole - pieces.sum(), *pieces]))


def undisturbed(steps: Sequence[Taken]) -> float:
    """Return the seconds of an undisturbed step: the sum of each piece's fastest time.

    Only the steps with the most common sequence of operators count.
    """
    most, _ = Counter(step.operators for step in steps).most_common(1)[0]
    return float(np.min([step.seconds for step in steps if step.operators == most], axis=0).sum())
