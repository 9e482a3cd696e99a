from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import RunPython
from lowtide.errors import LowtideError
from lowtide.memory.events import CATEGORIES, PHASE, Allocate, Event, EventStream, Free, Label, Mark
from lowtide.memory.memory_timeline import Block, Phase, Timeline

STREAM = EventStream(
    (
        Allocate(0, 100, 0x1000, "aten::mm"),  # 100
        Mark(PHASE, "forward"),  # 100
        Allocate(1, 50, 0x2000, "aten::relu"),  # 150
        Free(-1, 30),  # 120: of a block from entry
        Allocate(2, 30, 0x3000, ""),  # 150: the peak again, but not first
        Mark("loss", [1, 2]),  # 150
        Mark(PHASE, "backward"),  # 150
        Free(0, 100),  # 50
        Allocate(3, 60, 0x1000, "aten::mm"),  # 110: an address may come back, a number may not
        Free(1, 50),  # 60
    )
)
LABELS = {1: Label("activations", "net.act"), 3: Label("gradients", "net.weight", "MmBackward0")}


def test_curve_and_peak() -> None:
    timeline = Timeline(STREAM)
    assert timeline.curve == (100, 100, 150, 120, 150, 150, 150, 50, 110, 60)
    assert (timeline.peak_bytes, timeline.peak_index) == (150, 2)


def test_blocks_know_their_lives() -> None:
    blocks = Timeline(STREAM, LABELS).blocks
    assert [(b.allocated_at, b.freed_at) for b in blocks.values()] == [(0, 7), (2, 9), (4, None), (8, None)]
    assert blocks[1] == Block(1, 50, 0x2000, "aten::relu", 2, 9, LABELS[1])
    assert [b.category for b in blocks.values()] == ["temporaries", "activations", "temporaries", "gradients"]
    assert [b.name for b in blocks.values()] == [
        "aten::mm", "net.act aten::relu", "(outside any operator)", "net.weight MmBackward0",
    ]  # fmt: skip


def test_living_blocks_are_listed() -> None:
    timeline = Timeline(STREAM, LABELS)
    assert timeline.alive_at(-1) == ()
    assert [b.id for b in timeline.alive_at(6)] == [0, 1, 2]
    assert [b.id for b in timeline.alive_at(7)] == [1, 2]
    assert {category: [b.id for b in blocks] for category, blocks in timeline.alive_at_peak().items()} == {
        "activations": [1],
        "temporaries": [0],
    }
    assert [timeline.freed_from_entry(i) for i in (-1, 2, 3, 9)] == [0, 0, 30, 30]


def test_phases_have_their_own_peaks() -> None:
    assert Timeline(STREAM).phases == (Phase("forward", 1, 6, 150, 2), Phase("backward", 6, 10, 150, 6))
    assert Timeline(EventStream(())).phases == ()


def test_a_timeline_reads_like_a_table() -> None:
    assert str(Timeline(STREAM, LABELS)).splitlines() == [
        "peak 150 B over entry, in phase forward",
        "alive at the peak:",
        "  activations   50 B  1 block",
        "  temporaries  100 B  1 block",
        "most in each phase:",
        "  forward   150 B",
        "  backward  150 B",
        "largest blocks there:",
        "  temporaries  100 B  aten::mm",
        "  activations   50 B  net.act aten::relu",
    ]
    assert repr(Timeline(STREAM)) == "Timeline(peak_bytes=150, 10 events)"
    assert str(Timeline(EventStream(()))) == "peak 0 B over entry"


def test_phases_of_micro_batches_share_a_row() -> None:
    phases = [Mark(PHASE, "forward"), Mark(PHASE, "backward")] * 3
    blocks = [Allocate(n, 100 + n, 512 * n, "op") for n in range(6)]
    events = [event for n, phase in enumerate(phases) for event in (phase, blocks[n], Free(n, blocks[n].bytes))]
    lines = str(Timeline(EventStream(tuple(events)))).splitlines()
    at = lines.index("most in each phase:")
    assert lines[at + 1 : at + 3] == ["  forward   104 B  most of 3", "  backward  105 B  most of 3"]


