"""Find, during the audit, saved tensors of which backward reads only the shape or the signs.

If no other slot saves the tensor, the slot gets its own value: nothing for a shape, one bit per element for signs. If
other slots save a tensor, a slot that needs only its shape releases it, provided that recomputes can find the value of
the other slots.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch.device_timing import Stopwatch
from lowtide._torch.fake_modes import is_fake
from lowtide.planner.address_nodes import SHAPE, SIGNS
from lowtide.profiler.drafts import ValueDraft
from lowtide.profiler.recompute_trials import MIN_BYTES, RecomputeTrials
from lowtide.runtime.partial_saves import find_input_saved_for_shape, packed
from lowtide.runtime.recipes import CannotRecompute
from lowtide.runtime.recompute import Recompute
from lowtide.runtime.saved_values import registered

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.runtime.saved_values import Value

PIECES = 64
"""Number of pieces in which signs are compared with the tensor."""


@dataclass(frozen=True, slots=True)
class PartialRead:
    """Part of a saved tensor that backward needs from one of its slots."""

    draft: ValueDraft
    bits: ValueDraft | None
    """Bits that are held in the tensor's place; None if nothing is held."""
    is_passable: bool
    """True if recomputes that need the tensor can recompute it as an intermediate when nothing holds it."""
    is_on_edge: bool = True
    """True if another slot that holds the tensor lets recomputes that need it find it on an edge of the graph."""


class PartialReads:
    """Trials of saved tensors that may be replaced by the part that backward needs."""

    def __init__(self, recomputes: RecomputeTrials) -> None:
        self._step, self._recomputes, self._meter = recomputes.step, recomputes, recomputes.meter
        self._part_of_slot: dict[int, PartialRead] = {}
        """The part of the saved tensor that is enough, by slot."""

    def try_signs(self, known: Value, tensor: Tensor) -> None:
        """Measure the cost of keeping one bit per element of a tensor that is about to be saved for its signs."""
        drafts = []
        for _ in range(2):  # the first run may pay for new pages
            watch = Stopwatch(self._meter.place)
            watch.start()
            try:
                value = packed(SIGNS, tensor)
            except CannotRecompute:
                return
            packing, maker = watch.stop(), value.maker
            assert isinstance(maker, Recompute)
            if not are_signs_of(maker.make(value), tensor):
                return
            spent = self._meter.of(maker)
            device_ms, host_ms = packing.device + spent.cost_ms, packing.host + spent.host_ms
            drafts.append(replace(spent, recipe=SIGNS, cost_ms=device_ms, host_ms=host_ms))
            n_bytes = maker.constants["bits"].nbytes
        bits = ValueDraft(bytes=n_bytes, node="", state_of=self._step.open_calls[-1].index)
        draft = min(drafts, key=lambda draft: draft.cost_ms)
        is_passable = self._recomputes.is_passable(known, tensor.grad_fn, tensor.output_nr)
        self._part_of_slot[len(self._step.slots)] = PartialRead(draft, bits, is_passable)

    def try_shape(self, call: int, result: Any) -> None:
        """If `call`, which returned `result`, has saved a tensor only for its shape, record that tensor's slot."""
        held, step = find_input_saved_for_shape(result), self._step
        # several slots of the call may have saved the same tensor
        n = None if held is None else step.slot_of.get(held)
        if held is None or n is None or step.slots[n].call != call:
            return
        value, view = step.held[n]
        if value.tensor is not None and value.tensor.nbytes >= MIN_BYTES:
            size = packed(SHAPE, held.get()).get().untyped_storage().nbytes()
            draft = ValueDraft(bytes=size, node=SHAPE, recipe=SHAPE)
            node, output = result.grad_fn.next_functions[0]
            is_passable = view is None and self._recomputes.is_passable(value, node, output)
            is_on_edge = node is not None and registered(node, output) is value
            self._part_of_slot[n] = PartialRead(draft, None, is_passable, is_on_edge)

    def shrink_slots(self) -> None:
        """Make slots hold only the part of a tensor that their readers need, where that saves memory."""
        reads, values, slots = self._part_of_slot, self._step.values, self._step.slots
        saved_by: dict[int, set[int]] = {}
        for n, slot in enumerate(slots):
            saved_by.setdefault(slot.value, set()).add(n)
        lost = []
        for index, its in saved_by.items():
            whole = its - reads.keys()
            moved = {n for n in its & reads.keys() if not whole or (reads[n].bits is None and reads[n].is_on_edge)}
            for n in moved:
                slots[n].value = _add(values, reads[n])
            if moved == its and not all(reads[n].is_passable for n in moved):
                values[index].refuse("of it only the shape or the signs are read")
                lost.append(index)
        _refuse(values, lost, {slot.value for slot in slots})


def _add(values: list[ValueDraft], read: PartialRead) -> int:
    if read.bits is not None:
        read.draft.operands = (len(values),)
        values.append(read.bits)
    values.append(read.draft)
    return len(values) - 1


def _refuse(values: list[ValueDraft], lost: list[int], held: Collection[int]) -> None:
    """Refuse recomputes that read a value in `lost`, directly or through intermediates that no slot holds.

    Values in `lost` are no longer held, and can't be computed as intermediates. `held` has the values that slots hold.
    """
    for index in lost:  # grows while it runs
        for place, draft in enumerate(values):
            if index in draft.operands and draft.recipe is not None:
                draft.refuse("its operands are not held")
                if place not in held:
                    lost.append(place)


def are_signs_of(signs: Tensor, tensor: Tensor) -> bool:
    """Return True if `signs` is 1 wherever `tensor`, which fills its storage, is above 0 or NaN, and 0 elsewhere.

    The tensors are compared in PIECES, because a step may have no room for another tensor of that size. Of fake
    tensors, only the strides are compared.
    """
    if signs.stride() != tensor.stride():
        return False
    if is_fake(tensor):
        return True
    n_elements = -(-tensor.numel() // PIECES)
    pieces = (torch.split(whole.as_strided((whole.numel(),), (1,)), n_elements) for whole in (signs, tensor.detach()))
    return all(torch.equal(sign, (part <= 0).logical_not_().to(part.dtype)) for sign, part in zip(*pieces, strict=True))
