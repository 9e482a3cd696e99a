"""Backward passes over one graph, where backward runs through it more than once (`retain_graph=True`).

Values that are not kept are recomputed in each pass and freed in between. So a further pass over slots that an earlier
pass has read is presented to the planner as another call of the model. That call has the same addresses, ids and
storages, but values of its own, which are read in that pass. A decision about an address holds for all passes, and its
costs count in each pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from lowtide.planner.records import Profile, Slot
from lowtide.profiler.trace_reader import TraceIndex

Pass = dict[int, tuple[int, int]]
"""For each slot that a pass reads: the event of its first read, and the event by which its reader has run."""


def find_shared_passes(index: TraceIndex, end: int) -> list[Pass]:
    """Return, in order of time, the backward passes that read a slot which another pass reads too.

    For each slot that a pass reads, the result has the event of the read, and the event until which the tensor stays in
    memory: until the node releases it; if backward will run again, until another node reads, or as long as a graph that
    the pass made (`create_graph`) holds the tensor. `end` is the number of events.
    """
    by_number: dict[int, Pass] = {}
    over = following = end
    reader: object = None
    for event, slot, number, node in reversed(index.reads):
        if reader != (number, node):
            over, reader = following, (number, node)
        following = event
        held = index.freed_at.get(index.given.get((slot, number), -1), 0)
        _, last = by_number.setdefault(number, {}).get(slot, (event, max(over, held)))
        by_number[number][slot] = event, last
    times = Counter(slot for read in by_number.values() for slot in read)
    several = [read for read in by_number.values() if any(times[slot] > 1 for slot in read)]
    several.sort(key=lambda read: min(read.values()))  # sorted by event, because a pass may run inside another one
    for slot, released in index.release.items():
        read_in = [read for read in several if slot in read]
        if read_in:
            read_in[-1][slot] = read_in[-1][slot][0], released
    return several


def with_passes(profile: Profile, several: Sequence[Pass], position: Callable[[int], int]) -> Profile:
    """Return `profile` with a copy of its values, slots and calls for each of `several` backward passes.

    A slot's copy is read and released as in its pass. The first slots of `profile` must be the saved tensors in order.
    `position` maps an event to its position.
    """
    if not several:
        return profile
    in_any = {slot for read in several for slot in read}

    def read_in(read: Pass, number: int, slot: Slot) -> Slot:
        if number in read and not slot.is_input:
            first, over = read[number]
            return replace(slot, need=position(first), release=position(over))
        return slot if read is several[0] and number not in in_any else replace(slot, need=None, release=0)

    values, slots, calls = list(profile.values), list[Slot](), list(profile.calls)
    for n, read in enumerate(several):
        v, c = n * len(profile.values), n * len(profile.calls)
        if n:
            values += [
                replace(
                    value,
                    operands=tuple(need + v for need in value.operands),
                    overwrites=None if value.overwrites is None else value.overwrites + v,
                )
                for value in profile.values
            ]
            calls += [
                replace(
                    call,
                    parent=None if call.parent is None else call.parent + c,
                    result_value=None if call.result_value is None else call.result_value + v,
                )
                for call in profile.calls
            ]
        slots += [
            replace(read_in(read, number, slot), value=slot.value + v, call=slot.call + c)
            for number, slot in enumerate(profile.slots)
        ]
    return replace(profile, values=tuple(values), slots=tuple(slots), calls=tuple(calls))
