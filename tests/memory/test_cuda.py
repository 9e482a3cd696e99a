from typing import Any

import pytest
import torch

from lowtide.errors import RehearsalError
from lowtide.memory.cuda_recorder import CudaRecorder, PlacedMark, parse_trace
from lowtide.memory.events import Allocate, Free, Mark
from lowtide.memory.measure import measure

KEY = "lowtide 123"
MAIN, BACKWARD = 7001, 7002  # threads


def action(what: str, address: int, n_bytes: int, time_us: int, metadata: str = "", **more: Any) -> dict[str, Any]:
    """One entry of a snapshot's "device_traces", as torch 2.13 writes it."""
    common = {"stream": 0, "pool_id": (0, 0), "compile_context": "N/A", "user_metadata": metadata}
    return {"action": what, "addr": address, "size": n_bytes, "time_us": time_us, **common, **more}


def by(thread: int, n_marks: int) -> str:
    return f"{KEY} {thread} {n_marks}"


def frames(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "filename": "train.py", "line": 1} for name in names]


def test_allocations_and_frees() -> None:
    trace = [
        action("segment_alloc", 0x1000, 2 << 20, 1, by(MAIN, 0)),
        action("alloc", 0x1000, 100, 1, by(MAIN, 0), frames=frames("forward", "main")),
        action("alloc", 0x1200, 30, 2, by(MAIN, 0), frames=[]),
        action("free_requested", 0x1000, 100, 3, by(MAIN, 0)),
        action("free_completed", 0x1000, 100, 3, by(MAIN, 0)),
        action("free_requested", 0x9000, 77, 4, by(MAIN, 0)),
        action("free_completed", 0x9000, 77, 4, by(MAIN, 0)),
        action("alloc", 0x1000, 60, 5, by(MAIN, 0)),
        {"action": "oom", "device_free": 5, "size": 1 << 40, "stream": 0, "time_us": 6},
        action("snapshot", 0, 0, 7),
    ]
    events = parse_trace(trace, [], KEY)
    assert events == (
        Allocate(0, 100, 0x1000, "forward"),
        Allocate(1, 30, 0x1200, ""),
        Free(0, 100),
        Free(-1, 77),  # of a block from entry
        Allocate(2, 60, 0x1000, ""),
    )


def test_a_block_in_use_on_another_stream_counts_until_its_free_is_completed() -> None:
    trace = [
        action("alloc", 0x1000, 100, 1),
        action("free_requested", 0x1000, 100, 2),
        action("alloc", 0x2000, 50, 3),
        action("free_completed", 0x1000, 100, 4),
    ]
    assert [type(event) for event in parse_trace(trace, [], KEY)] == [Allocate, Allocate, Free]


def test_marks_of_one_thread_are_in_their_places_whatever_the_clock_says() -> None:
    marks = [PlacedMark(Mark("m", n), MAIN, time_us=100.0) for n in range(4)]
    trace = [
        action("alloc", 0x1000, 1, 100, by(MAIN, 0)),
        action("alloc", 0x2000, 2, 100, by(MAIN, 1)),
        action("free_completed", 0x1000, 1, 99, by(MAIN, 3)),
    ]
    shown = [event.data if isinstance(event, Mark) else event.bytes for event in parse_trace(trace, marks, KEY)]
    assert shown == [1, 0, 2, 1, 2, 1, 3]


def test_marks_of_two_threads_are_ordered_by_time_where_nothing_better_is_known() -> None:
    marks = [
        PlacedMark(Mark("forward", None), MAIN, 10.0),
        PlacedMark(Mark("backward begins", None), MAIN, 20.0),
        PlacedMark(Mark("hook", None), BACKWARD, 32.0),
        PlacedMark(Mark("backward ended", None), MAIN, 40.0),
    ]
    trace = [
        action("alloc", 0x1000, 1, 12, by(MAIN, 1)),
        action("alloc", 0x2000, 2, 25, ""),  # the backward thread has made no mark yet ...
        action("alloc", 0x3000, 3, 30, "lowtide 99 5 17"),  # ... or carries one from an earlier recording
        action("alloc", 0x4000, 4, 33, by(BACKWARD, 3)),
        action("alloc", 0x5000, 5, 39, by(BACKWARD, 3)),
        action("free_completed", 0x1000, 1, 45, by(MAIN, 4)),
    ]
    shown = [event.label if isinstance(event, Mark) else event.bytes for event in parse_trace(trace, marks, KEY)]
    assert shown == ["forward", 1, "backward begins", 2, 3, "hook", 4, 5, "backward ended", 1]


