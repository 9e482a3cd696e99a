"""Run calls of an audited step a second time, and compare each tensor that a call saves with the original bit by bit.

Calls that save other tensors when they run again, or that have effects outside themselves, are not replayed.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from lowtide._torch.device_timing import now_ms
from lowtide._torch.nodes import is_workspace, next_sequence_number
from lowtide._torch.tensors import get_storage_id
from lowtide.errors import ReplayMismatch, summarize
from lowtide.profiler.audited_step import RAISED
from lowtide.profiler.measure_call import CAN_GO_WRONG, advance
from lowtide.profiler.recompute_trials import MIN_BYTES, RecomputeTrials
from lowtide.runtime.batch_tensors import collect_tensors
from lowtide.runtime.call_arguments import collect_call_tensors
from lowtide.state.appended_items import undo_appends
from lowtide.state.bitwise import identical
from lowtide.state.own_generators import DRAWS, OwnGenerators
from lowtide.state.side_effects import CodeState

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lowtide.profiler.audited_step import OpenCall
    from lowtide.profiler.drafts import CallDraft
    from lowtide.profiler.fsdp_units import FsdpUnits
    from lowtide.profiler.repeated_blocks import AuditedBlocks
    from lowtide.runtime.replay import ReplayFrame
    from lowtide.runtime.saved_values import Value

LEAKS = "it gives tensors to something outside it, such as a list: a replay would do so again"
CHANGED = "it reads something that changes between forward and backward"


class ReplayTrials:
    """Trials of the replays of an audited step's calls. The outcome and cost of each are recorded in the step's
    drafts.
    """

    def __init__(
        self,
        model: nn.Module,
        recomputes: RecomputeTrials,
        blocks: AuditedBlocks,
        units: FsdpUnits,
        refused: dict[int, str],
        *,
        frugal: bool,
    ) -> None:
        """Begin without trials. `refused` maps the id of a module class to the reason not to replay its modules;
        classes that turn out not to be replayable are added.
        """
        self._recomputes, self._step = recomputes, recomputes.step
        self._meter, self._freed = recomputes.meter, recomputes.freed
        self._blocks, self._units, self._refused, self._frugal = blocks, units, refused, frugal
        self.leaked: str | None = None
        """Name of the call whose trial replay left tensors referenced from outside the call, so that the step differed
        from the plain step; None without such a call.
        """
        self._own_draws = OwnGenerators(model)
        self._read: list[tuple[CallDraft, list[tuple[Tensor, int]]]] = []
        """Tensors that a replay of each call would read, with the versions that it needs."""

    def begin(self, opened: OpenCall, frame: ReplayFrame) -> None:
        """Prepare the trial of a call that may be replayed, by its `frame`: record the state that the call could
        change, and decide if its saved tensors will be freed.
        """
        module, step = frame.interceptor.module, self._step
        is_block = self._blocks.begin_call(module, in_call=step.open_calls[0].index)
        opened.frame, opened.is_freed = frame, is_block and not step.is_in_freed_block
        if self._explain_refusal(module) is None:
            opened.own_state = CodeState(module, frame.call_context)

    def try_call(self, opened: OpenCall) -> None:
        """Try to replay a call that has just ended, and to advance it if it is a repeated block.

        The outcome and the costs are recorded in the call's draft.
        """
        call, frame = opened.draft, opened.frame
        assert frame is not None
        call.refused = self._why_not(opened, frame)
        if call.refused is None:
            call.state = self._step.add_state(frame.call_context.nbytes)
            self._read.append((call, frame.list_read_tensors(with_arguments=not self._frugal)))

    def withdraw_overwritten(self) -> None:
        """Refuse calls whose replay would read a tensor that has been written to since the call."""
        written = self._recomputes.operand_changes.find_written_in_forward()
        lost = {
            call.id
            for call, read in self._read
            if any(tensor._version != version or get_storage_id(tensor) in written for tensor, version in read)
        }
        self._read.clear()
        for call in self._step.calls if lost else ():
            if call.id in lost:
                call.result_value, call.refused = None, CHANGED

    def _explain_refusal(self, module: nn.Module) -> str | None:
        """Return the reason not to replay a module that belongs to a refused class, or contains such a module; else
        None.
        """
        kinds = (id(type(inside)) for inside in module.modules()) if self._refused else ()
        return next((self._refused[kind] for kind in kinds if kind in self._refused), None)

    def _why_not(self, opened: OpenCall, frame: ReplayFrame) -> str | None:
        """Try to replay a call. Return the reason why it can't be replayed, or None if it can."""
        call, module, returned = opened.draft, frame.interceptor.module, opened.returned
        why = RAISED if returned is RAISED else self._explain_refusal(module)
        if why is not None:
            return why
        assert opened.own_state is not None
        if (why := opened.own_state.why_not_again()) is not None:
            return why
        frame.held, first, states = [], next_sequence_number(), self._own_draws.states()
        is_freed = opened.is_freed or module in self._blocks.freed_before
        freed = self._choose_values_to_free(call, module, returned) if is_freed else {}
        self._freed.free()
        refused = self._try_replay(call, frame, freed)
        if refused is None and module in self._blocks.repeated and module not in self._units.resharded:
            self._try_advance(call, frame, returned)
        leaks, draws = frame.is_held_outside(), self._own_draws.restore(states)
        if freed and (refused is not None or leaks or draws):
            self._freed.hold_again(frame, freed)
            self._own_draws.restore(states)
        elif freed:
            self._freed.leave_to(frame, freed)
        if leaks:
            undo_appends(first, next_sequence_number())
            if frame.is_held_outside():
                self.leaked = str(frame.interceptor)
        frame.held = None
        if leaks or draws:
            refused = self._refused[id(type(module))] = DRAWS if draws else LEAKS
            call.result_value = None
        return refused

    def _try_replay(self, call: CallDraft, frame: ReplayFrame, freed: dict[Value, int]) -> str | None:
        """Replay a call and compare all tensors that it saves. Return the reason why it can't be replayed, or None.

        Values in `freed`, each with a place among the saved tensors, are freed as soon as the replay has reproduced
        them, so that a trial takes little more memory than the call. Values of modules in `AuditedBlocks.freed_before`
        are freed before the replay. If their trial fails, ReplayMismatch is raised.
        """
        step, meter = self._step, self._meter
        inside = {slot.value for slot in step.list_slots(call)} - {slot.value for slot in call.inputs}
        if not any(step.values[value].bytes >= MIN_BYTES for value in inside):
            return "it saves little besides its arguments"
        frame.values = {
            place: weakref.ref(step.held[call.first_slot + place][0])
            for place, slot in enumerate(step.list_slots(call))
            if not step.values[slot.value].is_seed
        }
        is_freed_before = bool(freed) and frame.interceptor.module in self._blocks.freed_before
        for place in freed.values() if is_freed_before else ():
            self._freed.add_slot(call.first_slot + place, frame)
        wrong, looked_ms = list[str](), [0.0]

        def look(place: int, tensor: Tensor) -> None:
            began, n = now_ms(meter.place), call.first_slot + place
            value, _ = step.held[n]
            if not wrong and (why := self._differs(n, tensor, frame)) is not None:
                wrong.append(why)
            elif not wrong and value.maker is not frame and freed.get(value) == place:
                if value in self._freed:
                    self._freed.add(value, frame)
                else:
                    self._freed.add_slot(n, frame)
            looked_ms[0] += now_ms(meter.place) - began

        try:
            _, (call.host_ms, call.cost_ms), call.flops = meter.timed(
                lambda: frame.visit_saved(look),
                frame.run_forward_again,
                lambda: looked_ms[0],
                quietly=lambda: frame.visit_saved(lambda _place, _tensor: None),
            )
        except CAN_GO_WRONG as error:
            why = f"running it again failed: {summarize(error)}"
            if is_freed_before:
                raise ReplayMismatch(f"{frame.interceptor}: {why}, and the step ends before its update.") from error
            return why
        if wrong and is_freed_before:
            raise ReplayMismatch(f"{frame.interceptor}: {wrong[0]}, and the step ends before its update.")
        return wrong[0] if wrong else None

    def _differs(self, n: int, tensor: Tensor, frame: ReplayFrame) -> str | None:
        """Compare slot `n` with `tensor`, which a replay of `frame` saves there. Return the difference in words, or
        None.
        """
        step = self._step
        (value, view), label = step.held[n], step.slots[n].label
        if n and is_workspace(tensor, step.values[step.slots[n - 1].value].node):
            return None  # the operator's result is compared
        if value in self._freed:  # the tensor was freed when it was saved, or by the first run
            tensor = tensor if view is None else tensor.as_strided(*view)
            run = "a third run" if value.maker is frame else "running it again"
            return f"{run} gives other bits for {label}" if self._freed.witness.differs(n, tensor) else None
        try:
            saved = value.get()
        except RuntimeError as error:
            # the tensor was changed in place, which is an error in PyTorch only if backward reads it
            return str(error)
        if tensor.shape != saved.shape:
            if view is not None:  # the saved buffer was a view, and its copy is not
                saved, view = saved.as_strided(*view), None
            if tensor.numel() == saved.numel() and tensor.is_contiguous() and saved.is_contiguous():
                tensor = tensor.view(saved.shape)  # an argument that was a view of `saved` is a leaf in a replay
        return None if identical(tensor, saved, view) else f"running it again gives other bits for {label}"

    def _try_advance(self, call: CallDraft, frame: ReplayFrame, returned: Any) -> None:
        """Run a call forward again for its result alone. If the result has the same bits, record it and the costs."""
        if (advanced := advance(frame, returned, self._meter)) is not None:
            result, (call.advance_host_ms, call.advance_ms), call.advance_flops = advanced
            value, _ = self._recomputes.find_value(result)  # it was compared and freed, and stays freed
            call.result_value = self._step.index[value]
            self._step.passed_through.append(value)

    def _choose_values_to_free(self, call: CallDraft, module: nn.Module, returned: Any) -> dict[Value, int]:
        """Return the values that only this block's call has saved, each with its first ordinal among the call's saved
        tensors.
        """
        step = self._step
        self._freed.free_results()
        for result in collect_call_tensors((returned,), {}):
            if result.requires_grad:  # before its operands are freed, which its recompute may need
                self._freed.add_result(self._recomputes.known(result)[0])
        values = [step.held[n][0] for n in range(call.first_slot, call.stop_slot)]
        needed = {slot.value for slot in call.inputs}
        if module in self._units.resharded:  # the results of a unit are read at places where the unit can't be replayed
            given = {get_storage_id(tensor) for tensor in collect_tensors(returned)}
            needed |= {
                step.index[value]
                for value in values
                if value.tensor is not None and get_storage_id(value.tensor) in given
            }
        freed: dict[Value, int] = {}
        for place, value in enumerate(values):
            draft = step.draft(value)
            if step.index[value] not in needed and draft.bytes and not draft.is_seed:
                freed.setdefault(value, place)
        return freed
