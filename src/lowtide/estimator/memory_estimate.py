"""The record of an estimate: the memory that a step needs, over time and by cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowtide.memory import timeline_table
from lowtide.memory.allocator.simulation import freed_from_entry
from lowtide.memory.memory_timeline import Timeline
from lowtide.planner.records import Static
from lowtide.report.run_record import RunRecord, versions
from lowtide.report.step_memory import read_recorded_memory
from lowtide.units import format_bytes
from lowtide.utils.rendering import Displayed, format_repr

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MemoryEstimate(Displayed):
    """Memory that a training step will need, from a run on fake tensors. `print` it for a table."""

    timeline: Timeline
    """Timeline of the step, in bytes above those in use when the step begins."""
    static: Static
    """Memory that exists when the step begins, including optimizer state."""
    unknown: tuple[str, ...]
    """Operators whose scratch memory is not known exactly, with its bounds and the counted bytes, if known."""
    assumed: tuple[str, ...]
    """Reads of unknown tensor contents that were answered by an assumption, with the line of code that reads them."""
    flops: int = 0
    """FLOPs of the step's matrix products, convolutions and attention."""

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the step in bytes, including parameters, gradients, optimizer state and batch."""
        return self.static.total + self.timeline.peak_bytes

    def at_entry(self) -> dict[str, int]:
        """Return the bytes of each category that exist when the step begins."""
        static = self.static
        entry = {"parameters": static.parameters, "gradients": static.gradients, "optimizer state": static.optimizer}
        entry |= {"buffers": static.buffers, "inputs": static.inputs}
        return entry | {"left from before": static.carried_over, "other tensors": static.others}

    def alive_at_peak(self) -> dict[str, int]:
        """Return the bytes of each category at the peak. Their sum is the peak.

        Memory that existed when the step began and was freed before the peak is a category with negative bytes.
        """
        alive = Counter(self.at_entry())
        for category, blocks in self.timeline.alive_at_peak().items():
            alive[category] += sum(block.bytes for block in blocks)
        alive["freed since entry"] = -self.timeline.freed_from_entry(self.timeline.peak_index)
        return {name: n_bytes for name, n_bytes in alive.items() if n_bytes}

    def phase_peaks(self) -> list[tuple[str, int]]:
        """Return the name and the peak bytes of each phase, in order, including memory from before the step."""
        return [(phase.name, self.static.total + phase.peak_bytes) for phase in self.timeline.phases]

    def to_snapshot(self, path: str | Path) -> None:
        """Write a memory snapshot like `Timeline.to_snapshot`, including memory that exists when the step begins."""
        static = self.static
        freed = sum(event.bytes for event in freed_from_entry(self.timeline.stream))  # already part of the timeline
        at_entry = []
        lasting = static.parameters, static.optimizer, static.buffers
        for n_bytes in (static.gradients, static.carried_over, static.inputs, *lasting):
            at_entry.append(max(0, n_bytes - freed))
            freed = max(0, freed - n_bytes)
        self.timeline.to_snapshot(path, at_entry=at_entry)

    def __repr__(self) -> str:
        return format_repr(type(self).__name__, f"{format_bytes(self.peak_bytes)} peak")

    def to_record(self, command: str = "lowtide.estimate(model, step, batch)", subject: str = "") -> RunRecord:
        """Return this estimate as a RunRecord, the input of reports."""
        return RunRecord(
            command=command,
            versions=versions(),
            subject=subject or "An estimated step",
            before=read_recorded_memory(self.timeline, "estimated", self.static),
            predicted=("every allocation of the step, which was run on tensors without memory",),
            assumed=self.assumed,
            unknown=self.unknown,
        )

    def more(self) -> Iterator[str]:
        """Yield no lines; subclasses override this to add lines to the printed table."""
        return iter(())

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield from timeline_table.table(self.timeline, entry=self.at_entry())
        yield from self.more()
        for title, lines in (("not known exactly", self.unknown), ("assumed", self.assumed)):
            if lines:
                yield f"{title}:"
                yield from (f"  {line}" for line in lines)
