"""From what an audit and a trace saw to the frozen `Profile`: events become positions, tensors become storages."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from lowtide.memory.events import Allocate, EventStream, Free, Mark
from lowtide.planner.records import Call, Fingerprint, Profile, Slot, Static, Storage, Value
from lowtide.rehearsal.drafts import CallDraft, SlotDraft, ValueDraft
from lowtide.rehearsal.gone import withdraw_gone
from lowtide.rehearsal.in_place import Together, in_place, with_their_own
from lowtide.rehearsal.passes import in_passes, passes
from lowtide.rehearsal.seen import Seen, levels, natural_ends, phases, watch
from lowtide.rehearsal.unrecorded import blocks_of
from lowtide.remat.recipes import RECIPES


def assemble(
    *,
    values: list[ValueDraft],
    slots: list[SlotDraft],
    calls: list[CallDraft],
    kept: set[int],
    replayed: frozenset[str],
    stream: EventStream,
    entry: Mapping[int, int],
    fingerprint: Fingerprint,
    static: Static,
    step_ms: float,
    measured_plain_peak_bytes: int | None,
    given: list[list[str]],
    written_over: list[Together],
    offload_bytes_per_ms: float | None = None,
    notes: tuple[str, ...] = (),
) -> Profile:
    """The profile of a traced step. `kept` are the slots that were kept in the trace, `replayed` its replayed calls.

    `entry` has the address of each block that was there before, `given` for each call of the model from outside what it
    was given, in words; `written_over` are the gradients that were written in place.
    """
    values = _upstream_first(values, slots, calls)
    seen = watch(stream, entry)
    noted = blocks_of(values, seen)
    withdraw_gone(values, slots, seen)
    end = len(stream.events)
    several = passes(seen, end)
    natural_ends(seen, slots, kept, {k for k, call in enumerate(calls) if call.id in replayed})
    _one_storage_a_value(seen, slots)
    seeds = {n for n in seen.block_of_slot if values[slots[n].value].is_seed}
    always = {seen.block_of_slot.pop(n) for n in seeds}  # there in any plan: part of the level, not of a decision
    seen.block_of_input = {at: block for at, block in seen.block_of_input.items() if block not in always}
    there = {*seen.block_of_slot.values(), *seen.block_of_input.values(), *noted.values()}
    blocks = sorted(there, key=seen.born.__getitem__)
    number = {block: i for i, block in enumerate(blocks)}
    cuts = sorted(
        {0}
        | {seen.born[b] for b in blocks}
        | {seen.dies.get(b, end) for b in blocks}
        | set(seen.read.values())
        | set(seen.release.values())
        | set(seen.enter.values())
        | set(seen.leave.values())
        | {event for read in several for first_and_over in read.values() for event in first_and_over}
    )

    def position(event: int) -> int:
        return bisect.bisect_right(cuts, event) - 1

    groups = _groups(values, slots, calls)
    _even_out(values, calls, groups)
    last_block = max((seen.leave[k] for k, group in groups.items() if group and k in seen.leave), default=end)
    storage_of_value: dict[int, int] = {}
    labels: dict[int, str] = {}
    for n, block in seen.block_of_slot.items():
        storage_of_value.setdefault(slots[n].value, number[block])
        labels.setdefault(block, slots[n].label)
    for (k, place), block in seen.block_of_input.items():
        if place < len(calls[k].inputs):
            storage_of_value.setdefault(calls[k].inputs[place].value, number[block])
            labels.setdefault(block, calls[k].inputs[place].label)
    for i, block in noted.items():
        storage_of_value[i] = number[block]
        labels.setdefault(block, "operand")
    states = [i for i, draft in enumerate(values) if draft.state_of is not None]
    storage_of_value |= {i: len(blocks) + n for n, i in enumerate(states)}
    level = levels(stream, cuts, set(blocks), seen)
    found = Profile(
        fingerprint=fingerprint,
        static=static,
        base_bytes=with_their_own(written_over, level),
        gradient_bytes=level.gradients,
        phases=phases(seen, position),
        storages=tuple(
            Storage(
                bytes=seen.bytes[block],
                born=position(seen.born[block]),
                dies=position(seen.dies.get(block, end)),
                label=labels.get(block, ""),
                category="loss head" if seen.born[block] > last_block else "activations",
            )
            for block in blocks
        )
        + tuple(_state(values[i], calls, seen, position) for i in states),
        values=tuple(
            Value(
                storage=storage_of_value.get(i),
                bytes=draft.bytes,
                node=draft.node,
                recipe=draft.recipe,
                needs=draft.needs,
                over=draft.over,
                cost_ms=draft.cost_ms,
                flops=draft.flops,
                expensive=draft.flops > 0 or (draft.recipe in RECIPES and RECIPES[draft.recipe].expensive),
                transient_bytes=draft.transient_bytes,
                refused=draft.refused,
            )
            for i, draft in enumerate(values)
        ),
        slots=tuple(
            Slot(
                address=slot.address,
                value=slot.value,
                storage=number.get(seen.block_of_slot.get(n, -1)),
                call=slot.call,
                label=slot.label,
                need=position(seen.read[n]) if n in seen.read else None,
                release=position(seen.release[n]) if n in seen.release else None,
            )
            for n, slot in enumerate(slots)
        )
        + tuple(
            Slot(
                address=slot.address,
                value=slot.value,
                storage=number.get(seen.block_of_input.get((k, place), -1)),
                call=slot.call,
                label=slot.label,
                is_input=True,
            )
            for k, call in enumerate(calls)
            for place, slot in enumerate(call.inputs)
        )
        + tuple(
            Slot(
                address=f"{call.id}@{len(call.inputs)}",
                value=call.state,
                storage=storage_of_value[call.state],
                call=k,
                label=f"{call.id}: random numbers and buffers",
                is_input=True,
                is_state=True,
            )
            for k, call in enumerate(calls)
            if call.state is not None
        ),
        calls=tuple(
            Call(
                id=call.id,
                cls=call.cls,
                parent=call.parent,
                enter=position(seen.enter[k]),
                exit=position(seen.leave[k]),
                cost_ms=call.cost_ms,
                flops=call.flops,
                refused=call.refused,
                group=groups.get(k),
                gives=call.gives,
                advance_ms=call.advance_ms,
                advance_flops=call.advance_flops,
                state_bytes=0 if call.state is None else values[call.state].bytes,
                begins_at=level.first[position(seen.enter[k])],
            )
            for k, call in enumerate(calls)
        ),
        step_ms=step_ms,
        measured_plain_peak_bytes=measured_plain_peak_bytes,
        in_place=in_place(written_over, level),
        given=tuple(dict.fromkeys(map(", ".join, given))),
        offload_bytes_per_ms=offload_bytes_per_ms,
        notes=notes,
    )
    return in_passes(found, several, position)


def _one_storage_a_value(seen: Seen, slots: list[SlotDraft]) -> None:
    """What a graph made by backward saves of something that was made again is, where that is kept, the kept memory."""
    first: dict[int, int] = {}
    for n, block in seen.block_of_slot.items():
        known = first.setdefault(slots[n].value, block)
        if block in seen.copies:
            seen.block_of_slot[n] = known


def _state(draft: ValueDraft, calls: list[CallDraft], seen: Seen, position: Callable[[int], int]) -> Storage:
    """Memory that is there only where something that holds it is to be made again, from the beginning of a call on."""
    assert draft.state_of is not None
    at = position(seen.enter[draft.state_of])
    return Storage(bytes=draft.bytes, born=at, dies=at, label=f"{calls[draft.state_of].id}: to make it again")


def transients(values: Iterable[ValueDraft], stream: EventStream) -> None:
    """Fill in what each audited recipe allocated beyond its result, from the marks around its run."""
    peaks: dict[int, int] = {}
    level = start = peak = 0
    for event in stream.events:
        if type(event) is Allocate:
            level += event.bytes
            peak = max(peak, level)
        elif type(event) is Free:
            level -= event.bytes
        elif type(event) is Mark and event.label == "making":
            start = peak = level
        elif type(event) is Mark and event.label == "made" and isinstance(event.data, int):
            peaks[event.data] = peak - start
    for draft in values:
        if draft.spent is not None and draft.recipe is not None:
            draft.transient_bytes = max(0, peaks.get(draft.spent, 0) - draft.bytes)


def _upstream_first(values: list[ValueDraft], slots: list[SlotDraft], calls: list[CallDraft]) -> list[ValueDraft]:
    """The values, each after what it needs; slots and inputs are pointed to the new places."""
    place: dict[int, int] = {}

    def visit(index: int) -> int:
        if index not in place:
            needs = tuple(visit(need) for need in values[index].needs)
            place[index] = len(ordered)
            over = values[index].over
            ordered.append(replace(values[index], needs=needs, over=None if over is None else place[over]))
        return place[index]

    ordered: list[ValueDraft] = []
    for index in range(len(values)):
        visit(index)
    for slot in (*slots, *(slot for call in calls for slot in call.inputs)):
        slot.value = place[slot.value]
    for call in calls:
        call.gives = None if call.gives is None else place[call.gives]
        call.state = None if call.state is None else place[call.state]
    return ordered


def _even_out(values: list[ValueDraft], calls: list[CallDraft], groups: dict[int, str]) -> None:
    """Give equal work equal times, the least that was measured: a plan shall not follow the noise of one run."""
    alike: dict[object, list[ValueDraft | CallDraft]] = {}
    for value in values:
        if value.recipe is not None:
            needs = tuple(values[need].bytes for need in value.needs)
            alike.setdefault((value.recipe, value.bytes, value.flops, needs), []).append(value)
    for index, group in groups.items():
        alike.setdefault(group, []).append(calls[index])
    for drafts in alike.values():
        cost_ms = min(draft.cost_ms for draft in drafts)
        for draft in drafts:
            draft.cost_ms = cost_ms
    for group in set(groups.values()):
        given = [calls[k] for k, its in groups.items() if its == group and calls[k].gives is not None]
        least_ms = min((call.advance_ms for call in given), default=0.0)
        for call in given:
            call.advance_ms = least_ms


def _groups(values: list[ValueDraft], slots: list[SlotDraft], calls: list[CallDraft]) -> dict[int, str]:
    """Calls that save the same kinds of tensors of the same sizes in the same order, where there are at least two."""
    keys: dict[int, str] = {}
    for k, call in enumerate(calls):
        saved = [
            (values[slots[n].value].node, values[slots[n].value].bytes) for n in range(call.first_slot, call.stop_slot)
        ]
        if saved and call.parent is not None:
            keys[k] = hashlib.blake2b(repr((call.cls, saved)).encode(), digest_size=6).hexdigest()
    count: dict[str, int] = {}
    for key in keys.values():
        count[key] = count.get(key, 0) + 1
    return {k: key for k, key in keys.items() if count[key] > 1}
