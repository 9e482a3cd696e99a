"""Recorded traces of real GPUs, replayed, and event streams through the simulated allocator."""

from pathlib import Path

import pytest
from allocator_traces import Trace, replay

from lowtide.errors import LowtideError
from lowtide.memory.allocator.config import AllocatorConfig
from lowtide.memory.allocator.simulation import Failure, Reserved, simulate
from lowtide.memory.events import Allocate, EventStream, Free, Mark

MIB = 2**20
TRACES = sorted((Path(__file__).parent / "data").rglob("*.json.gz"))
OTHERWISE = {"lora"}
"""What reserves 2 MiB more with other addresses: a block is cut from another segment."""


def find_name(path: Path) -> str:
    return path.name.partition(".")[0]


@pytest.mark.parametrize("path", TRACES, ids=find_name)
def test_recorded_requests_reserve_what_they_reserved_on_the_gpu(path: Path) -> None:
    check(Trace.read(path), as_recorded=True)


@pytest.mark.parametrize("path", [path for path in TRACES if find_name(path) not in OTHERWISE], ids=find_name)
def test_so_they_do_with_invented_addresses(path: Path) -> None:
    check(Trace.read(path), as_recorded=False)


def check(trace: Trace, *, as_recorded: bool) -> None:
    found, expected = replay(trace, as_recorded=as_recorded), trace.expected
    assert found.peak_reserved_bytes == expected["peak_reserved"]
    assert found.final_reserved_bytes == expected["final_reserved"]
    assert found.peak_allocated_bytes == expected["peak_allocated"]
    assert found.final_allocated_bytes == expected["final_allocated"]
    assert found.peak_requested_bytes == expected["peak_requested"]
    assert found.final_requested_bytes == expected["final_requested"]
    assert list(found.reserved_bytes) == trace.compute_recorded_curve()


def test_a_trace_can_be_replayed_under_other_settings() -> None:
    trace = Trace.read(next(path for path in TRACES if find_name(path) == "t5_training_1024"))
    found = replay(trace, AllocatorConfig.parse("expandable_segments:True"))
    assert found.peak_requested_bytes == trace.expected["peak_requested"]
    assert found.peak_reserved_bytes < trace.expected["peak_reserved"]


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"format": 2}')
    with pytest.raises(LowtideError, match="format 1"):
        Trace.read(path)
    with pytest.raises(LowtideError, match="nothing"):
        Trace.read(tmp_path / "nothing.json.gz")


# --- event streams --------------------------------------------------------------------------------------------------

STREAM = EventStream(
    (
        Allocate(0, 12 * MIB, 0, "a"),
        Mark("phase", "x"),
        Free(-1, 30 * MIB),  # of a block from entry
        Allocate(1, 0, 0, "nothing"),
        Allocate(2, 14 * MIB, 0, "b"),
        Free(0, 12 * MIB),
        Free(1, 0),
    )
)


def test_a_stream_is_simulated_with_what_was_there_at_entry() -> None:
    assert simulate(STREAM, at_entry=[512, 0]) == Reserved(
        peak_requested_bytes=512 + 42 * MIB,
        peak_allocated_bytes=512 + 42 * MIB,
        peak_reserved_bytes=(2 + 30 + 12) * MIB,  # the 14 are cut from the 30
        n_retries=0,
        failure=None,
    )


def test_a_failure_says_where_it_happened() -> None:
    found = simulate(STREAM, capacity=41 * MIB)
    assert not found.fits
    assert found.failure == Failure(
        index=0, requested_bytes=12 * MIB, allocated_bytes=30 * MIB, reserved_bytes=30 * MIB
    )
    assert simulate(STREAM, capacity=29 * MIB).failure == Failure(
        index=-1, requested_bytes=30 * MIB, allocated_bytes=0, reserved_bytes=0
    )
    assert simulate(STREAM, capacity=42 * MIB).fits


def test_the_cache_is_emptied_where_that_makes_it_fit() -> None:
    stream = EventStream((Allocate(0, 30 * MIB, 0, ""), Free(0, 30 * MIB), Allocate(1, 36 * MIB, 0, "")))
    assert simulate(stream).peak_reserved_bytes == 66 * MIB
    assert not simulate(stream, capacity=35 * MIB).fits
    assert simulate(stream, capacity=36 * MIB).n_retries == 1


def test_a_capacity_between_what_is_allocated_and_what_is_reserved_may_do() -> None:
    small = [Allocate(n, MIB, 0, "") for n in range(40)]  # 20 segments, which can be given back
    fragments = (Allocate(40, 30 * MIB, 0, ""), Free(40, 30 * MIB), Allocate(41, 11 * MIB, 0, ""))  # 30, which cannot
    last = Allocate(42, 24 * MIB, 0, "")
    stream = EventStream((*small, *(Free(block.block, MIB) for block in small), *fragments, last))
    assert simulate(stream).peak_allocated_bytes == 40 * MIB
    assert simulate(stream).peak_reserved_bytes == 94 * MIB
    assert simulate(stream, capacity=54 * MIB).fits
    assert not simulate(stream, capacity=53 * MIB).fits
