"""Reject recomputes whose operands have already been freed when the tensor is saved.

The audit holds every tensor. Under a plan, as in a plain step, a branch of the graph that backward never reads is freed
with its result, together with the tensors that only this branch had saved.
"""

from __future__ import annotations

import math
from functools import cache

from lowtide.planner.address_nodes import NOTED
from lowtide.profiler.drafts import SlotDraft, ValueDraft
from lowtide.profiler.trace_reader import TraceIndex


def reject_unavailable(values: list[ValueDraft], slots: list[SlotDraft], trace: TraceIndex) -> None:
    """Refuse recomputes of values whose operands have been freed when the value is saved.

    In `values`, operands precede the values computed from them.
    """
    saved: dict[int, list[int]] = {}
    for n, slot in enumerate(slots):
        if n in trace.packed:
            saved.setdefault(slot.value, []).append(n)

    claims = _map_operands_to_slots(values, saved)

    @cache
    def is_there(index: int, event: int) -> bool:
        """Return True if the value is held at `event`, or can be recomputed from held values."""
        if values[index].captured_number is not None:
            earlier = [n for n in claims.get(index, ()) if trace.packed[n] < event]
            return not earlier or any(event < trace.release.get(n, math.inf) for n in earlier)
        if index not in saved:
            return values[index].recipe is None or can_be_made(index, event)
        if any(trace.packed[n] <= event < trace.release.get(n, math.inf) for n in saved[index]):
            return True
        return NOTED not in values[index].node and can_be_made(index, event)

    @cache
    def can_be_made(index: int, event: int) -> bool:
        return values[index].recipe is not None and all(is_there(need, event) for need in values[index].operands)

    for index in saved:
        if values[index].recipe is not None and not all(can_be_made(index, trace.packed[n]) for n in saved[index]):
            values[index].refuse("its operands are freed before it is saved")


def _map_operands_to_slots(values: list[ValueDraft], saved: dict[int, list[int]]) -> dict[int, set[int]]:
    """Map each captured operand (one that autograd does not record) to the slots whose recomputes read it.

    The first slot that is packed captures the operand; later slots find it only while an earlier one holds it. `saved`
    has the slots of each saved value.
    """
    claims: dict[int, set[int]] = {}
    for index, slots in saved.items():
        pending = [*values[index].operands]
        for need in pending:  # grows while it runs
            if values[need].captured_number is not None:
                claims.setdefault(need, set()).update(slots)
            elif need not in saved:
                pending += values[need].operands
    return claims
