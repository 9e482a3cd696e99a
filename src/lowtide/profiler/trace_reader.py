"""Read the recording of a traced step: positions of its events, and memory levels between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lowtide.memory.events import Allocate, EventStream, Free, Mark
from lowtide.profiler.drafts import SlotDraft
from lowtide.profiler.trace_marks import (
    Entered,
    Exited,
    GivenAway,
    Gradients,
    HeldForRecompute,
    OperandCaptured,
    Packed,
    ReadInBackward,
    RecomputeEnded,
    RecomputeStarted,
    Released,
    Unreferenced,
    WrittenInPlace,
)


@dataclass(slots=True)
class TraceIndex:
    """Indices of a traced step's events in its stream."""

    block_of_slot: dict[int, int] = field(default_factory=dict)
    block_of_input: dict[tuple[int, int], int] = field(default_factory=dict)
    captured: list[tuple[int, int | None]] = field(default_factory=list)
    """Call and block of each operand that autograd does not record; the block is None if it was allocated before the
    step.
    """
    packed: dict[int, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)
    """First read of each slot."""
    reads: list[tuple[int, int, int, int]] = field(default_factory=list)
    """All reads: event, slot, number of the backward pass, number of the node."""
    release: dict[int, int] = field(default_factory=dict)
    """For each slot the event at which its last holder releases it: its handle, a graph made by backward, or compiled
    code.
    """
    given: dict[tuple[int, int], int] = field(default_factory=dict)
    """By slot and pass, the block that a reader may hold: a graph made by backward (`create_graph`), or compiled code,
    which holds the block until its computation is done.
    """
    enter: dict[int, int] = field(default_factory=dict)
    leave: dict[int, int] = field(default_factory=dict)
    allocated_at: dict[int, int] = field(default_factory=dict)
    freed_at: dict[int, int] = field(default_factory=dict)
    unreferenced: dict[int, tuple[int, int]] = field(default_factory=dict)
    """For each block the last event at which references from outside the rehearsal were found, and the first at which
    none were.
    """
    bytes: dict[int, int] = field(default_factory=dict)
    copies: set[int] = field(default_factory=set)
    """Blocks that a recompute or replay has allocated, or holds until it runs."""
    gradients: set[int] = field(default_factory=set)
    in_place: list[tuple[int, str, int]] = field(default_factory=list)
    """Event, kind of node and bytes of each gradient that was written over the incoming gradient."""


def index_trace(stream: EventStream, entry: Mapping[int, int]) -> TraceIndex:
    """Build the index of a stream; `entry` has the address of each block that was allocated before the step."""
    builder = _IndexBuilder(entry)
    for i, event in enumerate(stream.events):
        if type(event) is Allocate:
            builder.add_allocation(i, event)
        elif type(event) is Free:
            builder.add_free(i, event)
        elif type(event) is Mark:
            builder.add_mark(i, event.data)
    return builder.finish()


class _IndexBuilder:
    """Builder of a trace's index from its events, in their order."""

    def __init__(self, entry: Mapping[int, int]) -> None:
        self._index = TraceIndex()
        self._before = {address: block for block, address in entry.items()}
        """Blocks of the time before the step, by address."""
        self._at: dict[int, int] = {}
        """Blocks that are alive, by address."""
        self._addresses: dict[int, int] = {}
        self._recomputed: set[int] = set()
        """Blocks that recomputes and replays have allocated."""
        self._n_running = 0
        """Number of recomputes and replays that are running."""
        self._marks = [0]
        """Events of the marks, starting with 0."""

    def add_allocation(self, i: int, event: Allocate) -> None:
        self._at[event.address] = event.block
        self._addresses[event.block] = event.address
        self._index.allocated_at[event.block], self._index.bytes[event.block] = i, event.bytes
        if self._n_running:
            self._recomputed.add(event.block)

    def add_free(self, i: int, event: Free) -> None:
        self._index.freed_at[event.block] = i
        address = self._addresses.get(event.block)
        if address is not None and self._at.get(address) == event.block:
            del self._at[address]

    def add_mark(self, i: int, mark: object) -> None:
        index, at = self._index, self._at
        match mark:
            case Unreferenced(blocks):
                for address, n_marks in blocks:
                    if address in at:
                        last_seen = self._marks[-min(n_marks, len(self._marks))]
                        index.unreferenced.setdefault(at[address], (last_seen, i))
                return  # not counted: `n_marks` is the number of all other marks
            case RecomputeStarted():
                self._n_running += 1
            case RecomputeEnded():
                self._n_running -= 1
            case Gradients(addresses, at_entry):
                there = self._before if at_entry else at
                index.gradients.update(there[address] for address in addresses if address in there)
            case HeldForRecompute(addresses):
                index.copies.update(at[address] for address in addresses if address in at)
            case Packed(slot, address):
                index.packed[slot] = i
                if address in at:
                    index.block_of_slot[slot] = at[address]
            case ReadInBackward(slot, number, node):
                index.read.setdefault(slot, i)
                index.reads.append((i, slot, number, node))
            case GivenAway(slot, number, address):
                if address in at:
                    index.given[slot, number] = at[address]
            case Released(slot):
                index.release[slot] = i
            case OperandCaptured(call, address):
                index.captured.append((call, at.get(address)))
            case Entered(call, addresses):
                index.enter[call] = i
                index.block_of_input |= {(call, n): at[address] for n, address in enumerate(addresses) if address in at}
            case Exited(call):
                index.leave[call] = i
            case WrittenInPlace(kind, n_bytes):
                index.in_place.append((i, kind, n_bytes))
        self._marks.append(i)

    def finish(self) -> TraceIndex:
        index = self._index
        # blocks that are never freed belong to a library, such as cuBLAS's workspace
        index.copies |= self._recomputed & index.freed_at.keys()
        for (slot, _), block in index.given.items():
            if slot in index.release:
                index.release[slot] = max(index.release[slot], index.freed_at.get(block, 0))
        return index