def test_marks_after_the_last_action_are_kept() -> None:
    assert parse_trace([], [PlacedMark(Mark("m", 1), MAIN, 1.0)], KEY) == (Mark("m", 1),)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_is_said() -> None:
    with pytest.raises(RehearsalError, match="0 CUDA devices"):
        CudaRecorder().__enter__()
    with pytest.raises(RehearsalError, match="the memory of cuda:1"), measure(device="cuda:1"):
        pass


# --- on a device ----------------------------------------------------------------------------------------------------


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one, as far as a recorder asks before it records."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)


@pytest.mark.usefixtures("a_gpu")
def test_another_allocator_than_torchs_own_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there() -> bool:
        raise RuntimeError(
            "cudaMallocAsync does not yet support isHistoryEnabled.\nIf you need it, please file an issue"
        )

    monkeypatch.setattr("lowtide.memory.cuda_recorder.history_is_on", not_there)
    with (
        pytest.raises(RehearsalError, match=r"yet support isHistoryEnabled\.\n  torch's own allocator"),
        CudaRecorder("cuda:0"),
    ):
        pass


@pytest.mark.usefixtures("a_gpu")
def test_memory_that_no_allocator_keeps_account_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    with pytest.raises(RehearsalError, match="PYTORCH_NO_CUDA_MEMORY_CACHING is set"), CudaRecorder("cuda:0"):
        pass


@pytest.mark.gpu
def test_the_history_agrees_with_the_allocators_own_peak() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).cuda()
    x = torch.rand(32, 64, device="cuda")
    model(x).sum().backward()  # cuBLAS takes its workspaces now; a recording begins without them
    with measure(model) as memory:
        entry = torch.cuda.memory_stats()
        model.zero_grad()
        model(x).sum().backward()
        stats = torch.cuda.memory_stats()
    of_stats, of_entry = stats["requested_bytes.all.peak"], entry["requested_bytes.all.current"]
    assert memory.timeline.peak_bytes == of_stats - of_entry > 0
    assert memory.timeline.curve[-1] == stats["requested_bytes.all.current"] - of_entry
    assert memory.peak_bytes == stats["allocated_bytes.all.peak"] - entry["allocated_bytes.all.current"]
    assert memory.reserved_peak_bytes == stats["reserved_bytes.all.peak"]


@pytest.mark.gpu
def test_marks_on_a_device_are_between_the_right_allocations() -> None:
    x = torch.rand(1000, device="cuda", requires_grad=True)
    with CudaRecorder() as recorder:
        recorder.mark("before")
        y = x.exp()
        recorder.mark("after")
        y.register_hook(lambda grad: recorder.mark("hook"))
        y.backward(torch.ones_like(y))
        recorder.mark("end")
    shown = [event.label if isinstance(event, Mark) else type(event).__name__ for event in recorder.stream]
    assert [s for s in shown if s[0].islower()] == ["before", "after", "hook", "end"]
    assert shown[:3] == ["before", "Allocate", "after"]
    assert shown.index("hook") < len(shown) - 1 - shown[::-1].index("Allocate")


@pytest.mark.gpu
def test_a_history_of_someone_elses_is_left_alone() -> None:
    torch.cuda.memory._record_memory_history()
    try:
        with pytest.raises(RehearsalError, match="recorded already"):
            CudaRecorder().__enter__()
    finally:
        torch.cuda.memory._record_memory_history(None)


def test_all_that_the_allocator_holds_at_entry_is_the_base() -> None:
    recorder = CudaRecorder()
    recorder._n_entry_bytes = 100
    assert recorder.count_bytes_beside(frozenset({1}), 60) == 40
    assert recorder.count_bytes_beside(frozenset({1}), 120) == 0  # buckets that another process has made, say
