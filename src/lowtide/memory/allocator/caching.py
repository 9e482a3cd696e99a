"""Simulate torch's CUDA caching allocator without CUDA: the block of each request, and the requests to the device.

The code follows c10/cuda/CUDACachingAllocator.cpp of torch 2.12 and 2.13 (native backend); the names in brackets are
functions there.

Left out: memory pools and graph capture, blocks used by several streams (call `free` when the last stream is done with
the block, "free_completed" in torch's history), and memory of the device that is not the allocator's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn

from lowtide.errors import LowtideError
from lowtide.memory.allocator.block_sizes import (
    MIN_BLOCK_SIZE,
    ROUND_LARGE,
    SMALL_SIZE,
    compute_segment_size,
    round_size,
)
from lowtide.memory.allocator.blocks import ADDRESS_BITS, Block, FreeBlocks
from lowtide.memory.allocator.config import UNLIMITED, AllocatorConfig
from lowtide.units import format_bytes

_FIRST_ADDRESS = 0x7F00_0000_0000
"""An address in the range that CUDA uses."""

Addresses = Iterator[int] | Callable[[int], int]

SegmentEvent = Callable[[str, int, int, int], None]
"""Callback with "segment_alloc", "segment_free", "segment_map" or "segment_unmap", an address, bytes and a stream."""


class OutOfMemory(LowtideError, RuntimeError):
    """Error of a simulated device that has no room even after the cache was emptied. Sizes are bytes.

    `requested` is the size of the tensor, and `missing` the size of the segment that the device refused.
    """

    exit_code = 1

    def __init__(self, *, requested: int, missing: int, allocated: int, reserved: int, capacity: int) -> None:
        self.requested, self.missing, self.capacity = requested, missing, capacity
        self.allocated, self.reserved = allocated, reserved
        super().__init__(
            f"out of memory: {format_bytes(missing)} more are needed for a request of {format_bytes(requested)}.\n"
            f"  Of {format_bytes(capacity)}, {format_bytes(reserved)} are reserved and {format_bytes(allocated)} "
            "allocated."
        )


class CachingAllocator:
    """Simulated allocator of one device under an AllocatorConfig; `make_allocator` also handles expandable segments.

    `capacity` is the memory that the device can give to the allocator: its memory less the CUDA context and other
    processes; None for no limit. `total` is all of its memory, to which `per_process_memory_fraction` applies; by
    default `capacity`. `on_segment` is called when a segment is requested from the device or released to it.

    New segments get invented, ascending addresses, unless `addresses` is an iterator or a function of bytes that
    returns others. Addresses decide only between free blocks of equal size.

    The levels `requested`, `allocated` and `reserved` are those of `torch.cuda.memory_stats`, and `peak_*` their peaks.
    """

    def __init__(
        self,
        config: AllocatorConfig | None = None,
        capacity: int | None = None,
        *,
        total: int | None = None,
        on_segment: SegmentEvent | None = None,
        addresses: Addresses | None = None,
    ) -> None:
        self.config = config or AllocatorConfig()
        self.capacity = total if capacity is None else capacity
        self.requested = self.peak_requested = 0
        self.allocated = self.peak_allocated = 0
        self.reserved = self.peak_reserved = 0
        self.n_retries = 0
        """Number of times that the device refused and the cache was emptied."""
        fraction, device = self.config.per_process_memory_fraction, capacity if total is None else total
        self._allowed = None if device is None or fraction == 1 else int(fraction * device)
        self._on_segment = on_segment
        self._addresses = addresses
        self._next_address = _FIRST_ADDRESS
        self._pools: dict[bool, dict[int, FreeBlocks]] = {True: {}, False: {}}
        self._small, self._large = self._pools[True], self._pools[False]
        self._rounds_to_512 = max(self.config.roundup_power2_divisions) <= 1
        self._max_split = self.config.max_split_size
        threshold = self.config.garbage_collection_threshold
        self._garbage_from = None if self._allowed is None or not threshold else int(threshold * self._allowed)
        self._n_searches = 0  # of allocations in the large pool: the clock by which idle time is measured

    def malloc(self, n_bytes: int, stream: int = 0) -> Block:
        """Allocate `n_bytes` on `stream` (malloc, alloc_found_block). Raises OutOfMemory if no memory is left."""
        size = (n_bytes + 511 & -512 or 512) if self._rounds_to_512 else round_size(n_bytes, self.config)
        free = (self._small if size <= SMALL_SIZE else self._large).get(stream) or self._make_pool(size, stream)
        if self._garbage_from is not None and not free.is_small:
            self._n_searches += 1
        at = self._find_best_fit(free, size)
        block = self._grow(free, size, n_bytes) if at < 0 else free.pop(at)
        rest = block.size - size
        if rest >= free.smallest_rest and size < self._max_split:
            used = Block(block.address, size, free)
            used.insert_before(block)
            block.address += size
            block.size = rest
            free.add(block)
            block = used
        block.is_used = True
        block.requested = n_bytes
        self.requested += n_bytes
        self.allocated += block.size
        if self.requested > self.peak_requested:
            self.peak_requested = self.requested
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def free(self, block: Block) -> None:
        """Free a block and join it with its free neighbours (free, free_block, try_merge_blocks)."""
        assert block.is_used, "freed twice"
        block.is_used = False
        self.requested -= block.requested
        self.allocated -= block.size
        self._join(block)
        block.idle_since = self._n_searches
        block.free.add(block)

    def empty_cache(self) -> None:
        """Release all unused memory to the device (release_cached_blocks)."""
        for free in (*self._large.values(), *self._small.values()):
            for block in tuple(free.blocks):
                self._give_back(block)

    def idle(self) -> Iterator[Block]:
        """Yield every free block."""
        return (block for pool in self._pools.values() for free in pool.values() for block in free.blocks)

    def segments(self, used: Iterable[Block]) -> list[list[Block]]:
        """Return the blocks of each contiguous range held from the device, by address; `used` are all blocks in use."""
        segments: list[list[Block]] = []
        for block in sorted((*used, *self.idle()), key=lambda block: block.address):
            if block.previous is not None and block.previous.mapped:
                segments[-1].append(block)
            else:
                segments.append([block])
        return segments

    def adopt(
        self, address: int, n_bytes: int, used: Sequence[tuple[int, int, int]], *, stream: int, is_small: bool
    ) -> list[Block]:
        """Add a segment that exists before any allocation; return a block for each entry of `used`, in order.

        Each entry of `used` is an offset, a size and the requested bytes, sorted by offset; memory between the entries
        is free.
        """
        free = self._pools[is_small].get(stream) or self._make_pool(SMALL_SIZE if is_small else n_bytes, stream)
        blocks: list[Block] = []
        last: Block | None = None
        end = address
        for offset, size, requested in (*used, (n_bytes, 0, 0)):
            for at, length, is_used in ((end, address + offset - end, False), (address + offset, size, True)):
                if not length:
                    continue
                block = Block(at, length, free)
                block.previous, last = last, block
                if block.previous is not None:
                    block.previous.next = block
                if is_used:
                    block.is_used, block.requested = True, requested
                    blocks.append(block)
                else:
                    free.add(block)
            end = address + offset + size
        self.requested += sum(block.requested for block in blocks)
        self.allocated += sum(block.size for block in blocks)
        self.peak_requested = max(self.peak_requested, self.requested)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self._reserve("segment_alloc", address, n_bytes, stream)
        return blocks

    def _make_pool(self, size: int, stream: int) -> FreeBlocks:
        is_small = size <= SMALL_SIZE
        free = FreeBlocks(stream, is_small, MIN_BLOCK_SIZE if is_small else SMALL_SIZE + 1)
        return self._pools[is_small].setdefault(stream, free)

    def _find_best_fit(self, free: FreeBlocks, size: int) -> int:
        """Return the index in `free.blocks` of the best fit for `size` bytes, -1 if none fits (get_free_block)."""
        at = bisect_left(free.keys, size << ADDRESS_BITS)  # free.first(size), inlined because this is the hottest line
        if at == len(free.keys):
            return -1
        return at if self._max_split == UNLIMITED or self._may_serve(free.blocks[at], size) else -1

    def _may_serve(self, block: Block, size: int) -> bool:
        """Return True if `max_split_size` allows `block` to serve a request of `size` bytes.

        A request below `max_split_size` is served by a block below it. For any other request, the block must be less
        than `max_non_split_rounding` bytes larger than the request.
        """
        if size < self.config.max_split_size:
            return block.size < self.config.max_split_size
        return block.size < size + self.config.max_non_split_rounding

    def _join(self, block: Block) -> None:
        """Merge a block that is in no list of free blocks with its free neighbours of the same `mapped` state."""
        before, after = block.previous, block.next
        if before is not None and not before.is_used and before.mapped is block.mapped:
            self._forget(before)
            block.address = before.address
            block.size += before.size
            block.previous = before.previous
            if before.previous is not None:
                before.previous.next = block
        if after is not None and not after.is_used and after.mapped is block.mapped:
            self._forget(after)
            block.size += after.size
            block.next = after.next
            if after.next is not None:
                after.next.previous = block

    def _forget(self, block: Block) -> None:
        if block.mapped:
            block.free.remove(block)
        else:
            block.free.unmapped.remove(block)

    def _grow(self, free: FreeBlocks, size: int, n_bytes: int) -> Block:
        """Return a new block of at least `size` bytes from the device; it is not listed in `free` yet.

        If the device refuses, cached memory is released before another attempt. Raises OutOfMemory if that does not
        help.
        """
        self._collect_garbage()
        block = self._from_device(free, size)
        if block is None and self._release_oversize(free, size):
            block = self._from_device(free, size)
        if block is None:
            self.n_retries += 1
            self.empty_cache()
            block = self._from_device(free, size) or self._refuse(size, n_bytes)
        return block

    def _from_device(self, free: FreeBlocks, size: int) -> Block | None:
        """Return a new segment that fits `size` bytes (alloc_block).

        Return None if the segment does not fit on the device, or in the memory fraction of this process.
        """
        n_bytes = compute_segment_size(size, self.config)
        if not self._is_allowed(n_bytes) or not self._has_room(n_bytes):
            return None
        block = Block(self._choose_address(n_bytes), n_bytes, free)
        self._reserve("segment_alloc", block.address, n_bytes, free.stream)
        return block

    def _is_allowed(self, n_bytes: int) -> bool:
        return self._allowed is None or self.reserved + n_bytes <= self._allowed

    def _has_room(self, n_bytes: int) -> bool:
        return self.capacity is None or self.reserved + n_bytes <= self.capacity

    def _choose_address(self, n_bytes: int) -> int:
        if isinstance(self._addresses, Iterator):
            return next(self._addresses)
        if self._addresses is not None:
            return self._addresses(n_bytes)
        address = self._next_address
        self._next_address += -(-n_bytes // ROUND_LARGE) * ROUND_LARGE  # granularity of cudaMalloc
        return address

    def _reserve(self, event: str, address: int, n_bytes: int, stream: int) -> None:
        self.reserved += n_bytes if event in ("segment_alloc", "segment_map") else -n_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        if self._on_segment is not None:
            self._on_segment(event, address, n_bytes, stream)

    def _give_back(self, block: Block) -> None:
        """Release a free block to the device if it is a whole segment (release_blocks)."""
        if not block.is_split:
            block.free.remove(block)
            self._reserve("segment_free", block.address, block.size, block.free.stream)

    def _release_oversize(self, free: FreeBlocks, size: int) -> bool:
        """Release free blocks that are too large to be split, to make room for `size` bytes.

        Returns True if there were enough such blocks (release_available_cached_blocks).
        """
        max_split = self.config.max_split_size
        if max_split == UNLIMITED:
            return False
        wanted = max(size, max_split)
        at = free.first(wanted)
        if at < len(free.blocks):
            self._give_back(free.blocks[at])
            return True
        released = 0
        for block in reversed(tuple(free.blocks)):
            if released >= wanted or block.size < max_split:
                break
            released += block.size
            self._give_back(block)
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Release the large segments that have been idle the longest, until reserved memory is within its limit.

        The limit is `garbage_collection_threshold`. Each round releases the segments of at least average idle time
        (garbage_collect_cached_blocks).
        """
        if self._garbage_from is None or self.reserved <= self._garbage_from:
            return
        surplus = self.reserved - self._garbage_from
        idle = [block for free in self._large.values() for block in free.blocks if not block.is_split]
        while surplus > 0 and idle:
            ages = [self._n_searches - block.idle_since for block in idle]
            mean_age = sum(ages) / len(ages)  # at least one block is as old as the average, so the list gets shorter
            old = [block for block, age in zip(idle, ages, strict=True) if age >= mean_age]
            for block in old:
                surplus -= block.size
                self._give_back(block)
            idle = [block for block in idle if block not in old]

    def _refuse(self, size: int, n_bytes: int) -> NoReturn:
        limits = [limit for limit in (self.capacity, self._allowed) if limit is not None]
        raise OutOfMemory(
            requested=n_bytes,
            missing=compute_segment_size(size, self.config),
            allocated=self.allocated,
            reserved=self.reserved,
            capacity=min(limits),
        )
