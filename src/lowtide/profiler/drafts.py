"""What a rehearsal collects while it runs; `assemble.py` makes the frozen records of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lowtide.planner.address_nodes import node_name
from lowtide.runtime.saved_values import SEED_BYTES

if TYPE_CHECKING:
    from torch import Tensor


OVERWRITTEN = "it is made of a tensor that is overwritten before backward"


@dataclass(slots=True, kw_only=True)
class ValueDraft:
    """One output of one autograd node."""

    bytes: int
    node: str
    recipe: str | None = None
    refused: str | None = None
    operands: tuple[int, ...] = ()
    overwrites: int | None = None
    """The one of them that is written over if nobody holds it."""
    own_strides: bool = False
    """Whether its strides are known only where it is saved, and not on the way to something else."""
    cost_ms: float = 0.0
    flops: int = 0
    transient_bytes: int = 0
    spent: int | None = None
    """Which run of a recipe was measured for it."""
    state_of: int | None = None
    """The call from which on it is held, for what no node made and no slot holds: random numbers, bits of masks."""
    noted: int | None = None
    """For an operand that autograd does not record: which of those that were noted in the step."""

    @property
    def is_seed(self) -> bool:
        """Whether replays leave it alone."""
        is_saved = self.state_of is None and self.noted is None
        return not self.node and is_saved and 0 < self.bytes <= SEED_BYTES


@dataclass(slots=True, kw_only=True)
class SlotDraft:
    """One tensor saved for backward, or one tensor argument of a call."""

    address: str
    label: str
    value: int
    call: int


@dataclass(slots=True, kw_only=True)
class CallDraft:
    """One call of one module."""

    id: str
    cls: str
    parent: int | None
    inputs: list[SlotDraft] = field(default_factory=list)
    first_slot: int = 0
    stop_slot: int = 0
    cost_ms: float = 0.0
    flops: int = 0
    refused: str | None = None
    result_value: int | None = None
    advance_ms: float = 0.0
    advance_flops: int = 0
    state: int | None = None
    """The value that stands for what a replay holds besides its arguments."""


def describe(tensor: Tensor, node: str) -> str:
    """`GeluBackward0 [8, 1024, 3072] float32`."""
    return f"{node_name(node) or 'leaf'} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
