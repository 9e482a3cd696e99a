"""Blocks of device memory, and lists of free blocks in search order."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

ADDRESS_BITS = 64
"""Number of bits for the address in a sort key, below the size."""


class Block:
    """A part of one segment; `previous` and `next` are its neighbours in it. Sizes and addresses are bytes.

    `requested` is the tensor's own size, `size` the allocated one. Only virtual memory can have `mapped` False.
    """

    __slots__ = ("address", "free", "idle_since", "is_used", "key", "mapped", "next", "previous", "requested", "size")

    def __init__(self, address: int, size: int, free: FreeBlocks, mapped: bool = True) -> None:
        self.address = address
        self.size = size
        self.free = free
        self.mapped = mapped
        self.is_used = False
        self.requested = 0
        self.previous: Block | None = None
        self.next: Block | None = None
        self.key = 0
        self.idle_since = 0

    @property
    def is_split(self) -> bool:
        """Return True if the segment holds other blocks too."""
        return self.previous is not None or self.next is not None

    def insert_before(self, other: Block) -> None:
        """Insert this block before `other` in their segment."""
        before = self.previous = other.previous
        self.next = other
        other.previous = self
        if before is not None:
            before.next = self


class FreeBlocks:
    """Free blocks of one stream and one pool, by size and then by address (BlockComparatorSize).

    The first block of at least a given size is therefore the best fit; equal blocks are sorted by address.
    `smallest_rest` is the least size that is split off a block larger than needed. `unmapped` are ranges of virtual
    memory without pages, by address.
    """

    __slots__ = ("blocks", "is_small", "keys", "smallest_rest", "stream", "unmapped")

    def __init__(self, stream: int, is_small: bool, smallest_rest: int) -> None:
        self.stream = stream
        self.is_small = is_small
        self.smallest_rest = smallest_rest
        self.blocks: list[Block] = []
        self.keys: list[int] = []  # keys of the blocks, in the same order: bisecting over numbers is fast
        self.unmapped: list[Block] = []

    def first(self, size: int) -> int:
        """Return the index in `blocks` of the first block of at least `size` bytes."""
        return bisect_left(self.keys, size << ADDRESS_BITS)

    def add(self, block: Block) -> None:
        key = block.key = block.size << ADDRESS_BITS | block.address
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.blocks.insert(at, block)

    def pop(self, at: int) -> Block:
        del self.keys[at]
        return self.blocks.pop(at)

    def remove(self, block: Block) -> None:
        at = bisect_left(self.keys, block.key)
        del self.keys[at], self.blocks[at]

    def add_unmapped(self, block: Block) -> None:
        insort(self.unmapped, block, key=attrgetter("address"))
