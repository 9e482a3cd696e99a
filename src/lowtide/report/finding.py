"""A finding of `lowtide watch`: memory that outlives its step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lowtide import units
from lowtide.planner.serialization import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Record):
    """Memory held without need: its size, first step, holder, origin and remedy."""

    code: str
    name: str
    held_bytes: int
    since_step: int
    holder: str
    made_at: str | None
    """`file:line` of the forward pass that created the graph or output; None if no forward pass did."""
    fix: str
    unit: str = ""
    """Words printed after the bytes, such as "of host memory a step"; empty for bytes that are simply held."""
    n_steps: int = 1
    """Number of inspected steps in which the finding was seen."""

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
