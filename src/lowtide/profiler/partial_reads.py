"""Find saved tensors of which backward reads only the shape or the signs, during the audit.

If no other slot saves the tensor, the slot gets its own value: nothing for a shape, one bit per element for signs.
An input saved for its shape is released also if other slots save it and recomputes can find their value: those hold it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lowtide.profiler.drafts import SlotDraft, ValueDraft

if TYPE_CHECKING:
    from torch import Tensor

PIECES = 64
"""Number of pieces in which signs are compared with the tensor."""


@dataclass(frozen=True, slots=True)
class Enough:
    """Part of a saved tensor that backward needs from one of its slots."""

    draft: ValueDraft
    bits: ValueDraft | None
    """Bits that are held in the tensor's place; None if nothing is held."""
    is_passable: bool
    """True if recomputes that need the tensor can recompute it as an intermediate when nothing holds it."""
    is_on_edge: bool = True
    """True if another slot that holds the tensor lets recomputes that need it find it on an edge of the graph."""


def settle(enough: dict[int, Enough], values: list[ValueDraft], slots: list[SlotDraft]) -> None:
    """Make slots hold only the part of a tensor that their readers need, where that saves memory. `enough` has the part
    by slot.
    """
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
    """Refuse recomputes that need a value in `lost`, which is neither held nor recomputable as an intermediate."""
    for index in lost:  # grows while it runs
        for place, draft in enumerate(values):
            if index in draft.operands and draft.recipe is not None:
                draft.recipe, draft.refused = None, "its operands are not held"
                if place not in held:
                    lost.append(place)


def are_signs_of(signs: Tensor, tensor: Tensor) -> bool:
    """Return True if `signs` is 1 wherever `tensor`, which fills its storage, is above 0 or NaN, and 0 elsewhere.

    The tensors are compared in PIECES, because a step may have no room for another tensor of that size.
    """
    if signs.stride() != tensor.stride():
        return False
    n_elements = -(-tensor.numel() // PIECES)
    pieces = (torch.split(whole.as_strided((whole.numel(),), (1,)), n_elements) for whole in (signs, tensor.detach()))
    return all(torch.equal(sign, (part <= 0).logical_not_().to(part.dtype)) for sign, part in zip(*pieces, strict=True))
