"""Expandable segments: sequences worked out by hand from torch's source."""

from typing import Any

import pytest

from lowtide.memory.allocator.caching import CachingAllocator, OutOfMemory
from lowtide.memory.allocator.config import AllocatorConfig
from lowtide.memory.allocator.expandable_segments import make_allocator

MIB = 2**20


def expandable(capacity: int | None = None, text: str = "", **more: Any) -> CachingAllocator:
    return make_allocator(AllocatorConfig.parse(f"expandable_segments:True{text}"), capacity, **more)


def test_pages_are_mapped_as_they_are_needed() -> None:
    allocator = expandable()
    allocator.malloc(5 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.malloc(16 * MIB)  # 15 are left: one more page
    assert allocator.reserved == 40 * MIB
    for n_bytes in (512, MIB, MIB - 1024):
        allocator.malloc(n_bytes)
    assert allocator.reserved == 42 * MIB  # small ones have pages of 2 MiB
    allocator.malloc(1024)  # 512 are left
    assert allocator.reserved == 44 * MIB


def test_large_blocks_are_split_to_the_last_512_bytes() -> None:
    allocator = expandable()
    assert [allocator.malloc(n).size for n in (19 * MIB, MIB + 512)] == [19 * MIB, MIB + 512]
    assert allocator.reserved == 40 * MIB  # 1 MiB was left of the first page, 512 bytes too few


def test_a_segment_grows_where_fixed_ones_would_not_fit() -> None:
    fixed, growing = CachingAllocator(), expandable()
    for allocator in (fixed, growing):
        for n_bytes in (40 * MIB, 60 * MIB, 80 * MIB):
            allocator.free(allocator.malloc(n_bytes))
    assert (fixed.reserved, growing.reserved) == (180 * MIB, 80 * MIB)


def test_whole_pages_in_free_blocks_are_given_back_and_holes_filled_first() -> None:
    events: list[tuple[str, int]] = []
    allocator = expandable(on_segment=lambda kind, address, n_bytes, stream: events.append((kind, n_bytes)))
    first, second, third = allocator.malloc(30 * MIB), allocator.malloc(60 * MIB), allocator.malloc(5 * MIB)
    allocator.free(second)  # from 30 to 90: the pages from 40 to 80 are free as a whole
    allocator.empty_cache()
    assert allocator.reserved == 60 * MIB  # of 100
    assert events[-1] == ("segment_unmap", 40 * MIB)
    again = allocator.malloc(45 * MIB)  # the 10 before the hole, and two pages of it
    assert again.address == first.address + 30 * MIB
    assert (allocator.reserved, events[-1]) == (100 * MIB, ("segment_map", 40 * MIB))
    for block in (first, third, again):
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_requests_are_cut_from_the_best_fit() -> None:
    allocator = expandable()
    first, _, second, _ = (allocator.malloc(n * MIB) for n in (16, 2, 20, 2))
    start, middle = first.address, second.address
    allocator.free(first)  # 16 MiB
    allocator.free(second)  # 20 MiB
    rest = allocator.malloc(12 * MIB + 512)
    assert rest.address == start
    allocator.free(rest)
    end = allocator.malloc(18 * MIB)  # in the 20
    assert end.address == middle
    allocator.malloc(15 * MIB)  # in the 16
    assert allocator.reserved == 40 * MIB


def test_best_fit_counts_the_unmapped_memory_behind_a_block() -> None:
    allocator = expandable()
    wide, _, last = (allocator.malloc(n * MIB) for n in (16, 2, 2))  # a whole page
    start = wide.address
    allocator.free(last)  # at the end, 2 MiB that can grow
    allocator.free(wide)  # 16 MiB that cannot
    assert allocator.malloc(2 * MIB).address == start  # not the 2 that would fit exactly
    assert allocator.reserved == 20 * MIB


def test_the_device_limits_pages_and_the_fraction_limits_requests() -> None:
    allocator = expandable(50 * MIB)
    allocator.malloc(30 * MIB)  # two pages; a third does not fit into 50
    with pytest.raises(OutOfMemory):
        allocator.malloc(11 * MIB)
    assert allocator.malloc(10 * MIB).size == 10 * MIB
    # The fraction is tested with the size of a segment, and then whole pages are mapped: it may be passed.
    allocator = expandable(text=",per_process_memory_fraction:0.5", total=60 * MIB)
    allocator.malloc(30 * MIB)
    assert allocator.reserved == 40 * MIB
    with pytest.raises(OutOfMemory):
        allocator.malloc(1)


def test_equal_blocks_of_an_expandable_segment_are_taken_from_the_front() -> None:
    allocator = expandable()
    held = [allocator.malloc(4 * MIB) for _ in range(5)]
    start = held[1].address
    allocator.free(held[3])
    allocator.free(held[1])
    assert allocator.malloc(3 * MIB).address == start


def test_max_split_size_keeps_no_block_of_an_expandable_segment_whole() -> None:
    allocator = expandable(text=",max_split_size_mb:20")
    assert allocator.malloc(25 * MIB).size == 25 * MIB
    assert allocator.reserved == 40 * MIB


def test_a_segment_has_addresses_for_an_eighth_more_than_the_device() -> None:
    allocator = expandable(160 * MIB)  # addresses for 180
    first, second = allocator.malloc(40 * MIB), allocator.malloc(80 * MIB)
    start = first.address
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.malloc(60 * MIB).address == second.address + 80 * MIB == start + 120 * MIB
    assert allocator.reserved == 140 * MIB
