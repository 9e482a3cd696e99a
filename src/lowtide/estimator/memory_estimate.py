"""The record of an estimate: what a step needs, when and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowtide.memory.allocator.simulation import freed_from_entry
from lowtide.memory.memory_timeline import Timeline
from lowtide.planner.records import Static

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """What a training step will need, from a run without memory. `print` it for a table."""

    timeline: Timeline
    """As a measured one: levels over entry, bytes."""
    static: Static
    """What exists when the step begins, its optimizer state included."""
    unknown: tuple[str, ...]
    """Memory inside of operators that is not known exactly, with its bounds and what it is counted as, if known."""
    assumed: tuple[str, ...]
    """What the step asked of its tensors and was told without anybody knowing, with the line that asked."""

    @property
    def peak_bytes(self) -> int:
        """The most memory of the step: parameters, gradients, optimizer state and batch included."""
        return self.static.total + self.timeline.peak_bytes

    def to_snapshot(self, path: str | Path) -> None:
        """Write a memory snapshot, as `Timeline.to_snapshot`, with what exists when the step begins."""
        static = self.static
        freed = sum(event.bytes for event in freed_from_entry(self.timeline.stream))  # which the timeline has itself
        at_entry = []
        kept = static.parameters, static.optimizer, static.buffers
        for n_bytes in (static.gradients, static.carried_over, static.inputs, *kept):
            at_entry.append(max(0, n_bytes - freed))
            freed = max(0, freed - n_bytes)
        self.timeline.to_snapshot(path, at_entry=at_entry)

    def more(self) -> Iterator[str]:
        """Lines that the table has besides."""
        return iter(())

    def __str__(self) -> str:
        from lowtide.estimator.estimate_text import table  # made when somebody looks

        return "\n".join(table(self))
