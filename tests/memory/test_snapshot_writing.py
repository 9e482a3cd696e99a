"""Timelines written as snapshots: read back the same, and opened by PyTorch's own viewer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from conftest import RunPython
from lowtide.errors import LowtideError
from lowtide.memory.allocator.config import AllocatorConfig
from lowtide.memory.allocator.simulation import freed_from_entry
from lowtide.memory.events import PHASE, Allocate, Event, EventStream, Free, Label, Mark
from lowtide.memory.memory_timeline import Timeline
from lowtide.memory.snapshot_summary import summarize
from lowtide.memory.snapshots.history import History
from lowtide.memory.snapshots.read import Snapshot
from lowtide.memory.snapshots.write import make_snapshot, write_snapshot

MIB = 2**20

STREAM = EventStream(
    (
        Mark(PHASE, "forward"),
        Allocate(0, 3_000_000, 0x10, "aten::mm"),
        Allocate(1, 512, 0x20, ""),
        Free(-1, 1000),  # of a block from entry
        Mark(PHASE, "backward"),
        Allocate(2, 20 * MIB + 1, 0x30, "aten::mul"),
        Free(0, 3_000_000),
        Allocate(3, 7, 0x10, "aten::sum"),
    )
)
LABELS = {0: Label("activations", "net.act", "MulBackward0"), 2: Label("gradients", "net.weight")}


def test_a_written_snapshot_is_read_back_the_same(tmp_path: Path) -> None:
    file = tmp_path / "snapshot.pickle"
    write_snapshot(Timeline(STREAM, LABELS), file, AllocatorConfig.parse("max_split_size_mb:64"), at_entry=[5000, 0])
    snapshot = Snapshot.read(file)
    history = snapshot.history()
    assert str(snapshot.settings) == "max_split_size_mb:64"
    assert history.n_entry == 2
    first, second = history.stream.events[:2]
    assert {(e.bytes, e.op) for e in (first, second) if type(e) is Allocate} == {(5000, ""), (1000, "")}
    back, there = _over_entry(history), Timeline(STREAM)
    assert back.curve == there.curve
    assert (back.peak_bytes, back.peak_index) == (there.peak_bytes, there.peak_index)
    assert back.phases == there.phases
    assert _sizes_and_names(back.stream) == _sizes_and_names(STREAM)
    labelled = history.labels
    assert {number - history.n_entry: label for number, label in labelled.items()} == LABELS
    summary = summarize(snapshot)
    assert summary.peak_during == "backward"
    assert {share.name: share.bytes for share in summary.categories} == {
        "gradients": 20 * MIB + 1, "activations": 3_000_000, "temporaries": 5512,
    }  # fmt: skip


def _over_entry(history: History) -> Timeline:
    """The recorded events alone, as a live recorder would have recorded them."""
    return Timeline(history.stream.between(history.n_entry, len(history.stream)))


def _sizes_and_names(stream: EventStream) -> list[tuple[Any, ...]]:
    return [
        ("free", e.bytes) if type(e) is Free else e[1:2] + e[3:] if type(e) is Allocate else tuple(e) for e in stream
    ]


@st.composite
def streams(draw: st.DrawFn) -> EventStream:
    events: list[Event] = []
    alive: list[Allocate] = []
    for number in range(draw(st.integers(0, 25))):
        kind = draw(st.sampled_from("aafe" if alive else "ae"))
        if kind == "a":
            alive.append(Allocate(number, draw(st.integers(1, 50 * MIB)), 0, draw(st.sampled_from(["", "aten::mm"]))))
            events.append(alive[-1])
        elif kind == "f":
            gone = alive.pop(draw(st.integers(0, len(alive) - 1)))
            events.append(Free(gone.block, gone.bytes))
        else:
            events.append(Free(-number - 1, draw(st.integers(1, 50 * MIB))))
    return EventStream(tuple(events))


@given(streams(), st.sampled_from(["", "expandable_segments:True"]), st.lists(st.integers(1, MIB), max_size=3))
def test_any_stream_keeps_its_curve_and_pytorch_can_add_it_up(stream: EventStream, text: str, entry: list[int]) -> None:
    from torch.cuda._memory_viz import segsum

    record = make_snapshot(Timeline(stream), AllocatorConfig.parse(text), at_entry=entry)
    history = Snapshot(record).history() if record["segments"] else None
    if history is not None:
        assert _over_entry(history).curve == Timeline(stream).curve
        assert Timeline(history.stream, history.labels).peak_bytes <= history.peak_reserved_bytes
    assert "total_reserved" in segsum(record)  # it asserts that blocks make up their segments


def test_a_step_measured_on_cpu_becomes_a_snapshot(tmp_path: Path) -> None:
    import torch
    from torch import nn

    from lowtide.memory.measure import measure

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    batch = torch.randn(32, 64)
    with measure(model) as memory:
        model(batch).sum().backward()
    file = tmp_path / "step.pickle"
    write_snapshot(memory.timeline, file)
    summary = summarize(Snapshot.read(file))
    assert summary.peak_bytes == memory.peak_bytes
    gradient_bytes = sum(p.numel() * 4 for p in model.parameters())
    assert summary.at_end.requested_bytes == gradient_bytes
    assert "gradients" in {share.name for share in summary.categories}
    assert any("0.weight" in share.name for share in summary.origins)


def test_timelines_and_estimates_are_written_and_read_by_themselves(tmp_path: Path) -> None:
    import lowtide

    file = tmp_path / "step.pickle"
    Timeline(STREAM, LABELS).to_snapshot(file, at_entry=[5000, 0])
    again = Timeline.from_snapshot(file)
    freed = sum(event.bytes for event in freed_from_entry(STREAM))
    assert again.peak_bytes == Timeline(STREAM).peak_bytes + freed + 5000
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))

    def step(batch: torch.Tensor) -> None:
        model(batch).sum().backward()

        model.zero_grad()

    step(torch.randn(32, 64))
    model(torch.randn(32, 64)).sum().backward()  # gradients that the step drops
    estimate = lowtide.estimate(model, step, torch.randn(32, 64))
    estimate.to_snapshot(file)
    assert Timeline.from_snapshot(file).peak_bytes == estimate.peak_bytes
    on_gpu = lowtide.estimate(model, step, torch.randn(32, 64), device="T4")
    on_gpu.to_snapshot(file)
    assert summarize(Snapshot.read(file)).peak_bytes == on_gpu.peak_requested_bytes
    with pytest.raises(LowtideError):
        Timeline.from_snapshot(tmp_path / "none.pickle")


# --- PyTorch's viewer -----------------------------------------------------------------------------------------------


def test_pytorch_s_viewer_opens_what_is_written(tmp_path: Path, run_python: RunPython) -> None:
    file, plot = tmp_path / "snapshot.pickle", tmp_path / "plot.html"
    write_snapshot(Timeline(STREAM, LABELS), file)
    ran = run_python("-m", "torch.cuda._memory_viz", "trace_plot", str(file), "-o", str(plot))
    assert ran.returncode == 0, ran.stderr
    assert "Active Memory Timeline" in plot.read_text()


def test_pytorch_s_other_views_find_everything_in_it() -> None:
    from torch.cuda import _memory_viz as viz

    record = make_snapshot(Timeline(STREAM, LABELS))
    flames = viz.segments(record, format_flamegraph=lambda lines: lines)
    assert "active_allocated;net.weight:0:;op:0:aten::mul 20971521" in flames
    assert sum(int(line.rsplit(" ", 1)[1]) for line in flames.splitlines()) == (2 + 20 + 22) * MIB
    assert "total_allocated: 20.0MiB" in viz.segsum(record)
    trace = viz.trace(record)
    assert trace.count("cudaMalloc") == 2  # the small segment is there before the first event
    assert "20.0MiB" in trace
    assert "Active Memory Timeline" in viz.trace_plot(record)
    assert "Allocator State History" in viz.segment_plot(record)
    assert viz.memory(record, format_flamegraph=lambda lines: lines).count("stream_0") == len(flames.splitlines())
    nothing = make_snapshot(Timeline(EventStream(())))
    added = viz.compare(nothing["segments"], record["segments"], format_flamegraph=lambda lines: lines)
    assert added.count("only_after;stream_0") == len(flames.splitlines())


@pytest.mark.parametrize("text", ["", "expandable_segments:True"])
def test_the_browser_s_viewer_finds_each_field_that_it_reads(text: str) -> None:
    """Fields that `annotate_snapshot`, `process_alloc_data` and `MemoryView` of torch 2.13's viewer read."""
    record = make_snapshot(Timeline(STREAM, LABELS), AllocatorConfig.parse(text), at_entry=[5000])
    (trace,) = record["device_traces"]
    assert trace
    for action in trace:
        assert action.keys() >= {"action", "addr", "size", "stream", "time_us", "frames"}
    for segment in record["segments"]:
        fields = {"device", "address", "total_size", "stream", "segment_type", "segment_pool_id", "frames", "blocks"}
        assert segment.keys() >= fields
        for block in segment["blocks"]:
            assert block.keys() >= {"address", "size", "requested_size", "state", "frames"}
    for owner in (*trace, *record["segments"], *(block for each in record["segments"] for block in each["blocks"])):
        for frame in owner["frames"]:
            assert (type(frame["name"]), type(frame["filename"])) == (str, str)
    # `simulate_memory` undoes the trace from its end: each address is known when its turn comes.
    used = {b["address"] for s in record["segments"] for b in s["blocks"] if b["state"] == "active_allocated"}
    for action in reversed(trace):
        if action["action"] == "alloc":
            used.remove(action["addr"])
        elif action["action"] == "free_completed":
            assert action["addr"] not in used
            used.add(action["addr"])


def test_the_browser_s_reader_knows_all_that_is_in_the_pickle(tmp_path: Path) -> None:
    import pickletools

    file = tmp_path / "snapshot.pickle"
    write_snapshot(Timeline(STREAM, LABELS), file)
    codes = [(code.name, value) for code, value, _ in pickletools.genops(file.read_bytes())]
    assert codes[0] in (("PROTO", 2), ("PROTO", 3), ("PROTO", 4))
    used = {name for name, _ in codes}
    # The cases of unpickle() in torch/utils/viz/MemoryViz.js, read in torch 2.13.
    assert used <= {
        "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "NONE",
        "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE",
        "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS",
        "SETITEM", "SETITEMS",
    }  # fmt: skip


def test_one_category_is_unknown_without_which_the_browser_s_viewer_stumbles() -> None:
    stream = EventStream((Allocate(0, 1, 0, ""),))
    trace = make_snapshot(Timeline(stream, {0: Label("gradients")}))["device_traces"][0]
    assert {action["category"] for action in trace if "category" in action} == {"gradients", "unknown"}
