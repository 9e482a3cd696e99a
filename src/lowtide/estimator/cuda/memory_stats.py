"""Statistics of the simulated allocator while a script runs, as `torch.cuda.memory_stats` returns them on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from lowtide.memory.allocator.block_sizes import SMALL_SEGMENT
from lowtide.memory.allocator.blocks import Block
from lowtide.memory.allocator.config import AllocatorConfig
from lowtide.memory.allocator.expandable_segments import make_allocator
from lowtide.memory.allocator.segment_addresses import DriverAddresses
from lowtide.memory.allocator.simulation import ALLOCATOR, EMPTY_CACHE
from lowtide.memory.events import Allocate, Event, EventStream, Mark
from lowtide.memory.memory_timeline import Timeline
from lowtide.memory.snapshots.write import make_snapshot

RESET_PEAKS, RESET_SUMS = "reset peaks", "reset sums"
"""Data of ALLOCATOR marks for calls of the script that reset statistics."""

_BYTES = ("allocated_bytes", "active_bytes", "requested_bytes")
_KINDS = (*_BYTES, "reserved_bytes", "allocation", "active", "segment", "inactive_split", "inactive_split_bytes")
_OF_EACH = ("current", "peak", "allocated", "freed")
_POOLS = ("all", "large_pool", "small_pool")


class Source(Protocol):
    """Protocol of recorders that `Usage` reads while they record: StorageLedger, DeferredCudaModule."""

    @property
    def streams(self) -> Mapping[int, int]:
        """CUDA stream number of each block that is not on the default stream, by block number."""

    @property
    def version(self) -> object:
        """Object that changes when events that `since` has returned earlier are changed."""

    def since(self, position: int) -> Iterable[Event]:
        """Return the events from `position` on. The first ones allocate the storages that existed before the steps."""

    def mark(self, label: str, data: object = None) -> None:
        """Append a mark to the events."""


class Usage:
    """Statistics of a caching allocator that simulates the events of `source` on a GPU of unlimited memory."""

    def __init__(self, source: Source, config: AllocatorConfig) -> None:
        self._source, self._config = source, config
        self._version: object = None

    def stats(self) -> Counter[str]:
        """Return all statistics by their names in `torch.cuda.memory_stats`; 0 for those that are not simulated."""
        if self._version is None or self._version != self._source.version:
            self._begin()
        for event in self._source.since(self._position):
            self._position += 1
            self._simulate(event)
        self._count_inactive_splits()
        stats = Counter({f"{kind}.{pool}.{what}": n for (kind, pool, what), n in self._counts.items()})
        stats["num_ooms"] = stats["num_alloc_retries"] = 0
        stats["num_device_alloc"] = stats["segment.all.allocated"]
        stats["num_device_free"] = stats["segment.all.freed"]
        return stats

    def level(self, name: str) -> int:
        """Return one statistic of the simulated allocator, by its name in `torch.cuda.memory_stats`."""
        return self.stats()[name]

    def mark(self, what: str) -> None:
        """Append a mark for a call of the script, such as a reset of peaks, to the events."""
        self._source.mark(ALLOCATOR, what)

    def snapshot(self) -> dict[str, Any]:
        """Return all events so far in the format of `torch.cuda.memory._snapshot`."""
        events = tuple(self._source.since(0))
        return make_snapshot(Timeline(EventStream(events, "cuda", self._source.streams)), self._config)

    def _begin(self) -> None:
        self._version, self._position = self._source.version, 0
        self._allocator = make_allocator(self._config, on_segment=self._count_segment, addresses=DriverAddresses())
        self._blocks: dict[int, Block] = {}
        self._counts = Counter(
            dict.fromkeys(((kind, pool, what) for kind in _KINDS for pool in _POOLS for what in _OF_EACH), 0)
        )

    def _simulate(self, event: Event) -> None:
        if isinstance(event, Mark):
            if event.label == ALLOCATOR:
                self._handle_mark(event.data)
        elif event.bytes and type(event) is Allocate:
            block = self._blocks[event.block] = self._allocator.malloc(
                event.bytes, self._source.streams.get(event.block, 0)
            )
            self._count_block(block, 1)
        elif event.bytes:
            block = self._blocks.pop(event.block)
            self._count_block(block, -1)
            self._allocator.free(block)

    def _handle_mark(self, what: object) -> None:
        if what == EMPTY_CACHE:
            self._allocator.empty_cache()
        for kind, pool, part in self._counts:
            if what == RESET_PEAKS and part == "peak":
                self._counts[kind, pool, part] = self._counts[kind, pool, "current"]
            elif what == RESET_SUMS and part in ("allocated", "freed"):
                self._counts[kind, pool, part] = 0

    def _count_block(self, block: Block, sign: int) -> None:
        amounts = dict(zip(_BYTES, (block.size, block.size, block.requested), strict=True), allocation=1, active=1)
        self._add_amounts(amounts, sign, is_small=block.free.is_small)

    def _count_segment(self, event: str, address: int, n_bytes: int, stream: int) -> None:
        sign = 1 if event in ("segment_alloc", "segment_map") else -1
        self._add_amounts({"reserved_bytes": n_bytes, "segment": 1}, sign, is_small=n_bytes <= SMALL_SEGMENT)

    def _count_inactive_splits(self) -> None:
        """Update the statistics of inactive splits, the free parts of segments, from the allocator's free blocks.

        This runs whenever statistics are read, so the peak is the largest value at these times, not at all events.
        """
        gaps = {(kind, pool): 0 for kind in ("inactive_split", "inactive_split_bytes") for pool in _POOLS}
        for block in self._allocator.idle():
            for pool in ("all", "small_pool" if block.free.is_small else "large_pool"):
                gaps["inactive_split", pool] += block.is_split
                gaps["inactive_split_bytes", pool] += block.size * block.is_split
        for place, amount in gaps.items():
            self._counts[*place, "current"] = amount
            self._counts[*place, "peak"] = max(amount, self._counts[*place, "peak"])

    def _add_amounts(self, amounts: dict[str, int], sign: int, *, is_small: bool) -> None:
        for kind, amount in amounts.items():
            for pool in ("all", "small_pool" if is_small else "large_pool"):
                current = self._counts[kind, pool, "current"] = self._counts[kind, pool, "current"] + sign * amount
                self._counts[kind, pool, "allocated" if sign > 0 else "freed"] += amount
                self._counts[kind, pool, "peak"] = max(current, self._counts[kind, pool, "peak"])
