"""Snapshots reduced to allocator traces: what the simulation did, recorded as if by a GPU, and replayed."""

import json
from typing import Any

from allocator_traces import Trace, replay
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_reduction import reduce_snapshot

from lowtide.memory.allocator.config import AllocatorConfig
from lowtide.memory.events import Allocate, Event, EventStream, Free
from lowtide.memory.memory_timeline import Timeline
from lowtide.memory.snapshots.read import Snapshot
from lowtide.memory.snapshots.write import make_snapshot

MIB = 2**20


def reduced(stream: EventStream, text: str = "", at_entry: tuple[int, ...] = ()) -> dict[str, Any]:
    record = make_snapshot(Timeline(stream), AllocatorConfig.parse(text), at_entry=at_entry)
    trace: dict[str, Any] = json.loads(json.dumps(reduce_snapshot(Snapshot(record), 0, name="x")))
    return trace


def test_a_reduced_snapshot_has_sizes_and_order_alone() -> None:
    stream = EventStream(
        (
            Allocate(0, 30 * MIB + 1, 0, "secret"),
            Free(-1, 11 * MIB + 5),  # from entry; its size has to be deduced
            Allocate(1, 11 * MIB + 512, 0, "secret"),  # gets all of its block too
            Free(0, 30 * MIB + 1),
        )
    )
    trace = reduced(stream, at_entry=(9 * MIB,))
    assert "secret" not in json.dumps(trace)
    assert trace == {
        "format": 1,
        "name": "x",
        "allocator_settings": {"text": "", "known": True},
        "streams": 1,
        "initial": {
            "segments": [[0, 20 * MIB, 0, 0, 0], [1, 12 * MIB, 0, 0, 1]],
            "blocks": [[0, 0, 0, 9 * MIB, 9 * MIB, 0], [1, 1, 0, 12 * MIB, 11 * MIB + 5, 1]],
        },
        "segment_addr_rank": [0, 1, 2],
        "events": [
            ["segment_alloc", 2, 32 * MIB, 0],
            ["alloc", 2, 30 * MIB + 1, 0],
            ["free", 1, 11 * MIB + 5, 0],
            ["alloc", 3, 11 * MIB + 512, 0],
            ["free", 2, 30 * MIB + 1, 0],
        ],
        "expected": {
            "initial_reserved": 32 * MIB,
            "peak_reserved": 64 * MIB,
            "final_reserved": 64 * MIB,
            "reserved_after_segment_event": [[0, 64 * MIB]],
            "initial_requested": 20 * MIB + 5,
            "peak_requested": 50 * MIB + 513,
            "final_requested": 20 * MIB + 512,
            "final_allocated": 21 * MIB,
        },
    }


def test_a_block_of_max_split_size_had_its_whole_segment() -> None:
    gone = EventStream((Free(-1, 20 * MIB + 1),))
    size = {text: reduced(gone, text)["initial"]["blocks"][0][3] for text in ("", "max_split_size_mb:20")}
    assert size == {"": 20 * MIB + 512, "max_split_size_mb:20": 22 * MIB}


def test_a_segment_that_is_gone_at_the_end_was_small_if_it_had_the_size_of_small_ones() -> None:
    def freed(address: int, n_bytes: int) -> dict[str, Any]:
        return {"action": "segment_free", "addr": address, "size": n_bytes, "stream": 7, "time_us": 0, "frames": []}

    actions = [freed(0x2000_0000, 2 * MIB), freed(0x1000_0000, 20 * MIB)]
    trace = reduce_snapshot(Snapshot({"segments": [], "device_traces": [actions]}), name="x")
    assert trace["initial"]["segments"] == [[0, 20 * MIB, 1, 0, 0], [1, 2 * MIB, 1, 1, 1]]
    assert [row[:3] for row in trace["events"]] == [["segment_free", 1, 2 * MIB], ["segment_free", 0, 20 * MIB]]
    assert trace["expected"]["reserved_after_segment_event"] == [[0, 20 * MIB], [1, 0]]
    assert (trace["streams"], trace["expected"]["peak_reserved"]) == (2, 22 * MIB)


@st.composite
def streams(draw: st.DrawFn) -> EventStream:
    events: list[Event] = []
    alive: list[Allocate] = []
    for number in range(draw(st.integers(1, 40))):
        if alive and draw(st.booleans()):
            gone = alive.pop(draw(st.integers(0, len(alive) - 1)))
            events.append(Free(gone.block, gone.bytes))
        else:
            n_bytes = draw(st.integers(1, 2 * MIB) | st.integers(1, 40 * MIB))
            alive.append(Allocate(number, n_bytes, 0, ""))
            events.append(alive[-1])
    return EventStream(tuple(events))


@settings(max_examples=60)
@given(streams(), st.integers(0, 20), st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:20"]))
def test_replaying_a_reduced_snapshot_gives_the_recorded_peak(stream: EventStream, first: int, text: str) -> None:
    later = stream.between(first, len(stream)) if "expandable" not in text else stream  # see `reduce_snapshot`
    record = reduced(later, text)
    trace = Trace.from_record(record)
    found = replay(trace)
    assert found.peak_reserved_bytes == record["expected"]["peak_reserved"]
    assert found.final_reserved_bytes == record["expected"]["final_reserved"]
    assert found.final_allocated_bytes == record["expected"]["final_allocated"]
    assert found.peak_requested_bytes == record["expected"]["peak_requested"]
