"""Text rendering of an estimated step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lowtide.memory import timeline_table as text

if TYPE_CHECKING:
    from lowtide.estimator.memory_estimate import MemoryEstimate


def table(estimate: MemoryEstimate) -> Iterator[str]:
    """Return the timeline's lines with the memory at entry, and the memory that is not known exactly."""
    static = estimate.static
    entry = {"parameters": static.parameters, "gradients": static.gradients, "optimizer state": static.optimizer}
    entry |= {"buffers": static.buffers, "inputs": static.inputs}
    yield from text.table(estimate.timeline, entry=entry)
    yield from estimate.more()
    for title, lines in (("not known exactly", estimate.unknown), ("assumed", estimate.assumed)):
        if lines:
            yield f"{title}:"
            yield from (f"  {line}" for line in lines)
