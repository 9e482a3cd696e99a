"""The record of earlier inspections of a holder, by which rules judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Observations of one holder over several inspections, the latest one last."""

    has_changed: bool = False
    """True if the holder has memory now that it did not have at the previous inspection."""
    held_bytes: Sequence[int] = ()
    entries: Sequence[int] = ()
    """Entries of the lists, dicts and sets through which the holder reaches the tensors."""
    n_steps: int = 0
    """Steps that the holder's memory is from."""
    n_alike: int = 0
    """Graphs that the holder has now and that one call site made."""
    largest_graph_bytes: int = 0
    """Largest graph of a single forward pass measured so far."""
