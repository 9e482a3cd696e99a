"""Recompute half of the audit: keep every tensor that a step saves, and recompute it once if it has a recipe.

Each result is compared with the original tensor bit by bit; recipes that differ on this model and device are not used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide._torch.device_timing import Stopwatch
from lowtide._torch.distributed import is_wrapping
from lowtide._torch.nodes import sequence_number
from lowtide._torch.tensors import parts_of
from lowtide.planner.address_nodes import INDICES, MASK, NOTED, SHAPE, SIGNS, with_captured_operands
from lowtide.profiler.backward_timings import BackwardTimings
from lowtide.profiler.drafts import OVERWRITTEN, SlotDraft, ValueDraft, describe
from lowtide.profiler.fsdp_units import FsdpScopes
from lowtide.profiler.implementations import Trial, Trials, using
from lowtide.profiler.measure_call import SHORT_MS, Flops, Meter
from lowtide.profiler.operand_changes import OperandChanges
from lowtide.profiler.partial_reads import Enough, are_signs_of
from lowtide.profiler.released_tensors import FreedValues
from lowtide.runtime.fingerprint import place_of
from lowtide.runtime.forward_pass import CallScope, ForwardPass
from lowtide.runtime.partial_saves import packed, saved_for_shape, saves_signs
from lowtide.runtime.recipes import IMPLEMENTATIONS, CannotRecompute
from lowtide.runtime.recompute import Recompute, certain
from lowtide.runtime.recompute_builder import Builder, ParameterOwners
from lowtide.runtime.replay import ReplayFrame
from lowtide.runtime.saved_fields import Geometry
from lowtide.runtime.saved_tensor_packer import SavedTensorPacker
from lowtide.runtime.saved_values import Handle, Value, register, registered, value_without_grad_fn
from lowtide.runtime.view_geometry import producer
from lowtide.state.bitwise import identical
from lowtide.state.step_outcome import is_out_of_memory

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node

    from lowtide.runtime.operand_capture import CaptureSite

MIN_BYTES = 4096
"""Smallest saved tensor that may be recomputed; smaller ones are always kept."""

DISTRIBUTED = "it is a distributed tensor, and operators on it may send to other processes"
NOTED_ELSEWHERE = "it takes what an operator was given in another call than the one that saves it"


class RecomputeAudit(SavedTensorPacker):
    """The decision to keep every saved tensor, after a trial of its recipe."""

    captures_all = True

    def __init__(
        self, model: nn.Module, static: frozenset[int], mark: Callable[[str, object], None], *, frugal: bool
    ) -> None:
        super().__init__(model)
        self.model = model
        self.values: list[ValueDraft] = []
        self.slots: list[SlotDraft] = []
        self.elements: list[int] = []
        """Number of elements of the tensor in each slot."""
        self.streams: set[int] = set()
        """CUDA streams in which tensors were saved."""
        self._static = static
        self._frugal = frugal
        self._flops = Flops()
        self._place = place_of(model)
        self._meter = Meter(mark, self._flops, self._place)
        self._index: weakref.WeakKeyDictionary[Value, int] = weakref.WeakKeyDictionary()
        self._saved: set[int] = set()
        """Indices of values that a slot has saved so far. Others are arguments of calls, which only a replay would
        hold.
        """
        self._open: list[tuple[int, ReplayFrame | None]] = []
        """Calls in progress, with the frames of those that may be replayed."""
        self._handles: dict[int, tuple[Value, Geometry | None]] = {}
        self._slot_of: weakref.WeakKeyDictionary[Handle, int] = weakref.WeakKeyDictionary()
        self._passed_through: list[Value] = []
        self.operand_changes = OperandChanges(static)
        self.timings = BackwardTimings(self.values, self._meter)
        self.enough: dict[int, Enough] = {}
        """Part of the tensor that backward needs from a slot, by slot."""
        self.homes = FsdpScopes()
        self.relied_on.takes_values = False
        self.freed_values = FreedValues(self._index, self._saved, self.values)
        self.builder = self._numbering = ValueNumbering(self.builder.owners)
        self._trials = Trials()
        self.implementations: dict[str, str] = {}
        """Implementations of recipes by kind of node, chosen once the step is over."""

    def free_all(self) -> None:
        """Release all tensors when backward begins or the step is over."""
        self.withdraw_overwritten()
        if self._handles:
            self.timings.drop_unread(self._index, self._saved)
        self._handles.clear()
        self._passed_through.clear()
        self._meter.forget()

    def copied(self, tensor: Tensor, who: str) -> None:
        """Do nothing: no plan will read the tensor again."""

    def pack(self, now: ForwardPass, tensor: Tensor) -> Handle:
        scope = now.scope
        assert scope is not None
        if tensor.is_cuda:
            self.streams.add(torch.cuda.current_stream(tensor.device).stream_id)
        value, view = self.known(tensor)
        index = self._index[value]
        if not self.values[index].node and self.values[index].bytes:
            self.try_packing(value, tensor)
        if view is None and saves_signs(tensor):
            self.try_signs(value, tensor)
        if index not in self._saved and noted_elsewhere(self.operand_changes.sites.get(index, set()), scope):
            self.values[index].recipe, self.values[index].refused = None, NOTED_ELSEWHERE
        label = f"{scope.path or type(self.model).__name__}: {describe(tensor, self.values[index].node)}"
        slot = SlotDraft(address=f"{scope.id}:{scope.ordinal}", label=label, value=index, call=self._open[-1][0])
        handle = Handle(value, view)
        self._handles[len(self.slots)], self._slot_of[handle] = (value, view), len(self.slots)
        self._saved.add(index)
        self.slots.append(slot)
        self.elements.append(tensor.numel())
        scope.ordinal += 1
        return handle

    def known(self, tensor: Tensor) -> tuple[Value, Geometry | None]:
        """Return the kept value of a tensor, which is audited when it is first seen."""
        base, node, output, view = producer(tensor)
        if node is None:
            value = value_without_grad_fn(base)
            self.add(value, base, "")
            return value, view
        there = registered(node, output)
        if (
            there is not None
            and there in self._index
            and (there in self.freed_values or not isinstance(there.maker, Recompute))
        ):
            if there in self.freed_values and self._index[there] not in self._saved:
                self.freed_values.give_back(there, base)
            return there, view
        if there is None or there not in self._index:
            value = Value(base.detach(), output=output)
            index = self.add(value, base, node.name())
            self.homes.allocated_at[index] = sequence_number(node)
            self.try_recipe(value, node, output, base)
        else:  # known only as an intermediate in recomputes of other values so far
            value = there
            if not certain(value):
                value.maker = self.builder.recompute(node, output, base).maker
            self.compare(value, value, base)
            value.keep(base.detach())
            self.try_implementations(self._index[value], node, output, base)
        register(node, output, value)
        return value, view

    def add(self, value: Value, base: Tensor, node: str) -> int:
        """Add a value, of 0 bytes if its memory is held whatever the plan, and return its index."""
        is_gathered = self.builder.owners.is_gathered(value, base)  # then it is not kept for backward
        parts = [p for p in parts_of(base) if not is_gathered and p.untyped_storage().data_ptr() not in self._static]
        self._index[value] = len(self.values)
        self.values.append(ValueDraft(bytes=sum(part.numel() * part.element_size() for part in parts), node=node))
        return len(self.values) - 1

    def state(self, size: int) -> int:
        """Add a value that represents `size` bytes of state, which a recompute or replay holds from this call on.
        Return its index.
        """
        self.values.append(ValueDraft(bytes=size, node="", state_of=self._open[-1][0]))
        return len(self.values) - 1

    def unrecorded(self, place: CaptureSite, operand: Tensor) -> Value | None:
        return self.operand_changes.captured.take(place, operand)

    def withdraw_overwritten(self) -> None:
        """Keep values with an operand that has changed since the audit recorded it."""
        for index in self.operand_changes.take_overwritten():
            self.values[index].recipe, self.values[index].refused = None, OVERWRITTEN

    def begin_forward(self) -> None:
        """Record the versions of parameters, and release the tensors of earlier calls whose graphs are gone since."""
        self._handles = {n: self._handles[n] for n in self._slot_of.values() if n in self._handles}
        if not self._handles:
            self._passed_through.clear()
            self._meter.forget()
        self.operand_changes.begin_forward(self.model.parameters())

    def try_recipe(self, known: Value, node: Node, output: int, base: Tensor) -> None:
        """Try the recipe of a value and measure its cost."""
        index = self._index[known]
        draft = self.values[index]
        if draft.bytes < MIN_BYTES:
            draft.refused = "too small to gain anything"
            return
        if is_wrapping(type(base)):
            draft.refused = DISTRIBUTED
            return
        try:
            self.compare(known, self.builder.recompute(node, output, base), base)
        except CannotRecompute as why:
            draft.refused = str(why)
            return
        self.try_implementations(index, node, output, base)

    def try_implementations(self, index: int, node: Node, output: int, base: Tensor) -> None:
        """Run the other implementations of a recipe that is exact for this value, and record those that are exact as
        well.
        """
        draft, kind = self.values[index], node.name()
        others = IMPLEMENTATIONS.get(kind)
        # recipes with captured operands have one implementation
        if others is None or draft.recipe != kind or draft.node != kind:
            return
        value = registered(node, output)
        self._trials.add(index, kind, "", Trial(replace(draft), draft.operands))
        for name in others:
            try:
                with using(self.builder, {kind: name}):
                    other = self.builder.recompute(node, output, base)
                maker = other.maker
                assert isinstance(maker, Recompute)
                is_exact = not maker.noted
                for _ in range(2):  # the first run may pay for new pages, or compile its kernel
                    is_exact = is_exact and identical(maker.make(other), base)
            except Exception as error:  # a kernel may fail in any way: it is left out
                if is_out_of_memory(error):
                    continue
                is_exact = False
            finally:
                if value is not None:
                    register(node, output, value)
            if is_exact:
                assert isinstance(maker, Recompute)
                self._trials.add(index, kind, name, Trial(self._meter.of(maker), self.operands(maker)))

    def settle_implementations(self) -> None:
        """Choose an implementation for each kind of node."""
        self.implementations = self._trials.settle(self.values)

    def try_packing(self, known: Value, tensor: Tensor) -> None:
        """Try to keep a tensor without a node as the bits of a mask, or as small integers."""
        kind = INDICES if tensor.dtype is torch.int64 else MASK
        watch = Stopwatch(self._place)
        watch.start(ahead_ms=0.0 if kind == INDICES else 0.2)  # packing of indices waits for the device
        try:
            value = packed(kind, tensor)
        except CannotRecompute:
            return
        packing = watch.stop()
        self.compare(known, value, tensor)
        draft = self.values[self._index[known]]
        if draft.recipe is not None:
            assert isinstance(value.maker, Recompute)
            draft.node, draft.operands = kind, (self.state(value.maker.constants["bits"].nbytes),)
            draft.cost_ms += packing.device
            draft.host_ms += packing.host

    def try_signs(self, known: Value, tensor: Tensor) -> None:
        """Measure the cost of keeping one bit per element of a tensor that is saved for its signs."""
        drafts = []
        for _ in range(2):  # the first run may pay for new pages
            watch = Stopwatch(self._place)
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
            bits = ValueDraft(bytes=maker.constants["bits"].nbytes, node="", state_of=self._open[-1][0])
        draft = min(drafts, key=lambda draft: draft.cost_ms)
        self.enough[len(self.slots)] = Enough(draft, bits, self.is_passable(known, tensor.grad_fn, tensor.output_nr))

    def try_shape(self, call: int, result: Any) -> None:
        """Record the tensor that a call, which has just returned `result`, has itself saved for its shape, if any."""
        held = saved_for_shape(result)
        # several slots of the call may have saved the same tensor
        n = None if held is None else self._slot_of.get(held)
        if held is None or n is None or self.slots[n].call != call:
            return
        value, view = self._handles[n]
        if value.tensor is not None and value.tensor.nbytes >= MIN_BYTES:
            size = packed(SHAPE, held.get()).get().untyped_storage().nbytes()
            draft = ValueDraft(bytes=size, node=SHAPE, recipe=SHAPE)
            node, output = result.grad_fn.next_functions[0]
            is_passable = view is None and self.is_passable(value, node, output)
            is_on_edge = node is not None and registered(node, output) is value
            self.enough[n] = Enough(draft, None, is_passable, is_on_edge)

    def is_passable(self, value: Value, node: Node | None, output: int) -> bool:
        """Return True if a recompute may compute this output of `node` on the way, as an intermediate that is not kept
        afterwards.
        """
        draft = self.values[self._index[value]]
        if node is None or draft.recipe is None or NOTED in draft.node:  # captured only where the value is saved
            return False
        try:
            return certain(self.builder.recompute(node, output))
        except CannotRecompute:
            return False
        finally:
            register(node, output, value)

    def compare(self, known: Value, value: Value, base: Tensor) -> None:
        """Recompute `value`, compare it with `base`, and record the outcome and cost in the draft of `known`."""
        index, maker = self._index[known], value.maker
        draft = self.values[index]
        assert isinstance(maker, Recompute)
        scope = self.here.scope
        assert scope is not None
        places = self.operand_changes.sites[index] = self.places_of(maker)
        if noted_elsewhere(places, scope):
            draft.refused = NOTED_ELSEWHERE
            return
        if self._frugal and needs_a_replay(maker):
            draft.refused = "its operands are inside a block that is replayed to save memory"
            return
        try:
            with self._flops:
                made = maker.make(value)
        except (RuntimeError, TypeError, ValueError) as error:
            draft.refused = f"its recipe failed: {error}".splitlines()[0]
            return
        draft.bytes = base.numel() * base.element_size()
        spent = self._meter.of(maker)
        self.operand_changes.reads(index, maker)
        draft.operands = self.operands(maker)
        draft.own_strides = "out_stride" in maker.recipe.constants
        draft.overwrites = self.over(maker)
        if maker.recipe.alias and [self.values[need].bytes for need in draft.operands] == [draft.bytes]:
            (draft.overwrites,) = draft.operands  # the result is a view and shares that operand's memory
        draft.cost_ms, draft.host_ms, draft.flops, draft.spent = spent.cost_ms, spent.host_ms, spent.flops, spent.spent
        if any(map(self.only_given, draft.operands)):
            draft.recipe, draft.refused = None, "it is computed from an argument of a call that nothing else holds"
        elif identical(made, base):
            draft.recipe = maker.recipe.node
            if places:
                draft.node = with_captured_operands(
                    draft.node, (place.ordinal for place in places if place.ordinal is not None)
                )
            del made
            if draft.cost_ms < SHORT_MS:
                maker.make(value)  # a second run, in touched memory: the first one may have paid for new pages
                spent = self._meter.of(maker)
                draft.cost_ms, draft.host_ms = spent.cost_ms, spent.host_ms
            if maker.operands:
                self.timings.add(known, maker, index)
        else:
            draft.recipe, draft.refused = None, "recomputing it gives other bits on this device"

    def time_late(self, handle: Handle) -> None:
        """Time a slot's recompute when backward is about to read the slot, and check that it gives the same bits."""
        n = self._slot_of.get(handle)
        maker = self.timings.take(handle.value)
        if n is None or maker is None or needs_a_replay(maker):
            return
        if self._frugal and not self.freed_values.has_room_for(handle.value, maker):
            return
        draft = self.values[self.slots[n].value]
        try:
            if not identical(maker.make(Value(maker=maker, output=handle.value.output)), handle.value.get()):
                draft.recipe, draft.refused = None, "recomputing it in backward gives other bits"
        except RuntimeError:  # an operand was changed in place; or the tensor itself, which PyTorch will report
            draft.recipe, draft.refused = None, OVERWRITTEN

    def places_of(self, maker: Recompute) -> set[CaptureSite]:
        """Return the sites of captured operands of a recompute and of the recomputes that it may pass through."""
        sites = set(maker.noted)
        for value in (handle.value for handle in maker.operands if handle is not None):
            index = self._index.get(value)
            if isinstance(value.maker, Recompute):
                sites |= self.places_of(value.maker)
            elif index is not None and index not in self._saved:
                sites |= self.operand_changes.sites.get(index, set())
        return sites

    def only_given(self, index: int) -> bool:
        """Return True if the value, or one that it is computed from, is held only as a call's argument: no slot has
        saved it so far.
        """
        draft = self.values[index]
        if index in self._saved or draft.noted is not None:
            return False
        return draft.recipe is None or draft.own_strides or any(map(self.only_given, draft.operands))

    def operands(self, maker: Recompute) -> tuple[int, ...]:
        """Return the indices of a recompute's operands, except permanent ones; add intermediates to the values."""
        operands = []
        for value in (handle.value for handle in maker.operands if handle is not None):
            if value not in self._index and isinstance(value.maker, Recompute):
                upstream = self.operands(value.maker)
                spent = self._meter.of(value.maker)
                self._index[value] = len(self.values)
                self.timings.add_intermediate(value.maker, len(self.values))
                if value in self._numbering.numbers:
                    self.homes.allocated_at[len(self.values)] = self._numbering.numbers[value]
                over = self.over(value.maker)
                self.values.append(replace(spent, operands=upstream, overwrites=over, recipe=spent.node))
                self._passed_through.append(value)
            if value not in self._index and (draft := self.operand_changes.captured.draft(value)) is not None:
                self._index[value] = len(self.values)
                self.values.append(draft)
            if value in self._index:
                operands.append(self._index[value])
        return tuple(dict.fromkeys(operands))

    def over(self, maker: Recompute) -> int | None:
        """Return the index of the operand that the recompute overwrites with its result, or None."""
        return None if maker.over is None else self._index[maker.over]


class ValueNumbering(Builder):
    """Builder of recomputes that records the sequence number of the node for each value that it has built."""

    __slots__ = ("numbers",)

    def __init__(self, owners: ParameterOwners) -> None:
        super().__init__(owners)
        self.numbers: weakref.WeakKeyDictionary[Value, int] = weakref.WeakKeyDictionary()

    def recompute(self, node: Node, output: int, like: Tensor | None = None, depth: int = 0) -> Value:
        value = super().recompute(node, output, like, depth)
        self.numbers[value] = sequence_number(node)
        return value


def noted_elsewhere(places: Iterable[CaptureSite], scope: CallScope) -> bool:
    """Return True if any of `places` is in another call than `scope`."""
    return any(place.call != scope.id for place in places)


def needs_a_replay(maker: Recompute) -> bool:
    """Return True if the recompute would have to replay a call to get its operands."""
    makers = [handle.value.maker for handle in maker.operands if handle is not None and handle.value.tensor is None]
    return any(isinstance(m, ReplayFrame) or (isinstance(m, Recompute) and needs_a_replay(m)) for m in makers)
