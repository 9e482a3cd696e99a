"""What was there when a step began, beside what belongs to it: outputs of the step before, in a variable of a loop.

When the loop binds the variable anew, they go, and the level of the recording sinks below what the step itself takes.
Without them the peak would be too low by as much.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lowtide.memory.events import Free

if TYPE_CHECKING:
    from lowtide.memory.events import Recorder
    from lowtide.planner.records import Static


def with_left(static: Static, addresses: frozenset[int], recorder: Recorder) -> Static:
    """`static` of a step that was recorded, with what went in it of what is not at `addresses`: those of `static`."""
    entry = recorder.entry_addresses
    freed = (event for event in recorder.stream if type(event) is Free and event.block in entry)
    return replace(static, left=sum(event.bytes for event in freed if entry[event.block] not in addresses))
