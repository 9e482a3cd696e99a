"""Trace one step under the decisions that free the most memory: every allocation, with marks of its causes.

Because nearly every saved tensor is freed as early as possible, this one run shows how long the memory of each tensor
would live by itself, and when backward needs it. The memory under any other decisions follows from these times.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowtide._torch.backward import backward_number, get_running_node_number
from lowtide._torch.compiled_code import in_compiled_backward
from lowtide._torch.distributed import get_own_part
from lowtide._torch.patching import this_thread_only
from lowtide._torch.tensors import find_parts
from lowtide.planner.records import Decisions
from lowtide.profiler.address_checks import map_addresses_to_nodes
from lowtide.profiler.differing_modules import CallShape
from lowtide.profiler.drafts import StepDrafts
from lowtide.profiler.external_references import ExternalReferences
from lowtide.profiler.pass_reads import PassReads
from lowtide.profiler.replay_check import Witness
from lowtide.profiler.trace_marks import (
    TRACE,
    ArgumentFreed,
    Entered,
    Exited,
    GivenAway,
    Gradients,
    HeldForRecompute,
    OperandCaptured,
    OptimizerStep,
    Packed,
    ReadInBackward,
    RecomputeEnded,
    RecomputeStarted,
    Released,
    TraceMark,
    Unreferenced,
    WrittenInPlace,
)
from lowtide.runtime import saved_values as values
from lowtide.runtime.batch_tensors import put_in_words
from lowtide.runtime.call_arguments import collect_call_tensors
from lowtide.runtime.call_interceptor import CallInterceptor
from lowtide.runtime.engine import Engine
from lowtide.runtime.plan_table import parse_actions
from lowtide.runtime.recompute import Recompute
from lowtide.runtime.replay import ReplayFrame
from lowtide.runtime.saved_values import Handle, Observer, Recomputation

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lowtide.profiler.audit import Audit
    from lowtide.runtime.operand_capture import CaptureSite

Mark = Callable[[str, object], None]


class MaxSavingEngine(Engine):
    """An engine that runs a step under the decisions that free the most memory, among those that an audit found
    exact.
    """

    is_measured = True

    def __init__(self, model: nn.Module, audit: Audit, *, in_place: bool = True) -> None:
        """Use the decisions of `audit` that free the most memory.

        Unless `in_place`, no gradient is written in place, because a batch of another size than the audited batch may
        allow other writes.
        """
        self.decisions = decisions = most_saving(audit.step)
        nodes = map_addresses_to_nodes(audit.step.values, audit.step.slots)
        written_over = audit.written_over if in_place else []
        least = {node: n_bytes for group in written_over for node, n_bytes in group.nodes.items()}
        actions = parse_actions({a: nodes[a] for a in decisions.recompute}, decisions.replay)
        super().__init__(model, actions, in_place=[least])
        self.learning.is_possible = False
        self.packer.captures_all = True
        self.packer.builder.implementations = audit.implementations
        # the profile names tensors that are freed too early, and the audit has reported all else
        self.messages.tell = lambda what: None


class Trace(Observer):
    """The observer that marks the events of a step (`profiler/trace_marks.py`) among its recorded allocations."""

    def __init__(self, engine: Engine, mark: Mark) -> None:
        self.engine = engine
        self._mark = mark
        self._holding = ExternalReferences()
        self._witness = Witness(mark)
        self.inputs: list[list[str]] = []
        """Shapes and dtypes of the tensor arguments of each call of the model from outside, as text."""
        self.packs = 0
        self.elements: list[int] = []
        """Number of elements of the tensor in each slot."""
        self.calls: list[CallShape] = []
        self.reads = PassReads()
        """Saved tensors that backward has read."""
        self.kept: set[int] = set()
        """Slots that were kept."""
        self._open: list[int] = []
        self._watched_before: list[int] = []
        """Number of watched entries when each open call began."""
        self._pass = -1
        """Number of the last backward pass that read something."""
        self._slots: weakref.WeakKeyDictionary[Handle, int] = weakref.WeakKeyDictionary()
        self._deaths: dict[int, weakref.ref[Handle]] = {}
        self._arguments: dict[int, weakref.ref[Tensor]] = {}
        """Arguments of calls by `id`; when one is freed, it shows whether other tensors hold its memory."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Trace the model's calls inside this `with` block."""
        hooks = (
            register_optimizer_step_pre_hook(this_thread_only(lambda *_: self._optimizer_begins())),
            register_optimizer_step_post_hook(this_thread_only(lambda *_: self.mark(OptimizerStep(has_ended=True)))),
        )
        self.engine.install()
        values.observer = self
        self._gradients(at_entry=True)
        try:
            yield
            self._gradients()
        finally:
            values.observer = None
            self.engine.remove()
            self._deaths.clear()
            self._arguments.clear()
            for hook in hooks:
                hook.remove()

    def mark(self, mark: TraceMark, *, since: int | None = None, everything: bool = False) -> None:
        """Add to the recording the memory that only the rehearsal still holds, and then `mark`.

        `since` and `everything` are as for `ExternalReferences.find_unreferenced`.
        """
        self._mark_unreferenced(since=since, everything=everything)
        self._mark(TRACE, mark)

    def _mark_unreferenced(self, *, since: int | None = None, everything: bool = False) -> None:
        if blocks := self._holding.find_unreferenced(since=since, everything=everything):
            self._mark(TRACE, Unreferenced(blocks))

    def _optimizer_begins(self) -> None:
        self._gradients()
        self.mark(OptimizerStep(has_ended=False))

    def _gradients(self, *, at_entry: bool = False) -> None:
        gradients = (p.grad for p in self.engine.model.parameters() if p.is_leaf)
        addresses = tuple(self._address(part) for g in gradients if g is not None for part in find_parts(g))
        self.mark(Gradients(addresses, at_entry), everything=True)

    def _address(self, tensor: Tensor) -> int:
        return address(tensor)

    def on_enter(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = collect_call_tensors(args, kwargs)
        if not self._open:
            self.inputs.append([put_in_words([tensor]) for tensor in tensors])
        self.mark(Entered(len(self.calls), tuple(map(self._address, tensors))))
        self.calls.append(CallShape(interceptor.path, self._open[-1] if self._open else None))
        self._open.append(len(self.calls) - 1)
        self._watched_before.append(self._holding.n_watched)
        for tensor in tensors:
            self._watch_argument(id(tensor), tensor)

    def _watch_argument(self, key: int, tensor: Tensor) -> None:
        def freed(_: object) -> None:
            if self._arguments.pop(key, None) is not None:
                self.mark(ArgumentFreed())

        if key not in self._arguments:
            self._arguments[key] = weakref.ref(tensor, freed)

    def on_exit(self, interceptor: CallInterceptor) -> None:
        self.mark(Exited(self._open.pop()), since=self._watched_before.pop())

    def on_pack(self, handle: Handle, tensor: Tensor) -> None:
        slot = self.packs
        self.packs += 1
        self.calls[self._open[-1]].n_saved += 1
        self.elements.append(tensor.numel())
        if handle.value.kept and not handle.value.is_partial:  # tensors kept in part are freed when their call ends
            self.kept.add(slot)
        self._slots[handle] = slot
        self._deaths[slot] = weakref.ref(handle, lambda _: self.mark(Released(slot)))
        is_gathered = self.engine.packer.builder.owners.is_gathered(handle.value, tensor)
        self.mark(Packed(slot, 0 if is_gathered else self._address(tensor)))
        self._holding.watch(handle)
        self.mark(HeldForRecompute(tuple(map(self._address, list_states(handle.value.maker)))))
        if not (handle.value.kept or handle.value.is_partial):
            self._witness.saved(slot, tensor)

    def on_capture(self, place: CaptureSite, operand: Tensor) -> None:
        self.mark(OperandCaptured(self._open[-1], self._address(operand)))

    def has_packed(self, handle: Handle) -> bool:
        return handle in self._slots  # other handles belong to another model or to an earlier step

    def on_read(self, handle: Handle) -> None:
        number = backward_number()
        begins, self._pass = number != self._pass, number
        self.reads.add(self._slots[handle])
        self.mark(ReadInBackward(self._slots[handle], number, get_running_node_number()), everything=begins)

    def on_unpack(self, handle: Handle, tensor: Tensor) -> None:
        # A graph that backward makes, or compiled code, holds the tensor independently of the handle.
        if torch.is_grad_enabled() or in_compiled_backward():
            self.mark(GivenAway(self._slots[handle], backward_number(), self._address(tensor)))
        self._witness.read(self._slots[handle], handle, tensor)

    def on_recompute_begin(self, maker: Recomputation) -> None:
        self.mark(RecomputeStarted())

    def on_recompute_end(self, maker: Recomputation, outputs: tuple[Tensor, ...]) -> None:
        self.mark(RecomputeEnded())

    def on_write_in_place(self, node: str, n_bytes: int) -> None:
        self.mark(WrittenInPlace(node, n_bytes))


def list_states(maker: Recomputation | None) -> Iterable[Tensor]:
    """Return the tensors of state that only `maker` holds; none if there is no `maker`.

    A replay holds RNG states and buffers; a recompute may hold the bits of a mask.
    """
    if isinstance(maker, ReplayFrame):
        return maker.call_context.tensors
    return [maker.constants["bits"]] if isinstance(maker, Recompute) and "bits" in maker.constants else []


def address(tensor: Tensor) -> int:
    """Return the start address of a tensor's memory; 0 for tensors without memory."""
    try:
        return get_own_part(tensor).untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def most_saving(step: StepDrafts) -> Decisions:
    """Return the decisions that free the most memory.

    Blocks of at most half of the saved bytes are replayed, and most tensors outside these blocks are recomputed.
    Tensors whose recompute would need a replay are kept: chains of such recomputes would restore all blocks at once.
    """
    values, slots, calls = step.values, step.slots, step.calls
    total = [sum(values[index].bytes for index in {slot.value for slot in step.list_slots(call)}) for call in calls]
    replay: set[int] = set()
    outside: set[int] = set()
    for index, call in enumerate(calls):  # parents come before their children
        if call.parent is None:
            outside.add(index)
        elif call.parent in outside:
            if call.refused is None and 2 * total[index] <= total[0]:
                replay.add(index)
            else:
                outside.add(index)
    saved = {slot.value for slot in slots if slot.call in outside}
    inside = {slot.value for slot in slots} - saved - {given.value for index in replay for given in calls[index].inputs}

    @cache
    def needs_a_replay(index: int) -> bool:
        made_of = values[index].operands
        return any(need in inside or (need not in saved and needs_a_replay(need)) for need in made_of)

    recompute = {
        slot.address
        for slot in slots
        if slot.call in outside and values[slot.value].recipe is not None and not needs_a_replay(slot.value)
    }
    return Decisions(recompute=frozenset(recompute), replay=frozenset(calls[index].id for index in replay))
