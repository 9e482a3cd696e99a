"""The step under audit: its drafts, the live values and handles that they describe, and the calls in progress."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide.profiler.drafts import CallDraft, SlotDraft, StepDrafts, ValueDraft

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from lowtide.runtime.operand_capture import CaptureSite
    from lowtide.runtime.replay import ReplayFrame
    from lowtide.runtime.saved_fields import Geometry
    from lowtide.runtime.saved_values import Handle, Value
    from lowtide.state.side_effects import CodeState

RAISED = "it raised an exception"
"""Reason not to replay a call. Also stands for the result of a call until the call returns."""


@dataclass(slots=True, kw_only=True)
class OpenCall:
    """A module call in progress."""

    index: int
    draft: CallDraft
    n_sent: int
    """Number of collective operations before the call."""
    frame: ReplayFrame | None = None
    """Frame of the call if it may be replayed."""
    own_state: CodeState | None = None
    """State that the call could change, as it was when the call began."""
    is_freed: bool = False
    """True for a block whose saved tensors are freed when it has been audited."""
    returned: Any = RAISED


class AuditedStep(StepDrafts):
    """Drafts of a step, as far as it has run, with the live values and handles that they describe."""

    def __init__(self) -> None:
        super().__init__()
        self.open_calls: list[OpenCall] = []
        self.index: weakref.WeakKeyDictionary[Value, int] = weakref.WeakKeyDictionary()
        """Index of each value's draft."""
        self.saved: set[int] = set()
        """Indices of values that a slot has saved so far. Other values are arguments of calls, which only a replay
        would hold.
        """
        self.held: dict[int, tuple[Value, Geometry | None]] = {}
        """Value in each slot, and the view of it that was saved."""
        self.slot_of: weakref.WeakKeyDictionary[Handle, int] = weakref.WeakKeyDictionary()
        self.passed_through: list[Value] = []
        """Values without a slot, kept alive because recomputes of other values may pass through them."""

    def draft(self, value: Value) -> ValueDraft:
        """Return the draft that describes `value`."""
        return self.values[self.index[value]]

    def add(self, value: Value, draft: ValueDraft) -> int:
        """Add `draft`, the draft that describes `value`, and return its index."""
        self.index[value] = len(self.values)
        self.values.append(draft)
        return len(self.values) - 1

    def add_state(self, size: int) -> int:
        """Add a draft for `size` bytes of state, such as RNG state, and return its index.

        A recompute or replay holds the state from the beginning of the innermost call in progress.
        """
        self.values.append(ValueDraft(bytes=size, node="", state_of=self.open_calls[-1].index))
        return len(self.values) - 1

    def add_slot(self, slot: SlotDraft, handle: Handle, value: Value, view: Geometry | None) -> None:
        """Add the slot of a saved tensor to the drafts: the tensor is the view `view` of `value`, and `handle` refers
        to it.
        """
        self.held[len(self.slots)], self.slot_of[handle] = (value, view), len(self.slots)
        self.saved.add(slot.value)
        self.slots.append(slot)

    def get_slot_tensor(self, n: int) -> Tensor:
        """Return the tensor of slot `n` with the geometry it was saved with."""
        value, view = self.held[n]
        return value.get() if view is None else value.get().as_strided(*view)

    def is_saved(self, value: Value) -> bool:
        """Return True if a slot has saved the value."""
        return self.index.get(value) in self.saved

    def only_given(self, index: int) -> bool:
        """Return True if only an argument of a call holds the value at `index`: no slot has saved it, and it can't be
        recomputed.

        A value whose recompute needs such an operand counts, too.
        """
        draft = self.values[index]
        if index in self.saved or draft.captured_number is not None:
            return False
        return draft.recipe is None or draft.own_strides or any(map(self.only_given, draft.operands))

    def is_captured_elsewhere(self, sites: Iterable[CaptureSite]) -> bool:
        """Return True if an operand was captured at one of `sites` outside the innermost call in progress."""
        return any(site.call != self.open_calls[-1].draft.id for site in sites)

    @property
    def is_in_freed_block(self) -> bool:
        """True if a call in progress is of a block whose saved tensors are freed when it has been audited."""
        return any(call.is_freed for call in self.open_calls)

    def is_made_in_freed_block(self, value: Value) -> bool:
        """Return True if the value was computed inside a block in progress whose saved tensors are freed when it has
        been audited. Arguments of such a block don't count.
        """
        index, blocks = self.index[value], [call.draft for call in self.open_calls if call.is_freed]
        return bool(blocks) and all(slot.value != index for block in blocks for slot in block.inputs)

    def drop_unreferenced(self) -> None:
        """Release the values of slots whose handles have been freed with their autograd graph."""
        self.held = {n: self.held[n] for n in self.slot_of.values() if n in self.held}

    def release(self) -> None:
        """Release all tensors."""
        self.held.clear()
        self.passed_through.clear()
