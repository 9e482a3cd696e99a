"""What a real allocator did, as sizes and order, and the same requests through the simulated one.

A trace is a memory snapshot without addresses, times and stack frames: the blocks that were there, then `alloc`,
`free`, `segment_alloc` and `segment_free` in their order. Only the first two are given to the simulation, with a
call of `empty_cache` where a run of `segment_free` begins; what the segments did is the answer it is judged by.
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
from lowtide.memory.allocator.expandable_segments import allocator_for
from lowtide.memory.untrusted_files import check_numbers, in_one_line, unpacked

FORMAT = 1
_APART = 2**40
"""Segments that were recorded are laid out this far from each other, in the order of their addresses."""


class TraceEvent(NamedTuple):
    """`kind` is "alloc", "free", "segment_alloc" or "segment_free"; `id` numbers blocks, or segments, of the trace."""

    kind: str
    id: int
    bytes: int
    stream: int


class Segment(NamedTuple):
    """Memory taken from the device before the first event; `rank` orders addresses."""

    id: int
    bytes: int
    stream: int
    is_small: int
    rank: int


class Held(NamedTuple):
    """A block in use before the first event; `requested` bytes of its `bytes`, `offset` into its segment."""

    id: int
    segment: int
    offset: int
    bytes: int
    requested: int
    is_inferred: int
    """1 where the size had to be deduced, since the block is gone in the snapshot that the trace was made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One recording; `expected` holds what was recorded of the outcome, by the names of the file."""

    name: str
    settings: AllocatorConfig
    segments: tuple[Segment, ...]
    held: tuple[Held, ...]
    ranks: tuple[int, ...]
    """The rank of each segment's address, also of those that come later."""
    events: tuple[TraceEvent, ...]
    expected: dict[str, Any]

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """The trace in a file of JSON, compressed if its name ends in .gz. Raises LowtideError for anything else."""
        path = Path(path)
        try:
            return cls.from_record(msgspec.json.decode(unpacked(path)))
        except (OSError, ValueError, RecursionError) as error:
            why = in_one_line(str(error))
            raise LowtideError(f"{path} is not an allocator trace of format {FORMAT}: {why}.") from error

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Trace:
        """The trace in what JSON made of such a file. Raises LowtideError for anything else."""
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

    def recorded_curve(self) -> list[int]:
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
    """What the simulation made of a trace. Bytes; `reserved_bytes` has one entry for each `alloc`, right after it."""

    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    final_requested_bytes: int
    final_allocated_bytes: int
    final_reserved_bytes: int
    reserved_bytes: tuple[int, ...]


def replay(trace: Trace, config: AllocatorConfig | None = None, *, as_recorded: bool = True) -> Replayed:
    """Give the requests of `trace` to the simulated allocator, under `config` if not the one it was recorded with.

    With `as_recorded`, new segments get the order of the addresses that they had on the GPU, which decides between
    equal free blocks; otherwise they follow each other. Raises OutOfMemory where the memory fraction is too small, and
    LowtideError for a trace that contradicts itself.
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
    """The allocator after the last event, and what it held from the device after each `alloc`."""
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
    """The allocator before the first event, and its blocks in use."""
    if config != trace.settings or config.expandable_segments:  # its segments would have been others
        allocator = allocator_for(config)
        return allocator, {held.id: allocator.malloc(held.requested) for held in trace.held}
    after = max((segment.rank for segment in trace.segments), default=-1) + 1
    addresses = (_address(trace.ranks[event.id]) for event in trace.events if event.kind == "segment_alloc")
    allocator = allocator_for(config, addresses=addresses if as_recorded else map(_address, count(after)))
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
