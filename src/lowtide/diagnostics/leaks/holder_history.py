"""Observations of one holder over several inspections, which the rules judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

GROWTHS = 3
"""Number of consecutive inspections at which a container must have grown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Observations of one holder over several inspections, the latest one last."""

    has_changed: bool = False
    """True if the holder has memory now that it did not have at the previous inspection."""
    held_bytes: Sequence[int] = ()
    entries: Sequence[int] = ()
    """Entries of the lists, dicts and sets through which the holder reaches the tensors."""
    has_stopped: bool = False
    """True if the containers have stopped growing, or grow much more slowly than before."""
    n_steps: int = 0
    """Number of different steps in which the holder's memory was allocated."""
    n_alike: int = 0
    """Number of graphs that the holder keeps and that the same call site made."""
    largest_graph_bytes: int = 0
    """Largest graph of a single forward pass measured so far."""


def grows(sizes: Sequence[int], n: int = GROWTHS) -> bool:
    """Return True if each of the last `n` sizes is larger than the one before."""
    last = sizes[-n:]
    return len(last) == n and all(a < b for a, b in pairwise(last))


def has_slowed(entries: Sequence[int], steps: Sequence[int]) -> bool:
    """Return True if the number of entries grew by less than half as much per step as before: a cache that is full.

    Args:
        entries: Numbers of entries at the inspections.
        steps: Step numbers of the same inspections.
    """
    if len(entries) < 3:
        return False
    n_before, n_now = steps[-2] - steps[0], steps[-1] - steps[-2]
    before, now = entries[-2] - entries[0], entries[-1] - entries[-2]
    return 2 * now * max(1, n_before) < before * max(1, n_now)
