"""Memory over a step: its parts add up to the planner's numbers and the recorder's, and no peak is lost."""

import re
import resource
from random import Random

import pytest

from lowtide.memory import events
from lowtide.memory.events import PHASE, Allocate, Event, EventStream, Free, Label, Mark
from lowtide.memory.memory_timeline import Timeline
from lowtide.planner import find_smallest_peak
from lowtide.planner.records import Decisions, Profile, Static
from lowtide.planner.simulate.simulator import predict
from lowtide.report.page import asset
from lowtide.report.page import memory as picture
from lowtide.report.pictures import legend, slug
from lowtide.report.run_text import describe_peak
from lowtide.report.step_memory import CATEGORIES, MOST_MOMENTS, NAMED, predict_memory, read_recorded_memory
from planner.profiles import chain, random_profile, transformer


@pytest.mark.parametrize("profile", [chain(6), transformer(4), *(random_profile(seed, 40) for seed in range(4))])
@pytest.mark.parametrize("how", ["plain", "smallest"])
def test_parts_of_a_predicted_step_are_those_of_the_planner(profile: Profile, how: str) -> None:
    decisions = Decisions() if how == "plain" else find_smallest_peak(profile)[0]
    expected, found = predict(profile, decisions), predict_memory(profile, decisions)
    assert found.peak_bytes == expected.peak_bytes
    assert found.at[found.peak_moment] == expected.peak_position
    parts = {name.replace("optimizer", "optimizer state"): n for name, n in expected.parts.items() if n}
    assert found.parts_at(found.peak_moment) == parts


def test_a_long_predicted_step_keeps_its_peak() -> None:
    profile = transformer(60)
    assert len(profile.base_bytes) > 2 * MOST_MOMENTS
    can = {slot.address for slot in profile.slots if not slot.is_input and profile.values[slot.value].recipe}
    decisions = Decisions(recompute=frozenset(sorted(can)[::2]))
    found = predict_memory(profile, decisions)
    assert len(found.at) <= MOST_MOMENTS + 4
    assert found.peak_bytes == predict(profile, decisions).peak_bytes
    assert [span.name for span in found.phases] == [
        name for name, _ in sorted(profile.phases.items(), key=lambda each: each[1])
    ]


def drawn(n: int, seed: int = 0) -> EventStream:
    """Return `n` events of blocks of random sizes and lives, with two phases."""
    draw = Random(seed)
    events: list[Event] = [Mark(PHASE, "forward")]
    alive: list[tuple[int, int]] = []
    for i in range(n):
        if alive and draw.random() < 0.5:
            block, size = alive.pop(draw.randrange(len(alive)))
            events.append(Free(block, size))
        else:
            alive.append((i, draw.randrange(1, 2**20)))
            events.append(Allocate(*alive[-1], address=i, op="aten::mm"))
        if i == n // 2:
            events.append(Mark(PHASE, "backward"))
    return EventStream(tuple(events))


def test_a_long_recording_loses_no_peak() -> None:
    timeline = Timeline(drawn(20_000), {3: Label("activations", "h.0.act")})
    found = read_recorded_memory(timeline, "measured")
    assert found.peak_bytes == timeline.peak_bytes
    assert found.at[found.peak_moment] == timeline.peak_index
    for moment, total in zip(found.at, found.totals, strict=True):
        assert total == timeline.curve[moment]
    assert len(found.at) <= MOST_MOMENTS + 3
    width = len(timeline.curve) // MOST_MOMENTS
    for first in range(0, len(timeline.curve) - width, width):  # no part of the step has a higher level than is drawn
        drawn_there = [total for at, total in zip(found.at, found.totals, strict=True) if abs(at - first) <= 2 * width]
        assert max(timeline.curve[first : first + width]) <= max(drawn_there)


def test_the_largest_tensors_are_named_at_each_moment() -> None:
    timeline = Timeline(drawn(3_000))
    found = read_recorded_memory(timeline, "measured")
    for moment in (0, 100, found.peak_moment, len(found.at) - 1):
        expected = [block.bytes for block in timeline.alive_at(found.at[moment])[:NAMED]]
        assert [tensor.bytes for tensor in found.tensors_at(moment)] == expected


def test_memory_from_before_is_below_what_the_step_adds() -> None:
    stream = EventStream((Allocate(1, 100, 1, "a"), Free(-1, 40), Allocate(2, 60, 2, "b")))
    static = Static(parameters=500, gradients=30, optimizer=70)
    found = read_recorded_memory(Timeline(stream), "estimated", static)
    assert found.totals == (700, 660, 720)
    assert found.parts_at(2) == {"parameters": 500, "optimizer state": 60, "temporaries": 160}
    over_entry = read_recorded_memory(Timeline(stream), "measured")
    assert over_entry.totals == (100, 60, 120)
    assert over_entry.floor_bytes == -40
    *parts, total = map(int, re.findall(r'data-bytes="(-?\d+)"', legend(over_entry, 2, over_entry.bytes)))
    assert (sum(parts), total) == (120, 120)
    assert 'style="width:100.0%"' in legend(over_entry, 2, over_entry.bytes)  # of 160 bytes, not of 120
    assert ": 160 B of temporaries, less 40 B that was there at entry and is freed." in describe_peak(over_entry)


@pytest.mark.parametrize("category", events.CATEGORIES)
def test_memory_of_each_category_is_shown(category: events.Category) -> None:
    stream = EventStream((Allocate(1, 64, 0, "x"), Free(1, 64)))
    assert read_recorded_memory(Timeline(stream, {1: Label(category)}), "estimated").parts_at(0) == {category: 64}


@pytest.mark.parametrize("category", CATEGORIES)
def test_each_category_has_its_colour(category: str) -> None:
    assert f".lt-area.lt-{slug(category)} " in asset("page.css")
    assert asset("page.css").count(f"--{slug(category)}: ") == 3  # light, dark by the system, dark by the button


@pytest.mark.parametrize(("first_bytes", "is_right"), [(90, True), (10, False)])
def test_the_label_of_the_budget_is_on_the_side_without_the_peak(first_bytes: int, is_right: bool) -> None:
    """Labels of a peak and of a budget close to it are drawn at the same height."""
    stream = EventStream((Allocate(1, first_bytes, 1, "a"), Free(1, first_bytes), Allocate(2, 50, 2, "b")))
    page = picture(read_recorded_memory(Timeline(stream), "measured"), None, 95)
    assert ('class="lt-budget-name is-right"' in page) == is_right


def test_a_recording_without_events_is_shown() -> None:
    found = read_recorded_memory(Timeline(EventStream(())), "measured")
    assert found.peak_bytes == 0
    assert "all together" in picture(found, None)


@pytest.mark.slow
def test_a_million_events_take_less_than_a_gibibyte() -> None:
    timeline = Timeline(drawn(1_000_000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = read_recorded_memory(timeline, "measured")
    html = picture(found, None)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
    assert found.peak_bytes == timeline.peak_bytes
    assert len(html) < 3_000_000
