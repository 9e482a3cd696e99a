"""Which saved tensors are read for no more than their shape or their signs, found out in the audit.

Where nobody else saves the tensor, a value of its own stands in its place: nothing for a shape, a bit for each element
for signs. An input that is saved for its shape is let go of in any case where who else saves it can be found: they
hold it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lowtide.profiler.drafts import SlotDraft, ValueDraft

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Enough:
    """What is enough of a tensor for a slot of it."""

    draft: ValueDraft
    bits: ValueDraft | None
    """What is held for that; None for nothing."""
    is_passable: bool
    """Whether what is made of the tensor can make it on the way, if nobody holds it."""
    is_on_edge: bool = True
    """Whether what is made of the tensor finds it without this slot, if somebody else holds it."""


def settle(enough: dict[int, Enough], values: list[ValueDraft], slots: list[SlotDraft]) -> None:
    """Point slots to what is enough for them, where that pays. `enough` is by slot."""
    saved_by: dict[int, set[int]] = {}
    for n, slot in enumerate(slots):
        saved_by.setdefault(slot.value, set()).add(n)
    lost = []
    for index, its in saved_by.items():
        whole = its - enough.keys()
        moved = {n for n in its & enough.keys() if not whole or (enough[n].bits is None and enough[n].is_on_edge)}
        for n in moved:
            slots[n].value = _add(values, enough[n])
        if moved == its and not all(enough[n].is_passable for n in moved):
            values[index].recipe, values[index].refused = None, "of it only the shape or the signs are read"
            lost.append(index)
    _refuse(values, lost, {slot.value for slot in slots})


def _add(values: list[ValueDraft], enough: Enough) -> int:
    if enough.bits is not None:
        enough.draft.operands = (len(values),)
        values.append(enough.bits)
    values.append(enough.draft)
    return len(values) - 1


def _refuse(values: list[ValueDraft], lost: list[int], held: Collection[int]) -> None:
    """Nothing is made any longer of values that nobody holds and that can't be made on the way: those in `lost`."""
    for index in lost:  # grows while it runs
        for place, draft in enumerate(values):
            if index in draft.operands and draft.recipe is not None:
                draft.recipe, draft.refused = None, "what it is made of is not held"
                if place not in held:
                    lost.append(place)


def are_signs_of(signs: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor is 1 where the other is above 0 or not a number, and 0 elsewhere."""
    return signs.stride() == tensor.stride() and torch.equal(signs, (tensor <= 0).logical_not().to(tensor.dtype))
