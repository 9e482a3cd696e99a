"""How long a step takes when nothing disturbs it: piece by piece, the fastest of several.

On a shared processor hardly a second passes in which nobody else takes a part of it, and it takes a different part of
each step. So a step is cut into pieces, wherever one of torch's operators begins; what is between two of them, Python
included, is a piece, and there are some thousands. Of each the fastest of several steps counts, and their sum is the
step's time. The plain step is timed in the same way, in turns with the others and as often.
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
    """One step: what it took, in pieces. Steps of the same operators have the same pieces."""

    operators: tuple[str, ...]
    seconds: npt.NDArray[np.float64]
    """Of what comes before the first operator and after the last, and then from the beginning of each to the next."""


def taken(step: Callable[[], object]) -> Taken:
    """Run one step, with torch's profiler as the clock."""
    with without_noise(2, b"USDT:"), profile(use_cpu=True) as clock:
        began = time.perf_counter()
        step()
        whole = time.perf_counter() - began
    assert clock.kineto_results is not None
    events = sorted((event.start_ns(), event.name()) for event in clock.kineto_results.events())  # what it is made of
    pieces = np.diff([start for start, _ in events]) / 1e9
    return Taken(tuple(name for _, name in events), np.array([whole - pieces.sum(), *pieces]))


def undisturbed(steps: Sequence[Taken]) -> float:
    """Seconds: the fastest of each piece, added up. Of steps that are not alike those count of which there are most."""
    most, _ = Counter(step.operators for step in steps).most_common(1)[0]
    return float(np.min([step.seconds for step in steps if step.operators == most], axis=0).sum())
