"""A foreseen step as a few lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lowtide import units

if TYPE_CHECKING:
    from lowtide.foresight.foreseeing import Foresight

TOP_BLOCKS = 3


def table(foresight: Foresight) -> Iterator[str]:
    """The peak, its parts, the peak of each phase, the largest blocks, and what is not known."""
    timeline, static = foresight.timeline, foresight.static
    alive = timeline.alive_at_peak()
    parts = {category: sum(block.bytes for block in blocks) for category, blocks in alive.items()}
    phase = next((p.name for p in timeline.phases if p.first <= timeline.peak_index < p.stop), None)
    yield f"peak {units.format_bytes(foresight.peak_bytes)}" + (f", in phase {phase}" if phase else "")
    before = {"parameters": static.parameters, "gradients": static.gradients, "optimizer state": static.optimizer}
    before |= {"buffers": static.buffers, "inputs": static.inputs}
    freed = timeline.freed_from_entry(timeline.peak_index)
    rows = [(f"{name}, there before", n) for name, n in before.items()] + list(parts.items())
    yield from _rows("there at the peak", [*rows, ("freed since entry", -freed)])
    yield from _rows("most in each phase", [(p.name, static.total + p.peak_bytes) for p in timeline.phases])
    largest = sorted((b for blocks in alive.values() for b in blocks), key=lambda block: -block.bytes)[:TOP_BLOCKS]
    yield from _rows("largest blocks at the peak", [(f"{b.category} {b.name}", b.bytes) for b in largest])
    yield from foresight.more()
    for title, lines in (("not counted", foresight.unknown), ("assumed", foresight.assumed)):
        if lines:
            yield f"{title}:"
            yield from (f"  {line}" for line in lines)


def _rows(title: str, rows: list[tuple[str, int]]) -> Iterator[str]:
    shown = [(name, units.format_bytes(n)) for name, n in rows if n]
    if shown:
        yield f"{title}:"
        width = max(len(text) for _, text in shown)
        yield from (f"  {text:>{width}}  {name}" for name, text in shown)
