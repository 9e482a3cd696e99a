"""Run an event stream through the simulated allocator, to compute the memory that a GPU would reserve."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lowtide.memory.allocator.caching import Addresses, OutOfMemory
from lowtide.memory.allocator.config import AllocatorConfig
from lowtide.memory.allocator.expandable_segments import make_allocator
from lowtide.memory.events import Allocate, EventStream, Free, Mark

ALLOCATOR = "allocator"
"""Label of marks for other requests of the program to the allocator; their data names the request."""

EMPTY_CACHE = "empty cache"
"""Request to give unused segments back to the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Request that the device refused; `index` is its event, or -1 for a block that existed before the events."""

    index: int
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Peaks that `torch.cuda.memory_stats` would report for a simulated EventStream. The peaks need not coincide in
    time.

    Blocks that existed before the events are included. After a failure, the peaks are those up to the failure.
    """

    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    n_retries: int
    """Number of times that the cache had to be emptied to make room; each time the device waits."""
    failure: Failure | None

    @property
    def fits(self) -> bool:
        """Return True if every request was met."""
        return self.failure is None


class Requests:
    """The requests of a stream to the allocator, computed once for repeated simulations of the stream."""

    __slots__ = ("at_entry", "rows")

    def __init__(self, stream: EventStream) -> None:
        self.at_entry = [(freed.block, freed.bytes) for freed in freed_from_entry(stream) if freed.bytes]
        """Number and bytes of each block that the stream frees and did not allocate."""
        self.rows = [*_rows(stream)]
        """Index of the event, number, bytes and CUDA stream of each block; frees have negative bytes, and requests to
        empty the cache none.
        """


def _rows(stream: EventStream) -> Iterator[tuple[int, int, int, int]]:
    """Yield a row for each allocation, free and emptying of the cache in `stream`; blocks of 0 bytes are left out.

    A row is (index of the event, block number, bytes, CUDA stream). Bytes are negative for a free, whose stream is 0.
    For an emptying of the cache, all but the index are 0.
    """
    streams = stream.streams
    for index, event in enumerate(stream.events):
        if type(event) is Allocate:
            if event.bytes:
                yield index, event.block, event.bytes, streams.get(event.block, 0)
        elif type(event) is Free:
            if event.bytes:
                yield index, event.block, -event.bytes, 0
        elif type(event) is Mark and (event.label, event.data) == (ALLOCATOR, EMPTY_CACHE):
            yield index, 0, 0, 0


def simulate(
    stream: EventStream | Requests,
    config: AllocatorConfig | None = None,
    capacity: int | None = None,
    *,
    total: int | None = None,
    at_entry: Iterable[int] = (),
    addresses: Addresses | None = None,
) -> Reserved:
    """Simulate the memory that `stream` makes the caching allocator reserve. Each CUDA stream has blocks of its own.

    `capacity` is the most bytes that can be reserved, None for no limit; `total` is the device's memory, to which a
    memory fraction applies. `at_entry` are the sizes of the blocks that exist when the stream begins and stay; blocks
    that the stream frees and did not allocate are added to them, with their sizes from the stream. `addresses` gives
    the addresses of new segments.
    """
    requests = Requests(stream) if isinstance(stream, EventStream) else stream
    allocator = make_allocator(config, capacity, total=total, addresses=addresses)
    malloc, free = allocator.malloc, allocator.free
    alive = {}
    index = -1
    failure = None
    try:
        for n_bytes in at_entry:
            if n_bytes:
                malloc(n_bytes)
        for block, n_bytes in requests.at_entry:
            alive[block] = malloc(n_bytes)
        for index, block, n_bytes, number in requests.rows:  # noqa: B007  for the failure
            if n_bytes > 0:
                alive[block] = malloc(n_bytes, number)
            elif n_bytes:
                free(alive.pop(block))
            else:
                allocator.empty_cache()
    except OutOfMemory as refusal:
        failure = Failure(
            index=index,
            requested_bytes=refusal.requested,
            allocated_bytes=refusal.allocated,
            reserved_bytes=refusal.reserved,
        )
    return Reserved(
        peak_requested_bytes=allocator.peak_requested,
        peak_allocated_bytes=allocator.peak_allocated,
        peak_reserved_bytes=allocator.peak_reserved,
        n_retries=allocator.n_retries,
        failure=failure,
    )


def freed_from_entry(stream: EventStream) -> tuple[Free, ...]:
    """Return the frees of blocks that the stream did not allocate."""
    allocated = {event.block for event in stream.events if type(event) is Allocate}
    return tuple(event for event in stream.events if type(event) is Free and event.block not in allocated)
