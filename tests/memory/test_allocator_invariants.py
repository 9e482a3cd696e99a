"""Invariants of the simulated allocator for any requests, and a readable version that judges the fast one."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.memory.allocator.blocks import Block
from lowtide.memory.allocator.caching import CachingAllocator, OutOfMemory
from lowtide.memory.allocator.config import AllocatorConfig
from lowtide.memory.allocator.expandable_segments import make_allocator
from lowtide.memory.allocator.simulation import simulate
from lowtide.memory.events import Allocate, Event, EventStream, Free

MIB = 2**20

# Near the sizes at which the allocator changes its mind, and anything in between.
edges = st.sampled_from([1, 512, 513, MIB, 2 * MIB, 9 * MIB, 10 * MIB, 20 * MIB, 30 * MIB]).flatmap(
    lambda edge: st.integers(max(1, edge - 600), edge + 600)
)
sizes = edges | st.integers(1, 3 * MIB) | st.integers(1, 64 * MIB)
steps = st.tuples(
    st.sampled_from(["malloc", "malloc", "malloc", "free", "free", "empty"]), sizes, st.integers(0, 10**6)
)
texts = st.sampled_from(
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:25",
        "roundup_power2_divisions:4",
        "large_segment_size_mb:12",
        "garbage_collection_threshold:0.5,per_process_memory_fraction:0.8",
        "expandable_segments:True,large_segment_size_mb:12,max_split_size_mb:25,per_process_memory_fraction:0.8",
    ]
)


class Watched:
    """An allocator whose blocks in use are known, with the segments that it was given."""

    def __init__(self, text: str, capacity: int | None) -> None:
        self.held = 0
        self.allocator = make_allocator(AllocatorConfig.parse(text), capacity, on_segment=self.follow)
        self.used: list[Block] = []

    def follow(self, kind: str, address: int, n_bytes: int, stream: int) -> None:
        self.held += n_bytes if kind in ("segment_alloc", "segment_map") else -n_bytes

    def do(self, kind: str, n_bytes: int, choice: int) -> None:
        if kind == "malloc":
            try:
                block = self.allocator.malloc(n_bytes, stream=choice % 3)
            except OutOfMemory:
                return
            assert block.size >= block.requested == n_bytes
            assert block.size % 512 == block.address % 512 == 0
            self.used.append(block)
        elif kind == "free" and self.used:
            self.allocator.free(self.used.pop(choice % len(self.used)))
        elif kind == "empty":
            self.allocator.empty_cache()

    def check(self) -> None:
        allocator = self.allocator
        segments = allocator.segments(self.used)
        blocks = [block for segment in segments for block in segment]
        assert sum(block.size for block in blocks) == allocator.reserved == self.held
        assert sum(block.size for block in self.used) == allocator.allocated
        assert sum(block.requested for block in self.used) == allocator.requested
        assert allocator.requested <= allocator.allocated <= allocator.reserved <= allocator.peak_reserved
        ends = [0, *(block.address + block.size for block in blocks)]
        assert all(end <= block.address for end, block in zip(ends, blocks, strict=False)), "blocks overlap"
        for segment in segments:
            for left, right in pairwise(segment):
                assert left.next is right
                assert right.previous is left
                assert left.address + left.size == right.address
                assert left.is_used or right.is_used, "free neighbours were not merged"


@settings(max_examples=150)
@given(texts, st.none() | st.integers(30, 300), st.lists(steps, max_size=60))
def test_the_books_balance_and_blocks_never_overlap(
    text: str, capacity_mib: int | None, asked: list[tuple[str, int, int]]
) -> None:
    watched = Watched(text, None if capacity_mib is None else capacity_mib * MIB)
    for step in asked:
        watched.do(*step)
        watched.check()
        if capacity_mib is not None:
            assert watched.allocator.reserved <= capacity_mib * MIB
    for block in watched.used:
        watched.allocator.free(block)
    watched.used.clear()
    watched.check()
    assert all(len(segment) == 1 for segment in watched.allocator.segments(())), "what is free did not become whole"
    watched.allocator.empty_cache()
    assert watched.allocator.reserved == watched.held == 0


Segment = tuple[tuple[int, bool], int, list[list[int]]]
"""Whose it is (stream, and whether small), where it begins, and its pieces: offset, size and whether used."""


class Plain:
    """The allocator under its default settings as one reads it in the notes: lists, searched from end to end."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.reserved = 0

    def malloc(self, n_bytes: int, stream: int) -> tuple[int, int]:
        size = -(-n_bytes // 512) * 512
        is_small = size <= MIB
        fits = [
            (piece[1], base + piece[0], index, piece)
            for index, (owner, base, pieces) in enumerate(self.segments)
            for piece in pieces
            if owner == (stream, is_small) and not piece[2] and piece[1] >= size
        ]
        if not fits:
            length = 2 * MIB if is_small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            base = sum(-(-self._length(s) // (2 * MIB)) * 2 * MIB for s in self.segments)
            self.segments.append(((stream, is_small), base, [[0, length, 0]]))
            self.reserved += length
            fits = [(length, base, len(self.segments) - 1, self.segments[-1][2][0])]
        _, _, index, piece = min(fits, key=lambda fit: fit[:2])
        rest = piece[1] - size
        piece[2] = 1
        if rest >= (512 if is_small else MIB + 1):
            piece[1] = size
            pieces = self.segments[index][2]
            pieces.insert(pieces.index(piece) + 1, [piece[0] + size, rest, 0])
        return index, piece[0]

    def free(self, where: tuple[int, int]) -> None:
        pieces = self.segments[where[0]][2]
        next(piece for piece in pieces if piece[0] == where[1])[2] = 0
        merged = [pieces[0]]
        for piece in pieces[1:]:
            if merged[-1][2] or piece[2]:
                merged.append(piece)
            else:
                merged[-1][1] += piece[1]
        pieces[:] = merged

    def _length(self, segment: Segment) -> int:
        return sum(piece[1] for piece in segment[2])


@settings(max_examples=150)
@given(st.lists(steps, max_size=80))
def test_the_fast_one_does_what_the_plain_one_does(asked: list[tuple[str, int, int]]) -> None:
    fast, plain = CachingAllocator(), Plain()
    used: list[tuple[Block, tuple[int, int]]] = []
    for kind, n_bytes, choice in asked:
        if kind == "malloc":
            used.append((fast.malloc(n_bytes, choice % 2), plain.malloc(n_bytes, choice % 2)))
            block, (index, offset) = used[-1]
            start = block.address - plain.segments[index][1] - offset
            assert start == 0x7F00_0000_0000, "the same place"
        elif kind == "free" and used:
            block, where = used.pop(choice % len(used))
            fast.free(block)
            plain.free(where)
        assert fast.reserved == plain.reserved


@given(st.lists(sizes, min_size=1, max_size=20), texts)
def test_blocks_that_are_never_freed_need_their_peak_in_whole_pages(asked: list[int], text: str) -> None:
    stream = EventStream(tuple(Allocate(number, n_bytes, 0, "") for number, n_bytes in enumerate(asked)))
    config = AllocatorConfig.parse(text.partition(",per_process")[0])
    peak = simulate(stream, config).peak_reserved_bytes
    assert simulate(stream, config, peak).fits
    assert not simulate(stream, config, peak - 1).fits


@given(st.lists(st.tuples(sizes, st.integers(0, 10**6)), max_size=30), texts)
def test_peaks_are_ordered_and_a_stream_fits_where_it_peaks(asked: list[tuple[int, int]], text: str) -> None:
    events: list[Event] = []
    alive: list[Allocate] = []
    for number, (n_bytes, choice) in enumerate(asked):
        alive.append(Allocate(number, n_bytes, 0, ""))
        events.append(alive[-1])
        if choice % 2:
            gone = alive.pop(choice % len(alive))
            events.append(Free(gone.block, gone.bytes))
    stream, config = EventStream(tuple(events)), AllocatorConfig.parse(text.partition(",per_process")[0])
    free = simulate(stream, config)
    assert free.peak_requested_bytes <= free.peak_allocated_bytes <= free.peak_reserved_bytes
    within = simulate(stream, config, capacity=free.peak_reserved_bytes)
    assert within.fits
    assert within.peak_reserved_bytes == free.peak_reserved_bytes
