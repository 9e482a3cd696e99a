"""Findings of a watch, and the record of earlier inspections that rules judge by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowtide import units


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Memory held without need: its size, first step, holder, origin and remedy."""

    code: str
    name: str
    held_bytes: int
    since_step: int
    holder: str
    made_at: str | None
    """`file:line` of the forward pass that made the graph or output; None if no forward pass made it."""
    fix: str
    unit: str = ""
    """Words behind the bytes, where they are not simply held: "of host memory a step"."""
    n_steps: int = 1
    """Number of inspected steps in which it was seen."""

    def __str__(self) -> str:
        lines = [
            f"{self.code} {self.name}: {self._amount()}since step {self.since_step}",
            f"  {'held by' if self.held_bytes else 'where  '}  {self.holder}",
        ]
        if self.made_at is not None:
            lines.append(f"  made at  {self.made_at}")
        lines.append(f"  fix      {self.fix}")
        return "\n".join(lines)

    def _amount(self) -> str:
        if not self.held_bytes:
            return ""
        return f"{units.format_bytes(self.held_bytes)}{' ' * bool(self.unit)}{self.unit}, "

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as plain values for JSON."""
        return asdict(self)
