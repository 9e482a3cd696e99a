"""A graph that backward runs through more than once, as with `retain_graph=True`.

What was let go of is made again in each pass, and gone in between. So a pass over what an earlier one has read is told
to the planner as if the model had been called once more: the same addresses, ids and storages, but values of its own,
which are read in that pass. What is decided about an address holds for all, and costs are counted in each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from lowtide.planner.records import Profile, Slot
from lowtide.profiler.trace_reader import TraceIndex

Pass = dict[int, tuple[int, int]]
"""For each slot that a pass reads: the event of its first read, and the one by which its reader has run."""


def passes(seen: TraceIndex, end: int) -> list[Pass]:
    """The passes that read a slot which others read too, in order; none where each slot is read in one.

    What a node has read is there until the node lets go of it; or, if backward is to come again, until another node
    reads something; or as long as a graph that the pass made (`create_graph`) holds it. `end` is the number of events.
    """
    found: dict[int, Pass] = {}
    over = following = end
    reader: object = None
    for event, slot, number, node in reversed(seen.reads):
        if reader != (number, node):
            over, reader = following, (number, node)
        following = event
        held = seen.freed_at.get(seen.given.get((slot, number), -1), 0)
        _, last = found.setdefault(number, {}).get(slot, (event, max(over, held)))
        found[number][slot] = event, last
    times = Counter(slot for read in found.values() for slot in read)
    several = [read for read in found.values() if any(times[slot] > 1 for slot in read)]
    several.sort(key=lambda read: min(read.values()))  # not by number: a pass may run inside of another
    for slot, released in seen.release.items():
        read_in = [read for read in several if slot in read]
        if read_in:
            read_in[-1][slot] = read_in[-1][slot][0], released
    return several


def in_passes(profile: Profile, several: Sequence[Pass], position: Callable[[int], int]) -> Profile:
    """`profile`, whose first slots are the saved tensors in their order, with values for each of `several` passes."""
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
