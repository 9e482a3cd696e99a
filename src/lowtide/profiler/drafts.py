"""Drafts that a rehearsal fills in while it runs; `assemble.py` turns them into the frozen records."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lowtide.planner.address_nodes import node_name
from lowtide.runtime.batch_tensors import put_in_words
from lowtide.runtime.saved_values import SEED_BYTES

if TYPE_CHECKING:
    from torch import Tensor


OVERWRITTEN = "it is computed from a tensor that is overwritten before backward"


@dataclass(slots=True, kw_only=True)
class ValueDraft:
    """Draft of a value: one output of one autograd node."""

    bytes: int
    node: str
    recipe: str | None = None
    refused: str | None = None
    operands: tuple[int, ...] = ()
    overwrites: int | None = None
    """Operand that the recompute overwrites with the result if nothing else holds it."""
    own_strides: bool = False
    """True if the strides are known only where the value is saved, not where it is an intermediate."""
    cost_ms: float = 0.0
    host_ms: float = 0.0
    flops: int = 0
    transient_bytes: int = 0
    spent: int | None = None
    """Number of the measured run of its recipe, by which marks in the recording refer to the run."""
    other_runs: tuple[int, ...] = ()
    """Numbers of the runs of other exact implementations. The most memory of all runs counts, because the
    implementation is chosen by measured time.
    """
    state_of: int | None = None
    """For state without node or slot, such as random numbers or the bits of a mask: the call from whose beginning it is
    held.
    """
    captured_number: int | None = None
    """For an operand that autograd does not record: its number among the operands captured in the step."""

    @property
    def is_seed(self) -> bool:
        """True for a saved tensor of a few bytes without a node, such as a kernel's seed: replays don't restore it."""
        is_saved = self.state_of is None and self.captured_number is None
        return not self.node and is_saved and 0 < self.bytes <= SEED_BYTES

    def refuse(self, why: str) -> None:
        """Refuse to recompute the value, for the reason `why`: plans keep or replay it."""
        self.recipe, self.refused = None, why


@dataclass(slots=True, kw_only=True)
class SlotDraft:
    """Draft of a slot: one tensor saved for backward, or one tensor argument of a call."""

    address: str
    label: str
    value: int
    call: int
    n_elements: int = 0
    """Number of elements of a saved tensor."""


@dataclass(slots=True, kw_only=True)
class CallDraft:
    """Draft of one call of one module."""

    id: str
    cls: str
    parent: int | None
    inputs: list[SlotDraft] = field(default_factory=list)
    first_slot: int = 0
    stop_slot: int = 0
    cost_ms: float = 0.0
    host_ms: float = 0.0
    flops: int = 0
    refused: str | None = None
    result_value: int | None = None
    advance_ms: float = 0.0
    advance_host_ms: float = 0.0
    advance_flops: int = 0
    state: int | None = None
    """Index of the value that represents the state that a replay holds in addition to its arguments."""


@dataclass(slots=True)
class StepDrafts:
    """Drafts of one step, which refer to each other by index."""

    values: list[ValueDraft] = field(default_factory=list)
    slots: list[SlotDraft] = field(default_factory=list)
    calls: list[CallDraft] = field(default_factory=list)

    def list_slots(self, call: CallDraft) -> list[SlotDraft]:
        """Return the slots of the tensors that a call, and the calls inside it, have saved."""
        return self.slots[call.first_slot : call.stop_slot]

    def copy(self) -> StepDrafts:
        """Return a deep copy, without the live objects of a subclass."""
        return StepDrafts(*copy.deepcopy((self.values, self.slots, self.calls)))

    @property
    def saved_bytes(self) -> int:
        """Bytes of all tensors saved for backward."""
        return self.sum_bytes_in(range(len(self.slots)))

    def sum_bytes_in(self, slots: Iterable[int]) -> int:
        """Return the bytes of the values in the slots with these numbers; each value counts once."""
        return sum(self.values[index].bytes for index in {self.slots[n].value for n in slots})


def describe(tensor: Tensor, node: str) -> str:
    """Describe a tensor by node, shape and dtype: `GeluBackward0 [8, 1024, 3072] float32`."""
    return f"{node_name(node) or 'leaf'} {put_in_words([tensor])}"
