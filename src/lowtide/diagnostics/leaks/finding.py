"""What the watch says: a rule with a stable code, and a finding that it made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lowtide import units

if TYPE_CHECKING:
    from lowtide.diagnostics.leaks.inspection import Survivor


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What this inspection and earlier ones saw of the same holder, last what this one did."""

    has_changed: bool = False
    """Whether it holds memory now that it did not hold then."""
    held_bytes: Sequence[int] = ()
    entries: Sequence[int] = ()
    """Of the lists, dicts and sets that hold the tensors for it."""
    n_alike: int = 0
    """Graphs that it holds now and that the same call in the code made."""
    largest_graph_bytes: int = 0
    """The most that the graph of one forward keeps, as far as measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One kind of finding: what it is, why it costs, how to mend it. `matches` is None for what events tell."""

    code: str
    name: str
    what: str
    why: str
    bad: str
    good: str
    fix: str
    """One line; may use {name} (the variable or attribute), {names} (all variables), {made} and {backward} (places)."""
    matches: Callable[[Survivor, Past], bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something in memory that nobody needs: bytes, since which step, who holds it, what made it, how to mend it."""

    code: str
    name: str
    held_bytes: int
    since_step: int
    holder: str
    made_at: str | None
    """`file:line` of the forward whose graph or output it is; None if it is no forward's."""
    fix: str
    n_steps: int = 1
    """Steps, of those inspected, in which it was seen."""

    def __str__(self) -> str:
        lines = [
            f"{self.code} {self.name}: {units.format_bytes(self.held_bytes)}, since step {self.since_step}",
            f"  held by  {self.holder}",
        ]
        if self.made_at is not None:
            lines.append(f"  made at  {self.made_at}")
        lines.append(f"  fix      {self.fix}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
