"""Traces of real CUDA caching allocators, and their replay through the simulated allocator.

A trace is a memory snapshot without addresses, times and stack frames: the blocks in use at the start, then `alloc`,
`free`, `segment_alloc` and `segment_free` events in their order. The simulation gets only `alloc` and `free` events,
with a call of `empty_cache` where a run of `segment_free` begins. The recorded segment events are the answer that the
simulation is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import convert

from lowtide.errors import LowtideError
from lowtide.memory.allocator.blocks import Block
from lowtide.memory.allocator.caching import CachingAllocator
from lowtide.memory.allocator.config import AllocatorConfig
from lowtide.memory.allocator.expandable_segments import make_allocator
from lowtide.memory.untrusted_files import check_numbers, in_one_line, unpacked

FORMAT = 1
_APART = 2**40
"""Distance in bytes between the simulated addresses of recorded segments, which keep the order of their addresses."""


class TraceEvent(NamedTuple):
    """An allocator event; `kind` is "alloc", "free", "segment_alloc" or "segment_free", `id` numbers blocks, or
    segments.
    """

    kind: str
    id: int
    bytes: int
    stream: int


class Segment(NamedTuple):
    """A segment taken from the device before the first event; `rank` is its address's position among all segments."""

    id: int
    bytes: int
    stream: int
    is_small: int
    rank: int


class Held(NamedTuple):
    """A block in use before the first event, with its size, the bytes `requested` of it, and its `offset` in its
    segment.
    """

    id: int
    segment: int
    offset: int
    bytes: int
    requested: int
    is_inferred: int
    """1 if the block's size had to be deduced, because the snapshot no longer contains the block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One recording; `expected` holds the recorded outcome, by the names in the trace's file."""

    name: str
    settings: AllocatorConfig
    segments: tuple[Segment, ...]
    held: tuple[Held, ...]
    ranks: tuple[int, ...]
    """Position of each segment's address among all segments, also of segments allocated later."""
    events: tuple[TraceEvent, ...]
    expected: dict[str, Any]

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Read a trace from a JSON file, compressed if its name ends in .gz. Raises LowtideError for any other file."""
        path = Path(path)
        try:
            return cls.from_record(msgspec.json.decode(unpacked(path)))
        except (OSError, ValueError, RecursionError) as error:
            why = in_one_line(str(error))
            raise LowtideError(f"{path} is not an allocator trace of format {FORMAT}: {why}.") from error

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Trace:
        """Build a trace from the decoded JSON of a trace file. Raises LowtideError for any other data."""
        try:
            check_numbers(record)
            if record["format"] != FORMAT:
                raise ValueError(f"format {record['format']} found")
            return cls(
                name=convert(record["name"], str),
                settings=_settings(record["allocator_settings"]),
                segments=convert(record["initial"]["segments"], tuple[Segment, ...]),
                held=convert(record["initial"]["blocks"], tuple[Held, ...]),
                ranks=convert(record["segment_addr_rank"], tuple[int, ...]),
                events=convert(record["events"], tuple[TraceEvent, ...]),
                expected=convert(record["expected"], dict[str, Any]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = in_one_line(repr(error))
            raise LowtideError(f"this is not an allocator trace of format {FORMAT}: {why}.") from error

    def compute_recorded_curve(self) -> list[int]:
        """Return the bytes that were reserved on the GPU after each allocation."""
        changes = dict(self.expected["reserved_after_segment_event"])
        level = self.expected["initial_reserved"]
        curve = []
        for index, event in enumerate(self.events):
            level = changes.get(index, level)
            if event.kind == "alloc":
                curve.append(level)
        return curve


def _settings(record: dict[str, Any]) -> AllocatorConfig:
    if "text" in record:
        return AllocatorConfig.parse(record["text"])
    return AllocatorConfig(expandable_segments=record["expandable_segments"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Result of replaying a trace, in bytes; `reserved_bytes` has the reserved bytes right after each `alloc` event."""

    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    final_requested_bytes: int
    final_allocated_bytes: int
    final_reserved_bytes: int
    reserved_bytes: tuple[int, ...]


def replay(trace: Trace, config: AllocatorConfig | None = None, *, as_recorded: bool = True) -> Replayed:
    """Replay the requests of `trace` through the simulated allocator, with the settings `config`, by default the
    trace's.

    With `as_recorded`, new segments get addresses in the order that they had on the GPU, which decides between equal
    free blocks; otherwise each new segment gets a higher address. Raises OutOfMemory if the memory fraction is too
    small, and LowtideError for a trace that contradicts itself.
    """
    try:
        allocator, curve = _replayed(trace, config or trace.settings, as_recorded)
    except (KeyError, IndexError, ValueError) as error:
        raise LowtideError(
            f"trace {in_one_line(trace.name)} contradicts itself: {in_one_line(repr(error))}."
        ) from error
    return Replayed(
        peak_requested_bytes=allocator.peak_requested,
        peak_allocated_bytes=allocator.peak_allocated,
        peak_reserved_bytes=allocator.peak_reserved,
        final_requested_bytes=allocator.requested,
        final_allocated_bytes=allocator.allocated,
        final_reserved_bytes=allocator.reserved,
        reserved_bytes=tuple(curve),
    )


def _replayed(trace: Trace, config: AllocatorConfig, as_recorded: bool) -> tuple[CachingAllocator, list[int]]:
    """Return the simulated allocator after the last event, and the bytes it had reserved after each `alloc` event."""
    allocator, alive = _start(trace, config, as_recorded)
    malloc, free = allocator.malloc, allocator.free
    curve: list[int] = []
    is_emptying = False
    for kind, number, n_bytes, stream in trace.events:
        if kind == "alloc":
            alive[number] = malloc(n_bytes, stream)
            curve.append(allocator.reserved)
            is_emptying = False
        elif kind == "free":
            free(alive.pop(number))
            is_emptying = False
        elif kind == "segment_free" and not is_emptying:
            allocator.empty_cache()
            is_emptying = True
    return allocator, curve


def _start(trace: Trace, config: AllocatorConfig, as_recorded: bool) -> tuple[CachingAllocator, dict[int, Block]]:
    """Build the simulated allocator as before the first event; return it with its blocks in use, by their number."""
    if config != trace.settings or config.expandable_segments:  # other settings give other segments
        allocator = make_allocator(config)
        return allocator, {held.id: allocator.malloc(held.requested) for held in trace.held}
    after = max((segment.rank for segment in trace.segments), default=-1) + 1
    addresses = (_address(trace.ranks[event.id]) for event in trace.events if event.kind == "segment_alloc")
    allocator = make_allocator(config, addresses=addresses if as_recorded else map(_address, count(after)))
    held_in: dict[int, list[Held]] = {}
    for held in trace.held:
        held_in.setdefault(held.segment, []).append(held)
    alive: dict[int, Block] = {}
    for segment in trace.segments:
        inside = sorted(held_in.get(segment.id, ()), key=lambda held: held.offset)
        blocks = allocator.adopt(
            _address(segment.rank),
            segment.bytes,
            [(held.offset, held.bytes, held.requested) for held in inside],
            stream=segment.stream,
            is_small=bool(segment.is_small),
        )
        alive.update(zip((held.id for held in inside), blocks, strict=True))
    return allocator, alive


def _address(rank: int) -> int:
    return (rank + 1) * _APART
