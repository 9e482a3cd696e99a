"""Operands of which autograd knows nothing, as the audit looks at them: what holding one takes, and whether it may be.

A plain step looks at such an operand once, in forward. Who makes something of it again looks a second time: then it
must not have changed in between, and its memory has to be there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.profiler.drafts import ValueDraft
from lowtide.runtime.saved_values import Value
from lowtide.state.bitwise import identical

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.profiler.trace_reader import TraceIndex
    from lowtide.runtime.operand_capture import CaptureSite


class Unrecorded:
    """The operands that were noted in one run of the model."""

    def __init__(self, static: frozenset[int]) -> None:
        """`static` are the addresses of memory that is there anyway."""
        self._static = static
        self._count = 0
        self._found: dict[Value, tuple[CaptureSite, Tensor]] = {}
        """Where each was noted, and a copy."""
        self._number: dict[Value, int] = {}
        """Which of those in the step each is."""

    def take(self, place: CaptureSite, operand: Tensor) -> Value:
        """A value that holds an operand."""
        value = Value(operand.detach())
        self._found[value], self._number[value] = (place, operand.detach().clone()), self._count
        self._count += 1
        return value

    def draft(self, value: Value) -> ValueDraft | None:
        """What holding a value takes; None for what is none of these operands, or in memory that is there anyway."""
        if value not in self._found or value.tensor is None:
            return None
        storage = value.tensor.untyped_storage()
        if storage.data_ptr() in self._static:
            return None
        return ValueDraft(bytes=storage.nbytes(), node="", noted=self._number[value])

    def overwritten(self) -> set[CaptureSite]:
        """Where those were noted that are not any longer what they were, whether autograd noticed that or not."""
        return {
            place
            for value, (place, copy) in self._found.items()
            if value.tensor is None or value.tensor._version != value.version or not identical(value.tensor, copy)
        }

    def clear(self) -> None:
        """Hold none of them any longer."""
        self._found.clear()
        self._number.clear()


def blocks_of(values: list[ValueDraft], seen: TraceIndex) -> dict[int, int]:
    """For each value that is such an operand the block that it was in in a trace.

    What was there before the step is there anyway: nobody needs to hold it. What the trace has not seen can't be held.
    """
    found = {}
    for index, draft in enumerate(values):
        if draft.noted is None:
            continue
        is_seen = draft.noted < len(seen.noted)
        block = seen.noted[draft.noted][1] if is_seen else None
        if block is not None:
            found[index] = block
            continue
        for other in values:
            if index in other.operands:
                other.operands = tuple(need for need in other.operands if need != index)
                if not is_seen:
                    other.recipe, other.refused = None, "what it is made of was not seen again"
    return found
