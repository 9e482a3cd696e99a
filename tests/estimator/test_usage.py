"""Numbers of the simulated allocator while events are still being recorded."""

from collections.abc import Iterator

from lowtide.estimator.cuda.memory_stats import RESET_PEAKS, RESET_SUMS, Usage
from lowtide.memory.allocator.config import MIB, AllocatorConfig
from lowtide.memory.allocator.simulation import ALLOCATOR, EMPTY_CACHE, simulate
from lowtide.memory.events import Allocate, Event, EventStream, Free, Mark


class Recording:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.version = 0
        self.streams: dict[int, int] = {}

    def since(self, position: int) -> Iterator[Event]:
        return iter(self.events[position:])

    def mark(self, label: str, data: object = None) -> None:
        self.events.append(Mark(label, data))


def test_levels_and_peaks_follow_the_events() -> None:
    recording = Recording()
    usage = Usage(recording, AllocatorConfig())
    assert usage.stats()["allocated_bytes.all.peak"] == 0
    recording.events += [Allocate(0, 30 * MIB, 0, ""), Allocate(1, 100, 0, ""), Free(0, 30 * MIB)]
    stats = usage.stats()
    assert (stats["allocated_bytes.all.current"], stats["requested_bytes.all.current"]) == (512, 100)
    assert stats["allocated_bytes.all.peak"] == 30 * MIB + 512
    assert stats["allocated_bytes.large_pool.freed"] == 30 * MIB
    assert stats["reserved_bytes.all.current"] == 32 * MIB
    assert (stats["reserved_bytes.small_pool.current"], stats["segment.all.current"]) == (2 * MIB, 2)
    assert stats["inactive_split_bytes.all.current"] == 2 * MIB - 512
    usage.mark(EMPTY_CACHE)
    stats = usage.stats()
    assert (stats["reserved_bytes.all.current"], stats["reserved_bytes.all.peak"]) == (2 * MIB, 32 * MIB)
    usage.mark(RESET_PEAKS)
    stats = usage.stats()
    assert (stats["reserved_bytes.all.peak"], stats["allocated_bytes.all.peak"]) == (2 * MIB, 512)
    assert stats["allocated_bytes.all.allocated"] == 30 * MIB + 512
    usage.mark(RESET_SUMS)
    assert usage.level("allocated_bytes.all.allocated") == 0
    assert usage.snapshot()["segments"]
    recording.events[0] = Allocate(0, 10 * MIB, 0, "")  # as it turns out later
    recording.events[2] = Free(0, 10 * MIB)
    recording.version += 1
    assert usage.level("allocated_bytes.all.freed") == 0
    assert usage.level("reserved_bytes.all.current") == 2 * MIB


def test_an_emptied_cache_counts_in_what_is_estimated() -> None:
    events = (Allocate(0, 30 * MIB, 0, ""), Free(0, 30 * MIB), Allocate(1, 40 * MIB, 0, ""))
    assert simulate(EventStream(events)).peak_reserved_bytes == 70 * MIB
    emptied = (*events[:2], Mark(ALLOCATOR, EMPTY_CACHE), events[2])
    assert simulate(EventStream(emptied)).peak_reserved_bytes == 40 * MIB
