"""What can't be made again after all, because what it is made of is gone when it is saved.

The audit holds every tensor. Under a plan, as in a plain step, a branch of the graph that nobody will ever read is gone
with its result, and so is what it alone had saved.
"""

from __future__ import annotations

import math
from functools import cache

from lowtide.rehearsal.drafts import SlotDraft, ValueDraft
from lowtide.rehearsal.seen import Seen
from lowtide.remat.actions import NUMBERS


def withdraw_gone(values: list[ValueDraft], slots: list[SlotDraft], seen: Seen) -> None:
    """Keep such values. They come after what they need."""
    saved: dict[int, list[int]] = {}
    for n, slot in enumerate(slots):
        if n in seen.packed:
            saved.setdefault(slot.value, []).append(n)

    @cache
    def is_there(index: int, event: int) -> bool:
        """Whether somebody holds a value by then, or it can be made of what somebody holds."""
        if index not in saved:
            return values[index].recipe is None or can_be_made(index, event)
        if any(seen.packed[n] <= event < seen.release.get(n, math.inf) for n in saved[index]):
            return True
        return not values[index].node.endswith(NUMBERS) and can_be_made(index, event)

    @cache
    def can_be_made(index: int, event: int) -> bool:
        return values[index].recipe is not None and all(is_there(need, event) for need in values[index].needs)

    for index in saved:
        if values[index].recipe is not None and not all(can_be_made(index, seen.packed[n]) for n in saved[index]):
            values[index].recipe, values[index].refused = None, "what it is made of is gone when it is saved"
