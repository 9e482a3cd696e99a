"""Choose one autograd node for each address (module call and ordinal of a saved tensor), because a decision about an
address holds for every call of the model in a step.

Where a model is called again on its own output (a recurrence, a rollout), the tensors saved at one address may come
from different nodes, or from none. A plan decides about the node with the larger tensors; other tensors are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from lowtide.planner.address_nodes import names_at
from lowtide.profiler.drafts import OVERWRITTEN, SlotDraft, ValueDraft

OTHER_NODE = "in another call of the model, the tensor saved there is of another node"


def refuse_other_nodes(values: list[ValueDraft], slots: Collection[SlotDraft]) -> None:
    """At each address, refuse recomputes of values from any node but the main one, whose values have the most bytes
    there.

    If a tensor at an address is computed from overwritten memory in some call, all recomputes there are refused.
    """
    lost = {slot.address for slot in slots if values[slot.value].refused == OVERWRITTEN}
    for slot in slots:
        if slot.address in lost:
            values[slot.value].refuse(OVERWRITTEN)
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
                values[index].refuse(OTHER_NODE)


def map_addresses_to_nodes(values: list[ValueDraft], slots: Iterable[SlotDraft]) -> dict[str, str]:
    """Return, for each address, the name of the autograd node whose recipe recomputes the tensors saved there."""
    names = {index: draft.node for index, draft in enumerate(values) if draft.recipe is not None}
    return names_at(((slot.address, slot.value) for slot in slots), names)