def test_a_part_of_a_stream_has_its_own_entry() -> None:
    part = Timeline(STREAM.between(7, 10))
    assert part.curve == (-100, -40, -90)  # blocks 0 and 1 are from before
    assert (part.peak_bytes, part.peak_index) == (0, -1)
    assert part.freed_from_entry(2) == 150
    assert part.alive_at_peak() == {}


@st.composite
def streams(draw: st.DrawFn) -> EventStream:
    events: list[Event] = []
    alive: list[Allocate] = []
    n_blocks = n_entry = 0
    for _ in range(draw(st.integers(0, 30))):
        kind = draw(st.sampled_from("aafem" if alive else "aem"))
        if kind == "a":
            alive.append(Allocate(n_blocks, draw(st.integers(1, 1000)), 64 * n_blocks, "op"))
            events.append(alive[-1])
            n_blocks += 1
        elif kind == "f":
            block = alive.pop(draw(st.integers(0, len(alive) - 1)))
            events.append(Free(block.block, block.bytes))
        elif kind == "e":
            n_entry += 1
            events.append(Free(-n_entry, draw(st.integers(1, 1000))))
        else:
            events.append(Mark(draw(st.sampled_from([PHASE, "x"])), draw(st.text(max_size=3))))
    return EventStream(tuple(events))


@given(streams())
def test_the_level_is_living_bytes_less_those_freed_from_entry(stream: EventStream) -> None:
    timeline = Timeline(stream)
    for index, level in enumerate(timeline.curve):
        assert level == sum(b.bytes for b in timeline.alive_at(index)) - timeline.freed_from_entry(index)
    assert timeline.peak_bytes == max([0, *timeline.curve])
    for phase in timeline.phases:
        assert phase.peak_bytes == max(timeline.curve[phase.first : phase.stop]) == timeline.curve[phase.peak_index]


@given(streams(), st.integers(0, 30), st.integers(0, 30))
def test_a_part_follows_the_same_curve(stream: EventStream, first: int, length: int) -> None:
    whole, part = Timeline(stream), Timeline(stream.between(first, first + length))
    before = whole.curve[first - 1] if 0 < first <= len(stream) else 0
    assert part.curve == tuple(level - before for level in whole.curve[first : first + length])


@given(streams())
def test_json_and_back(stream: EventStream) -> None:
    assert EventStream.from_json(stream.to_json()) == stream


def test_timelines_go_to_json_too(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    Timeline(STREAM, LABELS).to_json(path)
    back = Timeline.from_json(path)
    assert (back.stream, back.labels, back.blocks) == (STREAM, LABELS, Timeline(STREAM, LABELS).blocks)


def test_data_that_json_cannot_hold_becomes_its_repr() -> None:
    back = EventStream.from_json(EventStream((Mark("x", {1, 2}),)).to_json())
    assert back.events == (Mark("x", "{1, 2}"),)


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"format": 99, "events": []}', '{"format": 1, "device": "", "events": 3}']
)
@pytest.mark.parametrize("record", [EventStream, Timeline])
def test_other_text_is_refused(text: str, record: type[EventStream] | type[Timeline]) -> None:
    with pytest.raises(LowtideError):
        record.from_json(text)


def test_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LowtideError, match=r"none\.json"):
        EventStream.from_json(tmp_path / "none.json")


def test_categories_are_listed_in_the_order_of_reports() -> None:
    assert CATEGORIES[0] == "parameters"
    assert CATEGORIES[-1] == "temporaries"


def test_streams_and_timelines_need_no_torch(run_python: RunPython) -> None:
    done = run_python("-c", "import sys, lowtide.memory.events; print('torch' in sys.modules)")
    assert done.stdout == "False\n"
