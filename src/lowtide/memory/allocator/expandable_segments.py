"""Expandable segments: one range of virtual memory per stream and pool, whose pages are mapped on demand.

After Note [Expandable Segments] and the code it describes in c10/cuda/CUDACachingAllocator.cpp of torch 2.12 and 2.13.
No public recording uses this mode, so it is tested against sequences worked out by hand and against its invariants.
"""

from __future__ import annotations

from lowtide.memory.allocator.block_sizes import MIN_BLOCK_SIZE, SMALL_SEGMENT, compute_segment_size
from lowtide.memory.allocator.blocks import Block, FreeBlocks
from lowtide.memory.allocator.caching import Addresses, CachingAllocator, SegmentEvent
from lowtide.memory.allocator.config import UNLIMITED, AllocatorConfig

_ENDLESS = 2**44
"""Bytes of virtual memory of a segment if the size of the device's memory is unknown."""


class ExpandableAllocator(CachingAllocator):
    """The caching allocator with `expandable_segments`. Pages are 2 MiB for small blocks, else large_segment_size."""

    def __init__(
        self,
        config: AllocatorConfig,
        capacity: int | None = None,
        *,
        total: int | None = None,
        on_segment: SegmentEvent | None = None,
        addresses: Addresses | None = None,
    ) -> None:
        super().__init__(config, capacity, total=total, on_segment=on_segment, addresses=addresses)
        device = capacity if total is None else total
        # An eighth more than the device has, so that pages can move from holes in the front to the end.
        self._span = _ENDLESS if device is None else device + device // 8
        self._max_split = UNLIMITED  # a block of an expandable segment is always split

    def _make_pool(self, size: int, stream: int) -> FreeBlocks:
        free = super()._make_pool(size, stream)
        free.smallest_rest = MIN_BLOCK_SIZE
        return free

    def _find_best_fit(self, free: FreeBlocks, size: int) -> int:
        """Return the index in `free.blocks` of the best fit for `size` bytes, -1 for none.

        A block that fits is skipped while the next one, counted with the unmapped memory behind it, is smaller.
        """
        at = free.first(size)
        if at == len(free.blocks):
            return -1
        while at + 1 < len(free.blocks) and _compute_growable_size(free.blocks[at + 1]) < _compute_growable_size(
            free.blocks[at]
        ):
            at += 1
        return at if self._may_serve(free.blocks[at], size) else -1

    def _from_device(self, free: FreeBlocks, size: int) -> Block | None:
        """Map pages at the lowest address where `size` bytes are available, and return their block.

        Return None if the device, or a limit, refuses the memory (try_allocate_expandable_block).
        """
        if not self._is_allowed(compute_segment_size(size, self.config)):
            return None
        block = self._place(free, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            unmapped = block.next
            assert unmapped is not None, "the place that was found has room"
            if not self._map(unmapped, min(size - block.size, unmapped.size)):
                return None
            block = unmapped  # includes the free block in front of it
        free.remove(block)
        return block

    def _place(self, free: FreeBlocks, size: int) -> Block:
        """Find adjacent free and unmapped blocks of at least `size` bytes in all; return the first of them.

        If there are none, return a new unmapped segment (find_expandable_block).
        """
        for unmapped in free.unmapped:
            start = unmapped
            if start.previous is not None and not start.previous.is_used:
                start = start.previous
            n_bytes, block = 0, start
            while n_bytes < size and not block.is_used:
                n_bytes += block.size
                if block.next is None:
                    break
                block = block.next
            if n_bytes >= size:
                return start
        page = self._page(free)
        n_bytes = -(-max(self._span, 1) // page) * page
        segment = Block(self._choose_address(n_bytes), n_bytes, free, mapped=False)
        free.add_unmapped(segment)
        return segment

    def _map(self, block: Block, n_bytes: int) -> bool:
        """Map pages for the first `n_bytes` of an unmapped block (map_block); False if the device has none left."""
        free = block.free
        page = self._page(free)
        n_bytes = -(-n_bytes // page) * page
        if not self._has_room(n_bytes):
            return False
        free.unmapped.remove(block)
        if n_bytes < block.size:
            rest = Block(block.address + n_bytes, block.size - n_bytes, free, mapped=False)
            _insert_after(rest, block)
            block.size = n_bytes
            free.add_unmapped(rest)
        block.mapped = True
        self._reserve("segment_map", block.address, n_bytes, free.stream)
        self._join(block)
        free.add(block)
        return True

    def _give_back(self, block: Block) -> None:
        """Unmap the whole pages of a free block (unmap_block); a segment without mapped pages is released."""
        free = block.free
        page = self._page(free)
        base = _first(block).address
        first = base - (base - block.address) // page * page  # up to a page
        last = base + (block.address + block.size - base) // page * page  # down to a page
        if first >= last:
            return
        free.remove(block)
        if first > block.address:
            before = Block(block.address, first - block.address, free)
            before.insert_before(block)
            free.add(before)
        if last < block.address + block.size:
            after = Block(last, block.address + block.size - last, free)
            _insert_after(after, block)
            free.add(after)
        block.address, block.size, block.mapped = first, last - first, False
        self._reserve("segment_unmap", first, last - first, free.stream)
        self._join(block)
        if block.is_split:
            free.add_unmapped(block)

    def _release_oversize(self, free: FreeBlocks, size: int) -> bool:
        return False  # torch leaves expandable segments alone here

    def _collect_garbage(self) -> None:
        pass  # torch leaves expandable segments alone here, too

    def _page(self, free: FreeBlocks) -> int:
        return SMALL_SEGMENT if free.is_small else self.config.large_segment_size


def make_allocator(
    config: AllocatorConfig | None = None,
    capacity: int | None = None,
    *,
    total: int | None = None,
    on_segment: SegmentEvent | None = None,
    addresses: Addresses | None = None,
) -> CachingAllocator:
    """Return the allocator that torch uses under `config`; see CachingAllocator for the other arguments."""
    config = config or AllocatorConfig()
    kind = ExpandableAllocator if config.expandable_segments else CachingAllocator
    return kind(config, capacity, total=total, on_segment=on_segment, addresses=addresses)


def _compute_growable_size(block: Block) -> int:
    """Return the size to which a block can grow: its own size plus the unmapped memory behind it."""
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _first(block: Block) -> Block:
    while block.previous is not None:
        block = block.previous
    return block


def _insert_after(block: Block, other: Block) -> None:
    after = block.next = other.next
    block.previous = other
    other.next = block
    if after is not None:
        after.previous = block
