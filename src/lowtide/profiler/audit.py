"""Audit a step: recompute every saved tensor once, and replay every module call that allows it.

Each result is compared with the original tensor bit by bit; recipes and replays that differ on this model and device
are not used. The same run counts FLOPs and measures times. All tensors stay in memory during the audit, so it needs the
memory of the plain step. A frugal audit needs at most that, and less where modules have children: it frees the tensors
of each block as a trial replay brings them back, and replays the block in backward. Outside blocks it frees tensors
that kept ones recompute (`released_tensors.py`).
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from lowtide._torch.backward import in_backward, observe_checkpointed_calls
from lowtide._torch.device_timing import now_ms
from lowtide._torch.nodes import is_workspace, next_sequence_number
from lowtide._torch.tensors import storage_id
from lowtide.errors import ReplayMismatch, summarize
from lowtide.profiler import address_checks as addresses
from lowtide.profiler import fsdp_units as sharding
from lowtide.profiler import partial_reads as readers
from lowtide.profiler.assemble import transients
from lowtide.profiler.audit_inplace import AuditInPlace, InPlaceGroup
from lowtide.profiler.audit_recompute import MIN_BYTES, RecomputeAudit
from lowtide.profiler.differing_modules import CallShape
from lowtide.profiler.drafts import CallDraft, SlotDraft, describe
from lowtide.profiler.fsdp_units import AROUND_UNITS, FsdpUnits
from lowtide.profiler.measure_call import CAN_GO_WRONG, advance, timed
from lowtide.profiler.repeated_blocks import freed_blocks, is_recurrent, repeated_blocks, worth_a_replay
from lowtide.profiler.replay_check import Witness
from lowtide.runtime import saved_values as values
from lowtide.runtime.batch_tensors import in_words, tensors_in
from lowtide.runtime.call_arguments import tensors_in_call
from lowtide.runtime.call_interceptor import CallInterceptor
from lowtide.runtime.engine import Engine
from lowtide.runtime.forward_pass import ForwardPass
from lowtide.runtime.recompute import Recompute
from lowtide.runtime.replay import ReplayFrame
from lowtide.runtime.saved_fields import Geometry
from lowtide.runtime.saved_values import Handle, Observer, Recomputation, Value
from lowtide.runtime.view_geometry import producer
from lowtide.state.appended_items import undo_appends
from lowtide.state.bitwise import identical
from lowtide.state.own_generators import DRAWS, OwnGenerators
from lowtide.state.process_group import n_computed
from lowtide.state.side_effects import CodeState
from lowtide.utils import progress

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.memory.events import EventStream


LEAKS = "it gives tensors to something outside it, such as a list: a replay would do so again"
CHANGED = "it reads something that changes between forward and backward"
WAITS = "it waits for other processes, which need not run it again when this one does"
RAISED = "it raised an exception"


class AuditEngine(Engine):
    """The engine of an audit, which ends with the audited step: its interceptors may be removed later."""

    is_over = False
    """True once the step has ended; the model may be called until `remove`."""

    def begin(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return interceptor.inner(*args, **kwargs) if self.is_over else super().begin(interceptor, args, kwargs)


class Audit(RecomputeAudit, Observer):
    """The audit of a step: it keeps every tensor, and tries and measures every recompute and replay."""

    engine: AuditEngine

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

        `refused` maps classes of modules, by id, to the reason not to replay them; classes found not to be replayable
        are added. Unless `in_place`, no gradient is written over another.
        """
        super().__init__(model, static, mark, frugal=frugal)
        self.engine = AuditEngine(model, {}, packer=self)
        self.calls: list[CallDraft] = []
        self.refused = {} if refused is None else refused
        self.leaked: str | None = None
        """Name of the call whose second run leaked tensors out of it, so that the step differed from the plain step;
        None without one.
        """
        self.inputs: list[list[str]] = []
        """Shapes and dtypes of the tensor arguments of each call of the model from outside, as text."""
        self.by_contents: dict[str, str] = {}
        """Operators whose result sizes depend on a tensor's contents, and a module with each."""
        self.checkpointed: Counter[str] = Counter()
        """Number of torch.utils.checkpoint calls by path of the module that they run in."""
        self.reads = 0
        self.written_over: list[InPlaceGroup] = []
        """Gradients that can be written in place."""
        self.allows_in_place = in_place
        self._tried_in_place: AuditInPlace | None = None
        self._mark = mark
        self._blocks = repeated_blocks(model)
        self._freed = freed_blocks(model) if frugal else frozenset()
        """Blocks whose saved tensors are freed once the block has been audited."""
        is_surely_alike = frugal and self._place.type == "cpu"  # not proven of cuDNN
        self._freed_before = frozenset(m for m in model.modules() if is_surely_alike and is_recurrent(m))
        """Layers whose saved tensors are freed before the trial: one operator saves them all, and its second run would
        hold them twice.
        """
        self._around_blocks = frozenset(
            m for m in model.modules() if m not in self._blocks and self._blocks & set(m.modules())
        )
        self._returned: Any = RAISED
        self._units = FsdpUnits(model)
        self._own_draws = OwnGenerators(model)
        self._witness = Witness(mark)
        self._results: list[Value] = []
        """Results of the block that was freed last."""
        self._given: set[int] = set()
        """Indices of values that are arguments of calls."""
        self._own_states: dict[ReplayFrame, CodeState] = {}
        """State that each call in progress could change, as it was when the call began."""
        self._read: list[tuple[CallDraft, list[tuple[Tensor, int]]]] = []
        """Tensors that a replay of each call would read, with the versions that it needs."""
        self._sent: list[int] = []
        """Number of collective operations before each call in progress."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Audit the model's calls inside this `with` block."""
        self.engine.install()
        values.probe = self
        try:
            with self._units.watched(), observe_checkpointed_calls(self._checkpoints), contextlib.ExitStack() as stack:
                if self.allows_in_place:
                    self._tried_in_place = stack.enter_context(AuditInPlace(self._place, self._mark))
                yield
        finally:
            values.probe = None
            self.engine.remove()
            del self.engine  # it refers to the audit, and to the model
            self._open.clear()
            self._sent.clear()
            self._own_states.clear()
            self.free_all()
            self.timings.clear()

    def withdraw_overwritten(self) -> None:
        written = self.operand_changes.written_in_forward()
        lost = {
            call.id
            for call, read in self._read
            if any(tensor._version != version or storage_id(tensor) in written for tensor, version in read)
        }
        self._read.clear()
        for call in self.calls if lost else ():
            if call.id in lost:
                call.result_value, call.refused = None, CHANGED
        super().withdraw_overwritten()

    def settle(self, stream: EventStream) -> None:
        """Complete the drafts after the step, given its recorded events: from then on they tell which decisions are
        possible.
        """
        readers.settle(self.enough, self.values, self.slots)
        sharding.settle(self.values, self.slots, self.calls, self.homes)
        addresses.settle(self.values, [*self.slots, *(given for call in self.calls for given in call.inputs)])
        self.settle_implementations()
        transients(self.values, stream)
        if self._tried_in_place is not None:
            self.written_over = self._tried_in_place.settle(stream)

    def _checkpoints(self) -> None:
        """Count a torch.utils.checkpoint call in the call in progress, except in a trial run or in backward."""
        if (scope := self.here.scope) is not None:
            self.checkpointed[scope.path] += 1

    @property
    def shapes(self) -> list[CallShape]:
        """The calls, with the number of tensors that each has saved."""
        shapes = [CallShape(call.id.rpartition("#")[0], call.parent) for call in self.calls]
        for slot in self.slots:
            shapes[slot.call].n_saved += 1
        return shapes

    def sized_by_contents(self, operator: str) -> None:
        if (scope := self.here.scope) is not None:  # trial runs do not count
            self.by_contents.setdefault(operator, scope.id.rpartition("#")[0])

    # --- module calls

    def entering(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        scope = self.here.scope
        assert scope is not None
        parent = self._open[-1][0] if self._open else None
        call = CallDraft(id=scope.id, cls=type(interceptor.module).__name__, parent=parent, first_slot=len(self.slots))
        self.calls.append(call)
        self._open.append((len(self.calls) - 1, None))
        self._sent.append(self._n_sent())
        self._units.hold(interceptor.module)
        if interceptor.module in self._units.resharded:
            self.homes.spans[len(self.calls) - 1] = next_sequence_number(), sys.maxsize
            self.homes.not_gathered |= (
                {len(self.calls) - 1} if interceptor.module in self._units.not_gathered else set()
            )
        if parent is None:
            self.begin_forward()
            self.inputs.append([in_words([tensor]) for tensor in tensors_in_call(args, kwargs)])
            call.refused = "it is the whole model"
        elif not worth_a_replay(interceptor.module):
            call.refused = "what it saves has recipes"
        elif interceptor.module in self._units.around:
            call.refused = AROUND_UNITS
        elif interceptor.module in self._around_blocks:
            call.refused = "the blocks in it are replayed instead"
        else:
            self._open[-1] = len(self.calls) - 1, (frame := ReplayFrame(interceptor, args, kwargs, self.argument))
            if self._why_refused(interceptor.module) is None:
                self._own_states[frame] = CodeState(interceptor.module, frame.call_context)

    def pack(self, now: ForwardPass, tensor: Tensor) -> Handle:
        handle = super().pack(now, tensor)
        if self._frugal:
            self.try_free(handle, tensor)
            self.freed_values.free()
        return handle

    def known(self, tensor: Tensor) -> tuple[Value, Geometry | None]:
        value, view = super().known(tensor)
        if value in self.freed_values and self._in_freed_block():
            # the trial of the block compares it again, in another slot
            self.freed_values.give_back(value, producer(tensor)[0])
        return value, view

    def _in_freed_block(self) -> bool:
        """Return True if a call in progress is of a block whose saved tensors are freed when it has been audited."""
        return any(frame is not None and frame.interceptor.module in self._freed for _, frame in self._open)

    def try_free(self, handle: Handle, tensor: Tensor) -> None:
        """Free a tensor that has just been saved, if kept tensors recompute it without a matrix product."""
        value = handle.value
        index = self._index[value]
        maker = self.timings.recompute_of(value)
        is_cheap = bool(self.values[index].recipe) and not self.values[index].flops
        if maker is not None and is_cheap and self.freed_values.may_go(value, maker, chained=self._in_freed_block()):
            self._witness.saved(self._slot_of[handle], tensor)
            self._free_value(value, maker)

    def _free_value(self, value: Value, maker: Recompute) -> None:
        """Free a value that `maker` recomputes; parameters that `maker` reads are copied before they are written to."""
        self.relied_on.rely_on(handle.value for handle in maker.operands if handle is not None)
        self.freed_values.add(value, maker)

    def argument(self, tensor: Tensor) -> Handle:
        """Hold an argument of the call that begins as an input slot of that call."""
        scope = self.here.scope
        assert scope is not None
        value, view = self.known(tensor)
        index, call = self._index[value], self.calls[-1]
        self._given.add(index)
        label = f"{scope.path}: argument {describe(tensor, self.values[index].node)}"
        address = f"{call.id}@{len(call.inputs)}"
        call.inputs.append(SlotDraft(address=address, label=label, value=index, call=len(self.calls) - 1))
        return Handle(value, view)

    def returning(self, interceptor: CallInterceptor, result: Any) -> None:
        self._returned = result

    def leaving(self, interceptor: CallInterceptor) -> None:
        index, frame = self._open[-1]
        if index in self.homes.spans:
            self.homes.spans[index] = self.homes.spans[index][0], next_sequence_number()
        waited = self._n_sent() != self._sent.pop()
        returned, self._returned = self._returned, RAISED
        call = self.calls[index]
        call.stop_slot = len(self.slots)
        self.try_shape(index, returned)
        if frame is not None:
            frame.close()
            call.refused = WAITS if waited else self.try_all(call, frame, returned)
            if call.refused is None:
                call.state = self.state(frame.call_context.nbytes)
                self._read.append((call, frame.read(given=not self._frugal)))
            self.freed_values.free()
        self._units.reshard(interceptor.module)
        self._open.pop()
        progress.advance()

    def _n_sent(self) -> int:
        """Return the number of collective operations so far, except those that gathered parameters."""
        return n_computed() - self._units.n_sent

    def try_all(self, call: CallDraft, frame: ReplayFrame, returned: Any) -> str | None:
        """Replay a call, and advance a block to its result. Return the reason why it can't be replayed, or None."""
        module, own = frame.interceptor.module, self._own_states.pop(frame, None)
        why = RAISED if returned is RAISED else self._why_refused(module)
        if why is not None:
            return why
        assert own is not None
        if (why := own.why_not_again()) is not None:
            return why
        frame.held, first, states = [], next_sequence_number(), self._own_draws.states()
        is_freed = module in self._freed or module in self._freed_before
        freed = self.values_to_free(call, module, returned) if is_freed else {}
        self.freed_values.free()
        refused = self.try_replay(call, frame, freed)
        if refused is None and module in self._blocks and module not in self._units.resharded:
            self.try_advance(call, frame, returned)
        leaks, draws = frame.is_held_outside(), self._own_draws.restore(states)
        if freed and (refused is not None or leaks or draws):
            self.hold_again(frame, freed)
            self._own_draws.restore(states)
        elif freed:
            self.relied_on.add(frame)
            frame.values = {place: weakref.ref(value) for value, place in freed.items()}
        if leaks:
            undo_appends(first, next_sequence_number())
            if frame.is_held_outside():
                self.leaked = str(frame.interceptor)
            call.result_value, refused = None, LEAKS
            self.refused[id(type(module))] = LEAKS
        frame.held = None
        if draws:
            call.result_value, refused = None, DRAWS
            self.refused[id(type(module))] = DRAWS
        return refused

    def _why_refused(self, module: nn.Module) -> str | None:
        """Return the reason not to replay a module that belongs to a refused class, or contains such a module; else
        None.
        """
        kinds = (id(type(inside)) for inside in module.modules()) if self.refused else ()
        return next((self.refused[kind] for kind in kinds if kind in self.refused), None)

    def try_replay(self, call: CallDraft, frame: ReplayFrame, freed: dict[Value, int]) -> str | None:
        """Replay a call and compare all tensors that it saves. Return the reason why it can't be replayed, or None.

        Values in `freed`, each with a place among the saved tensors, are freed as soon as the replay has brought them
        back: so a trial takes little more memory than the call. Raises ReplayMismatch if they are freed before, and the
        trial gives other bits.
        """
        packed = range(call.first_slot, call.stop_slot)
        inputs = {slot.value for slot in call.inputs}
        inside = {self.slots[n].value for n in packed} - inputs
        if not any(self.values[value].bytes >= MIN_BYTES for value in inside):
            return "it saves little besides its arguments"
        brought_back = [n for n in packed if not self.values[self.slots[n].value].is_seed]
        frame.values = {n - call.first_slot: weakref.ref(self._handles[n][0]) for n in brought_back}
        wrong, looked_ms = list[str](), [0.0]
        is_freed_before = bool(freed) and frame.interceptor.module in self._freed_before
        if is_freed_before:
            for value, place in freed.items():
                self._witness.saved(call.first_slot + place, self.slot_tensor(call.first_slot + place))
                self.freed_values.add(value, frame)

        def look(place: int, tensor: Tensor) -> None:
            began, n = now_ms(self._place), call.first_slot + place
            value = self._handles[n][0]
            if not wrong and (why := self.differs(n, tensor, frame)) is not None:
                wrong.append(why)
            elif not wrong and value.maker is not frame and freed.get(value) == place:
                if value not in self.freed_values:
                    self._witness.saved(n, self.slot_tensor(n))
                self.freed_values.add(value, frame)
            looked_ms[0] += now_ms(self._place) - began

        try:
            _, (call.host_ms, call.cost_ms), call.flops = timed(
                lambda: frame.look(look),
                self._flops,
                self._place,
                frame.forward_again,
                lambda: looked_ms[0],
                quietly=lambda: frame.look(lambda _place, _tensor: None),
            )
        except CAN_GO_WRONG as error:
            why = f"running it again failed: {summarize(error)}"
            if is_freed_before:
                raise ReplayMismatch(f"{frame.interceptor}: {why}, and the step ends before its update.") from error
            return why
        if wrong and is_freed_before:
            raise ReplayMismatch(f"{frame.interceptor}: {wrong[0]}, and the step ends before its update.")
        return wrong[0] if wrong else None

    def slot_tensor(self, n: int) -> Tensor:
        """Return the tensor of slot `n` with the geometry it was saved with."""
        value, view = self._handles[n]
        return value.get() if view is None else value.get().as_strided(*view)

    def differs(self, n: int, tensor: Tensor, frame: ReplayFrame) -> str | None:
        """Compare slot `n` with the tensor that a run of `frame` saves there. Return why the two differ, or None."""
        value, view = self._handles[n]
        if n and is_workspace(tensor, self.values[self.slots[n - 1].value].node):
            return None  # what the operator returns is compared
        if value in self.freed_values:  # the tensor was freed when it was saved, or by the first run
            tensor = tensor if view is None else tensor.as_strided(*view)
            run = "a third run" if value.maker is frame else "running it again"
            return f"{run} gives other bits for {self.slots[n].label}" if self._witness.differs(n, tensor) else None
        try:
            saved = value.get()
        except RuntimeError as error:
            # the tensor was changed in place, which is an error in PyTorch only if backward reads it
            return str(error)
        if view is not None and tensor.shape != saved.shape:  # the saved buffer was a view, and its copy is not
            saved, view = saved.as_strided(*view), None
        return (
            None if identical(tensor, saved, view) else f"running it again gives other bits for {self.slots[n].label}"
        )

    def try_advance(self, call: CallDraft, frame: ReplayFrame, returned: Any) -> None:
        """Advance a call to its result and compare the result."""
        if (advanced := advance(frame, returned, self._flops, self._place)) is not None:
            result, (call.advance_host_ms, call.advance_ms), call.advance_flops = advanced
            value, _ = super().known(result)  # its value was compared and freed, and stays freed
            call.result_value = self._index[value]
            self._passed_through.append(value)

    def values_to_free(self, call: CallDraft, module: nn.Module, returned: Any) -> dict[Value, int]:
        """Return the values that only this block's call has saved, each with its first ordinal among the call's saved
        tensors.
        """
        self.free_results()
        for result in tensors_in_call((returned,), {}):
            if result.requires_grad:  # before its operands are freed, which its recompute may need
                self._results.append(self.known(result)[0])
        needed = {slot.value for slot in call.inputs}
        if module in self._units.resharded:  # the results of a unit are read at places where the unit can't be replayed
            given = {storage_id(tensor) for tensor in tensors_in(returned)}
            needed |= {
                self._index[value]
                for value, _ in self._saved_in(call)
                if value.tensor is not None and storage_id(value.tensor) in given
            }
        freed: dict[Value, int] = {}
        for place, (value, _) in enumerate(self._saved_in(call)):
            draft = self.values[self._index[value]]
            if self._index[value] not in needed and draft.bytes and not draft.is_seed:
                freed.setdefault(value, place)
        return freed

    def hold_again(self, frame: ReplayFrame, freed: dict[Value, int]) -> None:
        """Keep the values that a trial of `frame` has freed, because the call can't be replayed after all."""
        values = {place: value for value, place in freed.items() if value.maker is frame}
        frame.values = {place: weakref.ref(value) for place, value in values.items()}
        if values:
            frame.look(lambda place, tensor: self.freed_values.give_back(values[place], tensor))

    def free_results(self) -> None:
        """Free results of earlier blocks, because all recomputes from them have been tried.

        A result without a recipe is freed too: no recompute depends on a tensor that neither a slot nor a call holds.
        """
        for value in self._results:
            index = self._index[value]
            maker = self.timings.recompute_of(value)
            if index in self._saved | self._given:
                continue
            if maker is not None and self.values[index].recipe:
                self._free_value(value, maker)
            elif self.values[index].recipe is None and value.kept:
                self.freed_values.add(value, None)
        self._passed_through += self._results
        self._results.clear()

    def _saved_in(self, call: CallDraft) -> list[tuple[Value, Geometry | None]]:
        return [self._handles[n] for n in range(call.first_slot, call.stop_slot)]

    # --- the probe

    def has_packed(self, handle: Handle) -> bool:
        return handle in self._slot_of

    def reading(self, handle: Handle) -> None:
        if not self._open:
            self.free_results()
            self.free_all()
        self.reads += 1
        self.time_late(handle)

    def given(self, handle: Handle, tensor: Tensor) -> None:
        self._witness.read(self._slot_of[handle], handle, tensor)

    def making(self, maker: Recomputation) -> None:
        self._meter.making()

    def made(self, maker: Recomputation, outputs: tuple[Tensor, ...]) -> None:
        if isinstance(maker, Recompute):
            self._meter.made(maker, outputs[0])
            if in_backward():
                self.timings.made(maker)