def set_lifetimes_without_trace(index: TraceIndex, slots: list[SlotDraft], kept: set[int], replayed: set[int]) -> None:
    """Set the end of each memory block that only the trace kept alive (`index.freed_at`) to the event at which a step
    without the trace would free the block.

    The trace looks for references from elsewhere only when it adds a mark, so it knows the last mark with such
    references and the first mark without. If the last module call that used the block ended between these two marks,
    the block ends with that call, else at the second mark. Blocks that outlive backward, such as the indices of a
    sparse gradient, keep their recorded end.
    """
    over = max(index.release.values(), default=0)
    after_backward = min(
        (allocated_at for allocated_at in index.allocated_at.values() if allocated_at > over), default=math.inf
    )
    held: dict[int, int] = {}
    for n in kept & index.block_of_slot.keys():
        block = index.block_of_slot[n]
        held[block] = max(held.get(block, 0), index.leave[slots[n].call])
    for (call, _), block in index.block_of_input.items():
        if call in replayed or block in held:
            held[block] = max(held.get(block, 0), index.leave[call])
    for call, captured in index.captured:
        if captured is not None:
            held[captured] = max(held.get(captured, 0), index.leave[call])
    for block in held.keys() & index.unreferenced.keys():  # the trace did not keep the other blocks alive
        if index.freed_at.get(block, math.inf) > after_backward:
            continue
        last, first = index.unreferenced[block]
        end = held[block] if last <= held[block] <= first else first
        index.freed_at[block] = min(end, index.freed_at.get(block, end))


@dataclass(frozen=True, slots=True)
class MemoryLevels:
    """Bytes in memory at each position, except in blocks of storages (which slots hold) and in recomputed copies."""

    most: tuple[int, ...]
    """Largest level within each position."""
    gradients: tuple[int, ...]
    """Part of `most` that is gradients; negative where gradients from before the step were freed."""
    first: tuple[int, ...]
    """Level at the beginning of each position."""
    written: tuple[tuple[int, int, tuple[str, int]], ...]
    """Gradients written in place: position, bytes just before, and (kind of node, bytes of the gradient)."""


def compute_memory_levels(stream: EventStream, cuts: list[int], storages: set[int], index: TraceIndex) -> MemoryLevels:
    """Return the bytes in memory, except in the blocks `storages` and in recomputed copies, for each position.

    `cuts` has the event with which each position begins.
    """
    in_place = {i: (node, n_bytes) for i, node, n_bytes in index.in_place}
    written = []
    level = gradients = 0
    base, gradient, first = [0] * len(cuts), [0] * len(cuts), [0] * len(cuts)
    p = -1
    for i, event in enumerate(stream.events):
        if type(event) is Allocate and event.block not in storages and event.block not in index.copies:
            level += event.bytes
            gradients += event.bytes if event.block in index.gradients else 0
        elif type(event) is Free and event.block not in storages and event.block not in index.copies:
            level -= event.bytes
            gradients -= event.bytes if event.block in index.gradients else 0
        if p + 1 < len(cuts) and cuts[p + 1] == i:
            p += 1
            base[p], gradient[p], first[p] = level, gradients, level
        elif level > base[p]:
            base[p], gradient[p] = level, gradients
        if i in in_place:
            written.append((p, level, in_place[i]))
    for q in range(p + 1, len(cuts)):
        base[q], gradient[q], first[q] = level, gradients, level
    return MemoryLevels(tuple(base), tuple(gradient), tuple(first), tuple(written))


def phases(index: TraceIndex, at: Callable[[int], int]) -> dict[str, int]:
    """Return the first position of forward, backward and the time after backward; `at` maps events to positions."""
    forward = min(index.enter.values(), default=0)
    backward = min(index.read.values(), default=forward)
    after = max((*index.read.values(), *index.release.values()), default=backward)
    return {"forward": at(forward), "backward": at(backward), "after backward": at(after)}
