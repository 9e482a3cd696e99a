"""Try the recipe of every value that an audited step saves, and compare the result with the original bit by bit.

Recipes that differ on this model and device are not used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lowtide._torch.device_timing import Stopwatch
from lowtide._torch.distributed import is_wrapping
from lowtide._torch.nodes import sequence_number
from lowtide._torch.tensors import find_parts
from lowtide.planner.address_nodes import INDICES, MASK, NOTED, with_captured_operands
from lowtide.profiler.backward_timings import BackwardTimings
from lowtide.profiler.chain_trials import ChainTrials
from lowtide.profiler.drafts import OVERWRITTEN, ValueDraft
from lowtide.profiler.fsdp_units import FsdpScopes, ValueNumbering
from lowtide.profiler.implementations import ExactRun, ImplementationTrials, using
from lowtide.profiler.measure_call import SHORT_MS, Meter
from lowtide.profiler.operand_changes import OperandChanges
from lowtide.profiler.released_tensors import FreedValues
from lowtide.profiler.replay_check import Witness
from lowtide.runtime.partial_saves import packed
from lowtide.runtime.recipes import IMPLEMENTATIONS, CannotRecompute
from lowtide.runtime.recipes.chains import CHAIN
from lowtide.runtime.recipes.normalization import SAVED_STATISTICS
from lowtide.runtime.recompute import Recompute, certain
from lowtide.runtime.replay import ReplayFrame
from lowtide.runtime.saved_values import Handle, Value, make_value_without_grad_fn, register, registered
from lowtide.runtime.view_geometry import find_base_node_and_view
from lowtide.state.bitwise import identical
from lowtide.state.step_outcome import is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.autograd.graph import Node

    from lowtide.profiler.audited_step import AuditedStep
    from lowtide.runtime.operand_capture import CaptureSite
    from lowtide.runtime.recompute_builder import ParameterOwners
    from lowtide.runtime.saved_fields import Geometry

MIN_BYTES = 4096
"""Bytes of the smallest saved tensor that may be recomputed; smaller tensors are always kept."""

DISTRIBUTED = "it is a distributed tensor, and operators on it may send to other processes"
CAPTURED_ELSEWHERE = "it takes what an operator was given in another call than the one that saves it"


class RecomputeTrials:
    """Trials of the recipes of all values of an audited step. The outcome and cost of each are recorded in the step's
    drafts.
    """

    def __init__(
        self,
        step: AuditedStep,
        owners: ParameterOwners,
        place: torch.device,
        static: frozenset[int],
        mark: Callable[[str, object], None],
        *,
        frugal: bool,
        has_contents: bool,
    ) -> None:
        """Begin without trials of `step`, which runs on the device `place` and whose recording is marked by `mark`.

        `static` has the addresses of memory that every plan holds. Unless `has_contents`, tensors are fake, and nothing
        that depends on their contents is tried.
        """
        self.step, self.meter = step, Meter(mark, place)
        self.timings = BackwardTimings(step, self.meter)
        self.freed = FreedValues(step, self.timings, owners.relied_on, Witness(mark))
        self._static, self._frugal, self._has_contents = static, frugal, has_contents
        self.builder = ValueNumbering(owners)
        self.operand_changes = OperandChanges(static)
        self.homes = FsdpScopes()
        self._implementations = ImplementationTrials()
        self._chains = ChainTrials(place)
        if has_contents and not frugal:
            self.builder.implementations = self._chains.list_first()

    def find_value(self, tensor: Tensor) -> tuple[Value, Geometry | None]:
        """Return the value (output of an autograd node) of a tensor, and the tensor's geometry if it is a view of it.

        The recipe of a value is tried when the value is first seen.
        """
        step = self.step
        base, node, output, view = find_base_node_and_view(tensor)
        if node is None:
            leaf = make_value_without_grad_fn(base)
            self._add(leaf, base, "")
            return leaf, view
        value = registered(node, output)
        if value is None or value not in step.index:
            value = Value(base.detach(), output=output)
            self.homes.allocated_at[self._add(value, base, node.name())] = sequence_number(node)
            self._try_recipe(value, node, output, base)
        elif value in self.freed:
            if not step.is_saved(value):
                self.freed.give_back(value, base)
            return value, view
        elif not isinstance(value.maker, Recompute):
            return value, view
        else:  # known only as an intermediate in recomputes of other values so far
            if not certain(value):
                value.maker = self.builder.recompute(node, output, base).maker
            self._compare(value, value, base)
            value.keep(base.detach())
            self._try_implementations(value, node, output, base)
        register(node, output, value)
        return value, view

    def known(self, tensor: Tensor) -> tuple[Value, Geometry | None]:
        """Return a tensor's value and geometry as `find_value` does.

        Inside a block whose saved tensors will be freed, a freed value is kept again, because the trial of the block
        compares the value in another slot.
        """
        value, view = self.find_value(tensor)
        if value in self.freed and self.step.is_in_freed_block:
            self.freed.give_back(value, find_base_node_and_view(tensor)[0])
        return value, view

    def _add(self, value: Value, base: Tensor, node: str) -> int:
        """Add `value` to the drafts, without the bytes of memory that every plan holds, and return its index."""
        is_gathered = self.builder.owners.is_gathered(value, base)  # then it is not kept for backward
        parts = [p for p in find_parts(base) if not is_gathered and p.untyped_storage().data_ptr() not in self._static]
        return self.step.add(value, ValueDraft(bytes=sum(p.numel() * p.element_size() for p in parts), node=node))

    def begin_forward(self, model: nn.Module) -> None:
        """Record the versions of parameters, and release tensors of earlier calls whose graphs have been freed."""
        self.step.drop_unreferenced()
        if not self.step.held:
            self.step.passed_through.clear()
            self.meter.forget()
        self.operand_changes.begin_forward(model.parameters())

    def begin_backward(self) -> None:
        """Refuse recomputes with an operand that has changed since the audit recorded it, and release all tensors."""
        for index in self.operand_changes.take_overwritten():
            self.step.values[index].refuse(OVERWRITTEN)
        if self.step.held:
            self.timings.drop_unread()
        self.step.release()
        self.meter.forget()

    def refuse_captured_elsewhere(self, value: Value) -> None:
        """Refuse to recompute a value, saved for the first time, if an operand was captured in another call."""
        step, index = self.step, self.step.index[value]
        if index not in step.saved and step.is_captured_elsewhere(self.operand_changes.sites.get(index, ())):
            step.values[index].refuse(CAPTURED_ELSEWHERE)

    def _try_recipe(self, known: Value, node: Node, output: int, base: Tensor) -> None:
        """Try the recipe of a value and measure its cost."""
        draft = self.step.draft(known)
        if draft.bytes < MIN_BYTES:
            draft.refused = "too small to gain anything"
            return
        if is_wrapping(type(base)):
            draft.refused = DISTRIBUTED
            return
        try:
            self._compare(known, self.builder.recompute(node, output, base), base)
        except CannotRecompute as why:
            draft.refused = str(why)
            return
        self._try_implementations(known, node, output, base)

    def _try_implementations(self, known: Value, node: Node, output: int, base: Tensor) -> None:
        """Run all further implementations of the recipe of `node`, which is exact for the value `known`.

        Record each implementation that is exact as well.
        """
        index, draft, kind = self.step.index[known], self.step.draft(known), node.name()
        others = [name for name in IMPLEMENTATIONS.get(kind, ()) if name != CHAIN]
        # recipes with captured operands have one implementation
        if not self._has_contents or not others or draft.recipe != kind or draft.node != kind:
            return
        value = registered(node, output)
        self._implementations.add(index, kind, "", ExactRun(replace(draft), draft.operands))
        for name in others:
            try:
                with using(self.builder, {kind: name}):
                    other = self.builder.recompute(node, output, base)
                maker = other.maker
                assert isinstance(maker, Recompute)
                is_exact = not maker.captured_sites
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
                self._implementations.add(index, kind, name, ExactRun(self.meter.of(maker), self._operands(maker)))
                if self.builder.implementations and name == SAVED_STATISTICS:
                    with using(self.builder, {kind: CHAIN}):
                        self._chains.add(known, self.builder.recompute(node, output, base).maker)
                    if value is not None:
                        register(node, output, value)

    def choose_implementations(self) -> dict[str, str]:
        """Choose an implementation for each kind of node, and set its costs. Return those that are not the first."""
        return self._implementations.choose(self.step.values) | self._chains.choose()

    def try_packing(self, known: Value, tensor: Tensor) -> None:
        """Try to keep a tensor without a node as the bits of a mask, or as small integers."""
        if not self._has_contents and tensor.dtype is not torch.bool:  # bits are enough for any contents of a bool
            return
        kind = INDICES if tensor.dtype is torch.int64 else MASK
        watch = Stopwatch(self.meter.place)
        watch.start(ahead_ms=0.0 if kind == INDICES else 0.2)  # packing of indices waits for the device
        try:
            value = packed(kind, tensor)
        except CannotRecompute:
            return
        packing = watch.stop()
        self._compare(known, value, tensor)
        draft = self.step.draft(known)
        if draft.recipe is not None:
            assert isinstance(value.maker, Recompute)
            draft.node, draft.operands = kind, (self.step.add_state(value.maker.constants["bits"].nbytes),)
            draft.cost_ms += packing.device
            draft.host_ms += packing.host

    def is_passable(self, value: Value, node: Node | None, output: int) -> bool:
        """Return True if a recompute may compute this output of `node` as an intermediate, which is not kept
        afterwards.
        """
        draft = self.step.draft(value)
        if node is None or draft.recipe is None or NOTED in draft.node:  # captured only where the value is saved
            return False
        try:
            return certain(self.builder.recompute(node, output))
        except CannotRecompute:
            return False
        finally:
            register(node, output, value)

    def _compare(self, known: Value, value: Value, base: Tensor) -> None:
        """Run the recompute of `value`, and compare the result with the original tensor `base`.

        Outcome and cost are written to the draft of `known`, the value that stands for the same tensor in the drafts.
        """
        step, maker = self.step, value.maker
        index, draft = step.index[known], step.draft(known)
        assert isinstance(maker, Recompute)
        sites = self.operand_changes.sites[index] = self._collect_sites(maker)
        if step.is_captured_elsewhere(sites):
            draft.refused = CAPTURED_ELSEWHERE
            return
        if self._frugal and needs_a_replay(maker):
            draft.refused = "its operands are inside a block that is replayed to save memory"
            return
        try:
            with self.meter.flops:
                made = maker.make(value)
        except (RuntimeError, TypeError, ValueError) as error:
            draft.refused = f"its recipe failed: {error}".splitlines()[0]
            return
        spent = self.meter.of(maker)
        draft.bytes = base.numel() * base.element_size()
        draft.cost_ms, draft.host_ms, draft.flops, draft.spent = spent.cost_ms, spent.host_ms, spent.flops, spent.spent
        self.operand_changes.reads(index, maker)
        draft.operands = self._operands(maker)
        draft.own_strides = "out_stride" in maker.recipe.constants
        draft.overwrites = self._find_overwritten(maker)
        if maker.recipe.alias and [step.values[need].bytes for need in draft.operands] == [draft.bytes]:
            (draft.overwrites,) = draft.operands  # the result is a view and shares that operand's memory
        if any(map(step.only_given, draft.operands)):
            draft.refuse("it is computed from an argument of a call that nothing else holds")
            return
        if not identical(made, base):
            draft.refuse("recomputing it gives other bits on this device")
            return
        draft.recipe = maker.recipe.node
        self._chains.add(known, maker)
        if sites:
            ordinals = (site.ordinal for site in sites if site.ordinal is not None)
            draft.node = with_captured_operands(draft.node, ordinals)
        del made
        if draft.cost_ms < SHORT_MS:
            maker.make(value)  # a second run, in touched memory: the first one may have paid for new pages
            spent = self.meter.of(maker)
            draft.cost_ms, draft.host_ms = spent.cost_ms, spent.host_ms
        if maker.operands:
            self.timings.add(known, maker, index)

    def time_late(self, handle: Handle) -> None:
        """Time a slot's recompute when backward is about to read the slot, and check that the result has the same
        bits.
        """
        n = self.step.slot_of.get(handle)
        maker = self.timings.take(handle.value)
        if n is None or maker is None or needs_a_replay(maker):
            return
        if self._frugal and not self.freed.has_room_for(handle.value, maker):
            return
        draft = self.step.values[self.step.slots[n].value]
        try:
            if not identical(maker.make(Value(maker=maker, output=handle.value.output)), handle.value.get()):
                draft.refuse("recomputing it in backward gives other bits")
        except RuntimeError:  # an operand was changed in place; or the tensor itself, which PyTorch will report
            draft.refuse(OVERWRITTEN)
        if draft.recipe is not None:
            self._chains.run(handle.value, self._get_ms)

    def _get_ms(self, value: Value) -> float:
        """Return the measured time of one recompute of `value`; 0 if it has not run."""
        if value not in self.step.index:
            return 0.0
        draft = self.step.draft(value)
        return draft.cost_ms + draft.host_ms

    def _collect_sites(self, maker: Recompute) -> set[CaptureSite]:
        """Return the sites of operands captured for a recompute, and for recomputes of its operands that it may run."""
        sites = set(maker.captured_sites)
        for value in (handle.value for handle in maker.operands if handle is not None):
            index = self.step.index.get(value)
            if isinstance(value.maker, Recompute):
                sites |= self._collect_sites(value.maker)
            elif index is not None and index not in self.step.saved:
                sites |= self.operand_changes.sites.get(index, set())
        return sites

    def _operands(self, maker: Recompute) -> tuple[int, ...]:
        """Return the indices of a recompute's operands, except tensors that exist anyway; add drafts if needed."""
        step, operands = self.step, []
        for value in (handle.value for handle in maker.operands if handle is not None):
            if value not in step.index and isinstance(value.maker, Recompute):
                self._add_intermediate(value, value.maker)
            if value not in step.index and (draft := self.operand_changes.captured.draft(value)) is not None:
                step.add(value, draft)
            if value in step.index:
                operands.append(step.index[value])
        return tuple(dict.fromkeys(operands))

    def _add_intermediate(self, value: Value, maker: Recompute) -> None:
        """Add a draft for an intermediate value: recomputes of other values compute it, and no slot has saved it."""
        operands, spent = self._operands(maker), self.meter.of(maker)
        draft = replace(spent, operands=operands, overwrites=self._find_overwritten(maker), recipe=spent.node)
        index = self.step.add(value, draft)
        self.timings.add_intermediate(maker, index)
        if value in self.builder.numbers:
            self.homes.allocated_at[index] = self.builder.numbers[value]
        self.step.passed_through.append(value)

    def _find_overwritten(self, maker: Recompute) -> int | None:
        """Return the index of the operand that the recompute overwrites with its result, or None."""
        return None if maker.over is None else self.step.index[maker.over]


def needs_a_replay(maker: Recompute) -> bool:
    """Return True if the recompute would have to replay a call to get its operands."""
    makers = [handle.value.maker for handle in maker.operands if handle is not None and handle.value.tensor is None]
    return any(isinstance(m, ReplayFrame) or (isinstance(m, Recompute) and needs_a_replay(m)) for m in makers)
