"""Rehearsals of models that `fully_shard` has sharded (`runtime/fsdp_scopes.py`).

A unit gathers its parameters before its forward, frees them afterwards, and gathers them again for its backward. While
a unit is audited it keeps the gathered parameters, because its saved tensors are recomputed during its forward. Plans
decide only about values of a unit that are also read inside the unit.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lowtide._torch.distributed import count_collectives
from lowtide._torch.fsdp import ShardGroup, find_shard_groups, has_default_resharding
from lowtide._torch.nodes import next_sequence_number, sequence_number
from lowtide.runtime.fsdp_scopes import find_units
from lowtide.runtime.recompute_builder import Builder, ParameterOwners

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.autograd.graph import Node

    from lowtide.profiler.drafts import StepDrafts, ValueDraft
    from lowtide.runtime.saved_values import Value

ELSEWHERE = "it is read outside the sharded module that computed it, whose parameters are no longer gathered then"
TAKES_ELSEWHERE = "it reads a tensor of another sharded module, whose parameters are no longer gathered then"
NEVER = "the parameters of the sharded module around it are not gathered for backward"
AROUND_UNITS = "the sharded modules in it are run again instead, one at a time"


class FsdpUnits:
    """Units (sharded modules) of an audited model that free their gathered parameters between forward and backward."""

    def __init__(self, model: nn.Module) -> None:
        all_units = find_units(model.modules())
        inside = {below for unit in all_units for below in unit.modules() if below is not unit}
        resharding = (unit for unit in all_units if unit in inside or not has_default_resharding(unit))
        self.resharded = frozenset(
            u for u in resharding if any(group.reshards_after_forward for group in find_shard_groups(u))
        )
        self.not_gathered = frozenset(
            u for u in self.resharded if not all(g.is_gathered_in_backward for g in find_shard_groups(u))
        )
        """Units of `resharded` that are not gathered for their backward."""
        modules = model.modules() if self.resharded else ()
        self.around = frozenset(m for m in modules if any(b in self.resharded for b in m.modules() if b is not m))
        """Modules that have units inside."""
        self._gathering = [_Counted(group) for unit in all_units for group in find_shard_groups(unit)]
        self._held: list[nn.Module] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count the collectives of units inside this `with` block, and keep each unit gathered from `hold` to
        `reshard`.
        """
        with ExitStack() as stack:
            for counted in self._gathering:
                stack.enter_context(counted)
            try:
                yield
            finally:
                while self._held:
                    self._reshard(self._held.pop())

    @property
    def n_sent(self) -> int:
        """Number of collective operations that gathered parameters."""
        return sum(counted.n for counted in self._gathering)

    def hold(self, module: nn.Module) -> None:
        """Keep the parameters of `module` gathered after its forward, if it is a unit whose call begins."""
        if module in self.resharded:
            self._held.append(module)
            for group in find_shard_groups(module):
                group.keep_gathered()

    def reshard(self, module: nn.Module) -> None:
        """Free the gathered parameters of `module`, if it is a unit, because its call and all trials are over."""
        if module in self.resharded:
            self._held.remove(module)
            self._reshard(module)

    def _reshard(self, module: nn.Module) -> None:
        for group in find_shard_groups(module):
            group.reshard()


class _Counted:
    """Gather function of a group's parameters that counts its collective operations."""

    def __init__(self, group: ShardGroup) -> None:
        self._group = group
        self.n = 0

    def __enter__(self) -> None:
        self._gather, scatter = self._group.senders
        self._group.senders = self, scatter

    def __exit__(self, *_: object) -> None:
        self._group.senders = self._gather, self._group.senders[1]

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        return self._gather.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = count_collectives()
        try:
            return self._gather(*args, **kwargs)
        finally:
            self.n += count_collectives() - before


class FsdpScopes:
    """Record of the calls of each unit (sharded module), and of the autograd node that computed each value."""

    def __init__(self) -> None:
        self.allocated_at: dict[int, int] = {}
        """Sequence number of the autograd node that computed each value."""
        self.spans: dict[int, tuple[int, int]] = {}
        """First sequence number of a node inside each call of a unit, and the first number after the call."""
        self.not_gathered: set[int] = set()
        """Calls of units that are not gathered for their backward."""

    def begin(self, call: int, *, is_gathered: bool = True) -> None:
        """Record that the call with index `call`, of a unit, begins.

        Unless `is_gathered`, the unit's parameters are not gathered for its backward.
        """
        self.spans[call] = next_sequence_number(), sys.maxsize
        if not is_gathered:
            self.not_gathered.add(call)

    def end(self, call: int) -> None:
        """Record that the call with index `call`, of a unit, has ended."""
        self.spans[call] = self.spans[call][0], next_sequence_number()

    def of(self, index: int) -> int | None:
        """Return the innermost call of a unit inside which the value at `index` was computed, or None."""
        number = self.allocated_at.get(index)
        return None if number is None else self.around(number)

    def around(self, number: int) -> int | None:
        """Return the innermost call of a unit in which the node with sequence number `number` was created, or None."""
        enclosing = [(first, call) for call, (first, stop) in self.spans.items() if first <= number < stop]
        return max(enclosing)[1] if enclosing else None


class ValueNumbering(Builder):
    """Builder of recomputes that records, for each built value, the sequence number of the value's autograd node."""

    __slots__ = ("numbers",)

    def __init__(self, owners: ParameterOwners) -> None:
        super().__init__(owners)
        self.numbers: weakref.WeakKeyDictionary[Value, int] = weakref.WeakKeyDictionary()

    def recompute(self, node: Node, output: int, like: Tensor | None = None, depth: int = 0) -> Value:
        value = super().recompute(node, output, like, depth)
        self.numbers[value] = sequence_number(node)
        return value


def refuse_ungathered(step: StepDrafts, homes: FsdpScopes) -> None:
    """Refuse recomputes and replays that would run while parameters of their unit (sharded module) are not gathered."""
    values, slots, calls = step.values, step.slots, step.calls
    if not homes.spans:
        return
    around: list[frozenset[int]] = []
    for index, call in enumerate(calls):  # parents come before their children
        above = frozenset[int]() if call.parent is None else around[call.parent]
        around.append(above | {index} if index in homes.spans else above)
    readers: dict[int, set[frozenset[int]]] = {}
    for slot in (*slots, *(given for call in calls for given in call.inputs)):
        readers.setdefault(slot.value, set()).add(around[slot.call])
    home = {index: at for index in range(len(values)) if (at := homes.of(index)) is not None}
    held = {index for index, at in home.items() if any(at not in there for there in readers.get(index, ()))}
    for index, at in home.items():
        if at in homes.not_gathered:
            values[index].refuse(NEVER)
        elif index in held:
            values[index].refuse(ELSEWHERE)
    for call, there in zip(calls, around, strict=True):
        if there & homes.not_gathered and call.refused is None:
            call.refused = NEVER
    for index, value in enumerate(values):
        if value.recipe is not None and any(
            home[need] not in there for need in _upstream(index, values, home, held) for there in readers.get(index, ())
        ):
            value.refuse(TAKES_ELSEWHERE)


def _upstream(index: int, values: Sequence[ValueDraft], home: Collection[int], held: Collection[int]) -> set[int]:
    """Return the values of `home` that a recompute of the value `index` computes.

    These are that value, and operands upstream of it that are not in `held`. `home` has the values that are computed
    inside units.
    """
    reached: set[int] = set()
    pending = [index]
    while pending:
        at = pending.pop()
        if at not in reached and at not in held:
            reached.add(at)
            pending += values[at].operands
    return reached & set(home)
