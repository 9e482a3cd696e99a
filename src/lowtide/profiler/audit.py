"""Audit a step: recompute every saved tensor once, and replay every module call that allows it.

Each result is compared with the original tensor bit by bit; recipes and replays that differ on this model and device
are not used. The same run counts FLOPs and measures times. All tensors stay in memory during the audit, so it needs the
memory of the plain step. A frugal audit needs at most that, and less where modules have children: it frees the saved
tensors of a block after a trial replay has reproduced them, and replays the block in backward. Outside blocks it frees
tensors that are recomputed from kept tensors (`released_tensors.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide._torch.backward import get_running_function, in_backward
from lowtide._torch.checkpointed_functions import observe_checkpoints
from lowtide.profiler.address_checks import refuse_other_nodes
from lowtide.profiler.assemble import set_transient_bytes
from lowtide.profiler.audit_inplace import AuditInPlace, InPlaceGroup
from lowtide.profiler.audited_step import AuditedStep, OpenCall
from lowtide.profiler.checkpointed_blocks import CheckpointedCalls
from lowtide.profiler.differing_modules import CallShape
from lowtide.profiler.drafts import CallDraft, SlotDraft, describe
from lowtide.profiler.fsdp_units import FsdpUnits, refuse_ungathered
from lowtide.profiler.partial_reads import PartialReads
from lowtide.profiler.pass_reads import PassReads
from lowtide.profiler.recompute_trials import RecomputeTrials
from lowtide.profiler.repeated_blocks import AuditedBlocks
from lowtide.profiler.replay_trials import ReplayTrials
from lowtide.runtime import saved_values as values
from lowtide.runtime.batch_tensors import put_in_words
from lowtide.runtime.call_arguments import collect_call_tensors
from lowtide.runtime.call_interceptor import CallInterceptor
from lowtide.runtime.engine import Engine
from lowtide.runtime.fingerprint import find_device
from lowtide.runtime.forward_pass import ForwardPass
from lowtide.runtime.partial_saves import saves_signs
from lowtide.runtime.recompute import Recompute
from lowtide.runtime.replay import ReplayFrame
from lowtide.runtime.saved_tensor_packer import SavedTensorPacker
from lowtide.runtime.saved_values import Handle, Observer, Recomputation, Value
from lowtide.state.process_group import count_computed_collectives
from lowtide.utils import progress

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.memory.events import EventStream
    from lowtide.runtime.operand_capture import CaptureSite

WAITS = "it waits for other processes, which need not run it again when this one does"


class AuditEngine(Engine):
    """The engine of an audit, which observes no calls after the audited step. The audit's interceptors may be removed
    later.
    """

    is_over = False
    """True once the step has ended; the model may be called until `remove`."""

    def __init__(self, model: nn.Module, packer: SavedTensorPacker) -> None:
        super().__init__(model, {}, packer=packer)
        self.checkpointed = CheckpointedCalls()

    def begin(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_over:
            return interceptor.inner(*args, **kwargs)
        if (function := get_running_function()) is not None and not function.__module__.startswith("torch."):
            self.checkpointed.add(function, interceptor.path)
        return super().begin(interceptor, args, kwargs)


class Audit(SavedTensorPacker, Observer):
    """The audit of a step: it keeps every tensor, and tries and measures every recompute and replay."""

    captures_all = True
    engine: AuditEngine
    has_contents = True
    """False if tensors are fake, so that nothing that depends on their contents is tried."""

    def __init__(
        self,
        model: nn.Module,
        static: frozenset[int],
        mark: Callable[[str, object], None],
        *,
        frugal: bool = False,
        refused: dict[int, str] | None = None,
        in_place: bool = True,
    ) -> None:
        """Prepare an audit of `model`.

        `static` has the addresses of memory that every plan holds, and `mark` adds marks to the recording of the step.
        `refused` maps the id of a module class to the reason not to replay its modules; classes that turn out not to be
        replayable are added. Unless `in_place`, no gradient is written over another gradient.
        """
        super().__init__(model)
        self.engine = AuditEngine(model, self)
        self.model = model
        self.step = AuditedStep()
        self.inputs: list[list[str]] = []
        """Shapes and dtypes of the tensor arguments of each call of the model from outside, as text."""
        self.streams: set[int] = set()
        """CUDA streams in which tensors were saved."""
        self.by_contents: dict[str, str] = {}
        """Operators whose result sizes depend on a tensor's contents, and a module with each."""
        self.checkpointed = self.engine.checkpointed
        self.reads = PassReads()
        """Saved tensors that backward has read."""
        self.implementations: dict[str, str] = {}
        """Implementations of recipes by kind of node, chosen once the step is over."""
        self.written_over: list[InPlaceGroup] = []
        """Gradients that can be written in place."""
        self.allows_in_place = in_place
        self._tried_in_place: AuditInPlace | None = None
        self._frugal, self._mark, self._place = frugal, mark, find_device(model)
        self.relied_on.takes_values = False
        self._recomputes = RecomputeTrials(
            self.step, self.builder.owners, self._place, static, mark, frugal=frugal, has_contents=self.has_contents
        )
        self._freed = self._recomputes.freed
        self._partial_reads = PartialReads(self._recomputes)
        self._units = FsdpUnits(model)
        self._blocks = AuditedBlocks(model, self._units, self._place, frugal=frugal)
        self._replays = ReplayTrials(
            model, self._recomputes, self._blocks, self._units, {} if refused is None else refused, frugal=frugal
        )

    @property
    def leaked(self) -> str | None:
        """Name of the call whose trial replay left tensors referenced from outside the call, so that the step differed
        from the plain step; None without such a call.
        """
        return self._replays.leaked

    @property
    def shapes(self) -> list[CallShape]:
        """The step's module calls, each with the number of tensors that it has saved itself."""
        shapes = [CallShape(call.id.rpartition("#")[0], call.parent) for call in self.step.calls]
        for slot in self.step.slots:
            shapes[slot.call].n_saved += 1
        return shapes

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Audit the model's calls inside this `with` block."""
        self.engine.install()
        values.observer = self
        try:
            with self._units.watched(), contextlib.ExitStack() as stack:
                stack.callback(observe_checkpoints(self._count_checkpoint))
                if self.allows_in_place:
                    self._tried_in_place = stack.enter_context(AuditInPlace(self._place, self._mark))
                yield
        finally:
            values.observer = None
            self.engine.remove()
            del self.engine  # it refers to the audit, and to the model
            self.step.open_calls.clear()
            self._release()
            self._recomputes.timings.clear()

    def complete_drafts(self, stream: EventStream) -> None:
        """Complete the drafts after the step, given its recorded events: from then on the drafts tell which decisions
        are possible.
        """
        step = self.step
        self._partial_reads.shrink_slots()
        refuse_ungathered(step, self._recomputes.homes)
        refuse_other_nodes(step.values, [*step.slots, *(given for call in step.calls for given in call.inputs)])
        self.implementations = self._recomputes.choose_implementations()
        set_transient_bytes(step.values, stream)
        if self._tried_in_place is not None:
            self.written_over = self._tried_in_place.find_groups(stream)

    def n_sent(self) -> int:
        """Return the number of collective operations so far, except those that gathered parameters."""
        return count_computed_collectives() - self._units.n_sent

    def _count_checkpoint(self, *call: Any) -> None:
        """Count a call of torch.utils.checkpoint for the module whose call is in progress.

        Calls in a trial run or in backward don't count.
        """
        if (scope := self.here.scope) is not None:
            self.checkpointed.by_torch[scope.path] += 1

    def _release(self) -> None:
        """Refuse recomputes and replays that read overwritten tensors, and release all tensors that the audit holds.

        Called when backward begins, or when the step is over.
        """
        self._replays.withdraw_overwritten()
        self._recomputes.begin_backward()

    # --- saved tensors

    def pack(self, run: ForwardPass, tensor: Tensor) -> Handle:
        scope, step = run.scope, self.step
        assert scope is not None
        if tensor.is_cuda:
            self.streams.add(torch.cuda.current_stream(tensor.device).stream_id)
        value, view = self._recomputes.known(tensor)
        draft = step.draft(value)
        if not draft.node and draft.bytes:
            self._recomputes.try_packing(value, tensor)
        if view is None and saves_signs(tensor):
            self._partial_reads.try_signs(value, tensor)
        self._recomputes.refuse_captured_elsewhere(value)
        label = f"{scope.path or type(self.model).__name__}: {describe(tensor, draft.node)}"
        slot = SlotDraft(
            address=f"{scope.id}:{scope.ordinal}",
            label=label,
            value=step.index[value],
            call=step.open_calls[-1].index,
            n_elements=tensor.numel(),
        )
        handle = Handle(value, view)
        step.add_slot(slot, handle, value, view)
        scope.ordinal += 1
        if self._frugal:
            self._freed.try_free(handle, tensor)
            self._freed.free()
        return handle

    def argument(self, tensor: Tensor) -> Handle:
        """Record a tensor argument of the call that begins as one of the call's input slots; return its handle."""
        scope, step = self.here.scope, self.step
        assert scope is not None
        value, view = self._recomputes.known(tensor)
        index, call = step.index[value], step.calls[-1]
        label = f"{scope.path}: argument {describe(tensor, step.values[index].node)}"
        address = f"{call.id}@{len(call.inputs)}"
        call.inputs.append(SlotDraft(address=address, label=label, value=index, call=len(step.calls) - 1))
        return Handle(value, view)

    def unrecorded(self, place: CaptureSite, operand: Tensor) -> Value | None:
        return self._recomputes.operand_changes.captured.take(place, operand)

    # --- module calls

    def on_enter(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        scope, step, module = self.here.scope, self.step, interceptor.module
        assert scope is not None
        parent = step.open_calls[-1].index if step.open_calls else None
        call = CallDraft(id=scope.id, cls=type(module).__name__, parent=parent, first_slot=len(step.slots))
        opened = OpenCall(index=len(step.calls), draft=call, n_sent=self.n_sent())
        step.calls.append(call)
        step.open_calls.append(opened)
        self._units.hold(module)
        if module in self._units.resharded:
            self._recomputes.homes.begin(opened.index, is_gathered=module not in self._units.not_gathered)
        if parent is None:
            self._recomputes.begin_forward(self.model)
            self.inputs.append([put_in_words([tensor]) for tensor in collect_call_tensors(args, kwargs)])
            call.refused = "it is the whole model"
        elif (why := self._blocks.explain_not_replayed(module)) is not None:
            call.refused = why
        else:
            self._replays.begin(opened, ReplayFrame(interceptor, args, kwargs, self.argument))

    def on_return(self, interceptor: CallInterceptor, result: Any) -> None:
        self.step.open_calls[-1].returned = result

    def on_exit(self, interceptor: CallInterceptor) -> None:
        opened = self.step.open_calls[-1]
        if interceptor.module in self._units.resharded:
            self._recomputes.homes.end(opened.index)
        waited = self.n_sent() != opened.n_sent
        opened.draft.stop_slot = len(self.step.slots)
        self._partial_reads.try_shape(opened.index, opened.returned)
        if opened.frame is not None:
            opened.frame.close()
            if waited:
                opened.draft.refused = WAITS
            else:
                self._replays.try_call(opened)
            self._freed.free()
        self._units.reshard(interceptor.module)
        self.step.open_calls.pop()
        progress.advance()

    def on_sized_by_contents(self, operator: str) -> None:
        if (scope := self.here.scope) is not None:  # trial runs do not count
            self.by_contents.setdefault(operator, scope.id.rpartition("#")[0])

    # --- backward

    def has_packed(self, handle: Handle) -> bool:
        return handle in self.step.slot_of

    def on_read(self, handle: Handle) -> None:
        if not self.step.open_calls:
            self._freed.free_results()
            self._release()
        self.reads.add(self.step.slot_of[handle])
        self._recomputes.time_late(handle)

    def on_unpack(self, handle: Handle, tensor: Tensor) -> None:
        self._freed.witness.read(self.step.slot_of[handle], handle, tensor)

    def on_recompute_begin(self, maker: Recomputation) -> None:
        self._recomputes.meter.start()

    def on_recompute_end(self, maker: Recomputation, outputs: tuple[Tensor, ...]) -> None:
        if isinstance(maker, Recompute):
            self._recomputes.meter.stop(maker, outputs[0])
            if in_backward():
                self._recomputes.timings.record(maker)
