"""The audit of operands that autograd does not record: the memory needed to hold each, and a check that it is
unchanged.

A plain step reads such an operand once, in forward. A recompute reads it a second time: the operand must not have
changed in between, and its memory must be held.
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
    """Operands that were captured in one run of the model."""

    def __init__(self, static: frozenset[int]) -> None:
        """Start without operands; `static` has the addresses of memory that every plan holds."""
        self._static = static
        self._count = 0
        self._operands: dict[Value, tuple[CaptureSite, Tensor]] = {}
        """Site and copy of each captured operand."""
        self._number: dict[Value, int] = {}
        """Number of each operand within the step."""

    def take(self, place: CaptureSite, operand: Tensor) -> Value:
        """Record an operand captured at `place`; return a value that holds it."""
        value = Value(operand.detach())
        self._operands[value], self._number[value] = (place, operand.detach().clone()), self._count
        self._count += 1
        return value

    def draft(self, value: Value) -> ValueDraft | None:
        """Return a draft for the memory of a captured operand, given its value; None if `value` is no captured operand,
        or if every plan holds its memory.
        """
        if value not in self._operands or value.tensor is None:
            return None
        storage = value.tensor.untyped_storage()
        if storage.data_ptr() in self._static:
            return None
        return ValueDraft(bytes=storage.nbytes(), node="", captured_number=self._number[value])

    def overwritten(self) -> set[CaptureSite]:
        """Return the sites of operands that have changed since they were captured, whether or not autograd counted a
        new version.
        """
        return {
            place
            for value, (place, copy) in self._operands.items()
            if value.tensor is None or value.tensor._version != value.version or not identical(value.tensor, copy)
        }

    def clear(self) -> None:
        """Release all operands."""
        self._operands.clear()
        self._number.clear()


def map_operand_blocks(values: list[ValueDraft], trace: TraceIndex) -> dict[int, int]:
    """Map the index of each value that is an unrecorded operand to the operand's memory block in the trace.

    Memory allocated before the step stays allocated, and is not mapped. Operands missing from the trace can't be held:
    recomputes that need them are refused.
    """
    blocks = {}
    for index, draft in enumerate(values):
        if draft.captured_number is None:
            continue
        is_seen = draft.captured_number < len(trace.captured)
        block = trace.captured[draft.captured_number][1] if is_seen else None
        if block is not None:
            blocks[index] = block
            continue
        for other in values:
            if index in other.operands:
                other.operands = tuple(need for need in other.operands if need != index)
                if not is_seen:
                    other.refuse("its operands were not found again")
    return blocks
