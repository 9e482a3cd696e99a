"""What is decided about an address holds for every call of the model in a step, and names one node.

Where a model is called again on what it returned, as in a recurrence or a rollout, another node may have made what is
saved at the same address, or none. The one whose tensors are larger is decided about; the others are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from lowtide.planner.address_nodes import names_at
from lowtide.profiler.drafts import OVERWRITTEN, SlotDraft, ValueDraft

OTHER_NODE = "another node made what is saved there in another call of the model"


def settle(values: list[ValueDraft], slots: Collection[SlotDraft]) -> None:
    """Refuse what has another node than most of what is saved at its address, or can't be relied on in another call."""
    lost = {slot.address for slot in slots if values[slot.value].refused == OVERWRITTEN}
    for slot in slots:
        if slot.address in lost:
            values[slot.value].recipe, values[slot.value].refused = None, OVERWRITTEN
    bytes_at: dict[str, Counter[str]] = {}
    values_at: dict[str, set[int]] = {}
    for slot in slots:
        if values[slot.value].recipe is not None:
            bytes_at.setdefault(slot.address, Counter())[values[slot.value].node] += values[slot.value].bytes
            values_at.setdefault(slot.address, set()).add(slot.value)
    for address, count in bytes_at.items():
        [(most, _)] = count.most_common(1)
        for index in values_at[address] if len(count) > 1 else ():
            if values[index].node != most:
                values[index].recipe, values[index].refused = None, OTHER_NODE


def nodes_at(values: list[ValueDraft], slots: Iterable[SlotDraft]) -> dict[str, str]:
    """The node that recomputes what is saved at each address, once they are settled."""
    names = {index: draft.node for index, draft in enumerate(values) if draft.recipe is not None}
    return names_at(((slot.address, slot.value) for slot in slots), names)
