"""Assemble the frozen `Profile` from an audit and a trace: events become positions, tensors become storages."""

from __future__ import annotations

import bisect
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lowtide.memory.events import EventStream, compute_peaks_between
from lowtide.planner.records import Call, Fingerprint, Profile, Slot, Static, StepClocks, Storage, Value
from lowtide.profiler.audit_inplace import InPlaceGroup, in_place, with_their_own
from lowtide.profiler.backward_passes import Pass, find_shared_passes, with_passes
from lowtide.profiler.drafts import CallDraft, SlotDraft, StepDrafts, ValueDraft
from lowtide.profiler.freed_operands import reject_unavailable
from lowtide.profiler.step_sections import TimedSections
from lowtide.profiler.trace_marks import RecomputeEnded, RecomputeStarted
from lowtide.profiler.trace_reader import (
    TraceIndex,
    compute_memory_levels,
    index_trace,
    phases,
    set_lifetimes_without_trace,
)
from lowtide.profiler.unrecorded_operands import map_operand_blocks
from lowtide.runtime.recipes import RECIPES


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A traced step: its recording, the slots kept and calls replayed in it, and the drafts that an audit filled in."""

    drafts: StepDrafts
    kept: set[int]
    """Slots that were kept in the trace."""
    replayed: frozenset[str]
    """Calls that were replayed in the trace."""
    stream: EventStream
    entry: Mapping[int, int]
    """Address of each block that was allocated before the step."""
    input_shapes: list[list[str]]
    """Shapes and dtypes of the arguments of each call of the model from outside, as text."""
    written_over: list[InPlaceGroup]
    """Gradients that were written in place."""
    allows_in_place: bool
    """True if gradients may be written in place."""
    implementations: dict[str, str] = field(default_factory=dict)
    """Implementations of recipes by kind of node, where the audit has chosen another one than the first."""


def assemble(
    step: TracedStep,
    *,
    fingerprint: Fingerprint,
    static: Static,
    plain: tuple[int | None, float],
    sections: TimedSections | None = None,
    offload_bytes_per_ms: float | None = None,
    notes: tuple[str, ...] = (),
) -> Profile:
    """Return the profile of a traced step.

    `plain` has the peak in bytes and the time in ms of the step without any plan. `sections` has times of that step's
    sections on the clocks of host and device; None where both are one resource, or were not measured: then all times
    add up.
    """
    slots, calls = step.drafts.slots, step.drafts.calls
    values = _order_upstream_first(step.drafts)
    index = index_trace(step.stream, step.entry)
    captured = map_operand_blocks(values, index)
    reject_unavailable(values, slots, index)
    several = find_shared_passes(index, len(step.stream.events))
    replayed = {k for k, call in enumerate(calls) if call.id in step.replayed}
    set_lifetimes_without_trace(index, slots, step.kept, replayed)
    _unify_storages(index, slots)
    groups = _groups(values, step.drafts)
    _equalize_times(values, calls, groups)
    records = _Records(step, values, index, captured, several, groups, has_clocks=sections is not None)
    levels = compute_memory_levels(step.stream, records.cuts, set(records.blocks), index)
    profile = Profile(
        fingerprint=fingerprint,
        static=static,
        base_bytes=with_their_own(step.written_over, levels),
        gradient_bytes=levels.gradients,
        phases=phases(index, records.position),
        storages=records.storages(),
        values=records.values(),
        slots=records.slots(),
        calls=records.calls(levels.first),
        step_ms=plain[1],
        clocks=None if sections is None else records.clocks(sections),
        measured_plain_peak_bytes=plain[0],
        in_place=in_place(step.written_over, levels),
        allows_in_place=step.allows_in_place,
        implementations=step.implementations,
        input_shapes=tuple(dict.fromkeys(map(", ".join, step.input_shapes))),
        offload_bytes_per_ms=offload_bytes_per_ms,
        notes=notes,
    )
    return with_passes(profile, several, records.position)


class _Records:
    """Builder of the records of a step from its drafts: events become positions, and blocks become storages."""

    def __init__(
        self,
        step: TracedStep,
        values: list[ValueDraft],
        index: TraceIndex,
        captured: dict[int, int],
        several: Sequence[Pass],
        groups: dict[int, str],
        *,
        has_clocks: bool,
    ) -> None:
        self._has_clocks = has_clocks
        self._values, self._slots, self._calls = values, step.drafts.slots, step.drafts.calls
        self._index, self._groups = index, groups
        self._end = len(step.stream.events)
        seeds = {n for n in index.block_of_slot if values[self._slots[n].value].is_seed}
        always = {index.block_of_slot.pop(n) for n in seeds}  # present under any plan, and so part of the level
        index.block_of_input = {at: block for at, block in index.block_of_input.items() if block not in always}
        planned = {*index.block_of_slot.values(), *index.block_of_input.values(), *captured.values()}
        self.blocks = sorted(planned, key=index.allocated_at.__getitem__)
        """Blocks that a plan decides on."""
        self._number = {block: i for i, block in enumerate(self.blocks)}
        self.cuts = sorted(
            {0}
            | {index.allocated_at[b] for b in self.blocks}
            | {index.freed_at.get(b, self._end) for b in self.blocks}
            | set(index.read.values())
            | set(index.release.values())
            | set(index.enter.values())
            | set(index.leave.values())
            | {event for read in several for first_and_over in read.values() for event in first_and_over}
        )
        """First event of each position."""
        self._storage_of_value: dict[int, int] = {}
        self._labels: dict[int, str] = {}
        for n, block in index.block_of_slot.items():
            self._name(self._slots[n], block)
        for (k, place), block in index.block_of_input.items():
            if place < len(self._calls[k].inputs):
                self._name(self._calls[k].inputs[place], block)
        for i, block in captured.items():
            self._storage_of_value[i] = self._number[block]
            self._labels.setdefault(block, "operand")
        self._states = [i for i, draft in enumerate(values) if draft.state_of is not None]
        self._storage_of_value |= {i: len(self.blocks) + n for n, i in enumerate(self._states)}

    def _name(self, slot: SlotDraft, block: int) -> None:
        self._storage_of_value.setdefault(slot.value, self._number[block])
        self._labels.setdefault(block, slot.label)

    def position(self, event: int) -> int:
        """Return the position that contains `event`."""
        return bisect.bisect_right(self.cuts, event) - 1

    def clocks(self, sections: TimedSections) -> StepClocks:
        """Return the plain step's times at each position: the times of each section, spread evenly over its
        positions.
        """
        index, enter, first_read = self._index, dict[str, list[int]](), dict[str, list[int]]()
        for k, call in enumerate(self._calls):
            enter.setdefault(call.id, []).append(self.position(index.enter[k]))
            reads = [index.read[n] for n in range(call.first_slot, call.stop_slot) if n in index.read]
            if reads:
                first_read.setdefault(call.id, []).append(self.position(min(reads)))
        return sections.spread({False: enter, True: first_read}, len(self.cuts))

    def storages(self) -> tuple[Storage, ...]:
        """Return the storages of memory blocks, then the storages of state (such as RNG state) held only for recomputes
        and replays.
        """
        index = self._index
        of_groups = (index.leave[k] for k, group in self._groups.items() if group and k in index.leave)
        last_block = max(of_groups, default=self._end)
        storages = (
            Storage(
                bytes=index.bytes[block],
                allocated_at=self.position(index.allocated_at[block]),
                freed_at=self.position(index.freed_at.get(block, self._end)),
                label=self._labels.get(block, ""),
                category="loss head" if index.allocated_at[block] > last_block else "activations",
            )
            for block in self.blocks
        )
        return (*storages, *(self._state(self._values[i]) for i in self._states))

    def _state(self, draft: ValueDraft) -> Storage:
        """Return the storage of state, such as RNG state, that a call holds for recomputes and replays.

        Only plans that need the state hold it, from the call's start on; in other plans it takes no memory.
        """
        assert draft.state_of is not None
        at = self.position(self._index.enter[draft.state_of])
        label = f"{self._calls[draft.state_of].id}: to make it again"
        return Storage(bytes=draft.bytes, allocated_at=at, freed_at=at, label=label)

    def values(self) -> tuple[Value, ...]:
        """Return the values, each after its operands."""
        return tuple(
            Value(
                storage=self._storage_of_value.get(i),
                bytes=draft.bytes,
                node=draft.node,
                recipe=draft.recipe,
                operands=draft.operands,
                overwrites=draft.overwrites,
                cost_ms=draft.cost_ms + (0.0 if self._has_clocks else draft.host_ms),
                host_ms=draft.host_ms if self._has_clocks else 0.0,
                flops=draft.flops,
                expensive=draft.flops > 0 or (draft.recipe in RECIPES and RECIPES[draft.recipe].expensive),
                transient_bytes=draft.transient_bytes,
                refused=draft.refused,
            )
            for i, draft in enumerate(self._values)
        )

    def slots(self) -> tuple[Slot, ...]:
        """Return slots: saved tensors, then arguments of calls (held for their replays), then states of calls."""
        index = self._index
        saved = (
            Slot(
                address=slot.address,
                value=slot.value,
                storage=self._number.get(index.block_of_slot.get(n, -1)),
                call=slot.call,
                label=slot.label,
                need=self.position(index.read[n]) if n in index.read else None,
                release=self.position(index.release[n]) if n in index.release else None,
            )
            for n, slot in enumerate(self._slots)
        )
        inputs = (
            Slot(
                address=slot.address,
                value=slot.value,
                storage=self._number.get(index.block_of_input.get((k, place), -1)),
                call=slot.call,
                label=slot.label,
                is_input=True,
            )
            for k, call in enumerate(self._calls)
            for place, slot in enumerate(call.inputs)
        )
        states = (
            Slot(
                address=f"{call.id}@{len(call.inputs)}",
                value=call.state,
                storage=self._storage_of_value[call.state],
                call=k,
                label=f"{call.id}: random numbers and buffers",
                is_input=True,
                is_state=True,
            )
            for k, call in enumerate(self._calls)
            if call.state is not None
        )
        return (*saved, *inputs, *states)

    def calls(self, first_level: Sequence[int]) -> tuple[Call, ...]:
        """Return the module calls. `first_level` has, for each position, the bytes in memory at its beginning."""
        index = self._index
        return tuple(
            Call(
                id=call.id,
                cls=call.cls,
                parent=call.parent,
                enter=self.position(index.enter[k]),
                exit=self.position(index.leave[k]),
                cost_ms=call.cost_ms + (0.0 if self._has_clocks else call.host_ms),
                host_ms=call.host_ms if self._has_clocks else 0.0,
                flops=call.flops,
                refused=call.refused,
                group=self._groups.get(k),
                result_value=call.result_value,
                advance_ms=call.advance_ms + (0.0 if self._has_clocks else call.advance_host_ms),
                advance_host_ms=call.advance_host_ms if self._has_clocks else 0.0,
                advance_flops=call.advance_flops,
                state_bytes=0 if call.state is None else self._values[call.state].bytes,
                begins_at=first_level[self.position(index.enter[k])],
            )
            for k, call in enumerate(self._calls)
        )


def _unify_storages(index: TraceIndex, slots: list[SlotDraft]) -> None:
    """In `index`, move each slot that saved a copy of a recomputed value to the block of the value's first slot.

    Graphs that backward creates save such copies. Under a plan that keeps the value, these slots save the kept memory.
    """
    first: dict[int, int] = {}
    for n, block in index.block_of_slot.items():
        known = first.setdefault(slots[n].value, block)
        if block in index.copies:
            index.block_of_slot[n] = known


def set_transient_bytes(values: Iterable[ValueDraft], stream: EventStream) -> None:
    """Set `transient_bytes` of each audited recipe: the bytes that it allocated beyond its result, between the marks
    around its run.
    """
    peaks = {ended.run: n_bytes for ended, n_bytes in compute_peaks_between(stream, RecomputeStarted, RecomputeEnded)}
    for draft in values:
        if draft.spent is not None and draft.recipe is not None:
            most = max(peaks.get(run, 0) for run in (draft.spent, *draft.other_runs))
            draft.transient_bytes = max(0, most - draft.bytes)


def _order_upstream_first(step: StepDrafts) -> list[ValueDraft]:
    """Return the values sorted so that operands come first; adapt the indices of values in slots and calls."""
    values, slots, calls = step.values, step.slots, step.calls
    place: dict[int, int] = {}

    def visit(index: int) -> int:
        if index not in place:
            operands = tuple(visit(need) for need in values[index].operands)
            place[index] = len(ordered)
            over = values[index].overwrites
            ordered.append(replace(values[index], operands=operands, overwrites=None if over is None else place[over]))
        return place[index]

    ordered: list[ValueDraft] = []
    for index in range(len(values)):
        visit(index)
    for slot in (*slots, *(slot for call in calls for slot in call.inputs)):
        slot.value = place[slot.value]
    for call in calls:
        call.result_value = None if call.result_value is None else place[call.result_value]
        call.state = None if call.state is None else place[call.state]
    return ordered


def _equalize_times(values: list[ValueDraft], calls: list[CallDraft], groups: dict[int, str]) -> None:
    """Set the times of drafts with equal work to the least time measured among them, so that noise does not affect
    plans.

    `groups` names the group of each call that has equals, as `_groups` returns it.
    """
    alike: dict[object, list[ValueDraft | CallDraft]] = {}
    for value in values:
        if value.recipe is not None:
            operands = tuple(values[need].bytes for need in value.operands)
            alike.setdefault((value.recipe, value.bytes, value.flops, operands), []).append(value)
    for index, group in groups.items():
        alike.setdefault(group, []).append(calls[index])
    for drafts in alike.values():
        cost_ms, host_ms = min(draft.cost_ms for draft in drafts), min(draft.host_ms for draft in drafts)
        for draft in drafts:
            draft.cost_ms, draft.host_ms = cost_ms, host_ms
    for group in set(groups.values()):
        given = [calls[k] for k, its in groups.items() if its == group and calls[k].result_value is not None]
        least_ms = min((call.advance_ms for call in given), default=0.0)
        least_host_ms = min((call.advance_host_ms for call in given), default=0.0)
        for call in given:
            call.advance_ms, call.advance_host_ms = least_ms, least_host_ms


def _groups(values: list[ValueDraft], step: StepDrafts) -> dict[int, str]:
    """Map the index of each inner call to the name of its group, if other calls of its class save tensors of the same
    kinds and sizes in the same order. Calls without an equal are left out.
    """
    keys: dict[int, str] = {}
    for k, call in enumerate(step.calls):
        saved = [(draft.node, draft.bytes) for draft in (values[slot.value] for slot in step.list_slots(call))]
        if saved and call.parent is not None:
            keys[k] = hashlib.blake2b(repr((call.cls, saved)).encode(), digest_size=6).hexdigest()
    count = Counter(keys.values())
    return {k: key for k, key in keys.items() if count[key] > 1}
