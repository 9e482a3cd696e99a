"""A plan file says what is decided for alike blocks once, and reads back as the same plan."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import LowtideError
from lowtide.planner import plan
from lowtide.planner.files import fold, ranges, read_plan, unfold, write_plan
from planner.profiles import chain

PLAN = replace(
    plan(chain(3), "80%"),
    remake={
        **{f"net.h.{i}.mlp.act#0:0": "GeluBackward0" for i in range(12)},
        **{f"net.h.{i}.ln#0:1": "NativeLayerNormBackward0" for i in (0, 1, 2, 5)},
        "net.h.3#0@0": "AddBackward0",
        "net.head#0:0": "MulBackward0",
        "#0:4": "ViewBackward0",
    },
    replay=("net.h.10.attn#0", "net.h.10.attn#1", "net.h.2#0"),
)


def test_alike_blocks_are_written_once():
    assert fold(PLAN.remake, PLAN.replay) == {
        "": {"remake": {"#0:4": "ViewBackward0", "net.head#0:0": "MulBackward0"}},
        "net.h.2": {"replay": ["#0"]},
        "net.h.3": {"remake": {"#0@0": "AddBackward0"}},
        "net.h.10": {"replay": ["attn#0", "attn#1"]},
        "net.h.{0-2,5}": {"remake": {"ln#0:1": "NativeLayerNormBackward0"}},
        "net.h.{0-11}": {"remake": {"mlp.act#0:0": "GeluBackward0"}},
    }


def test_a_plan_file_reads_back_as_the_plan(tmp_path: Path):
    text = write_plan(PLAN, tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json")
    assert read.decisions == PLAN.decisions
    assert replace(read, replay=PLAN.replay) == replace(PLAN, remake=dict(sorted(PLAN.remake.items())))
    assert json.loads(text)["decisions"]["net.h.{0-11}"] == {"remake": {"mlp.act#0:0": "GeluBackward0"}}


def test_the_long_form_is_read_as_well(tmp_path: Path):
    PLAN.to_json(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == PLAN


def test_an_edited_file_is_read_as_edited(tmp_path: Path):
    text = write_plan(PLAN).replace("net.h.{0-2,5}", "net.h.{7,9-10}")
    (tmp_path / "plan.json").write_text(text, encoding="utf-8")
    moved = [address for address in read_plan(tmp_path / "plan.json").remake if ".ln" in address]
    assert moved == ["net.h.10.ln#0:1", "net.h.7.ln#0:1", "net.h.9.ln#0:1"]


components = st.sampled_from(["0", "1", "2", "7", "10", "a", "b2", "mlp"])
paths = st.lists(components, max_size=4).map(".".join)


@given(
    st.dictionaries(st.builds("{}#{}{}{}".format, paths, st.integers(0, 2), st.sampled_from(":@"), st.integers(0, 11)),
                    st.sampled_from(["MulBackward0", "AddBackward0"])),
    st.sets(st.builds("{}#{}".format, paths, st.integers(0, 1))),
)  # fmt: skip
def test_nothing_is_lost_by_folding(remake: dict[str, str], replay: set[str]):
    found, calls = unfold(fold(remake, sorted(replay)))
    assert found == remake
    assert sorted(calls) == sorted(replay)


@given(st.sets(st.integers(0, 30), min_size=1))
def test_ranges_name_their_numbers(numbers: set[int]):
    remake = {f"h.{n}.act#0:0": "MulBackward0" for n in numbers}
    assert list(fold(remake, ())) == [f"h.{ranges(sorted(numbers))}"]
    assert unfold(fold(remake, ()))[0] == remake


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not a plan file"),
        ("[1]", "it is no JSON object"),
        ('{"decisions": 3}', "the decisions in"),
        ('{"decisions": {"h.0": {"recompute": []}}}', "'h.0' has recompute; it can have remake and replay"),
        ('{"decisions": {}}', "not a Plan of format 1"),
    ],
)
def test_nonsense_is_refused(text: str, says: str, tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(LowtideError, match=says):
        read_plan(path)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(LowtideError, match="no plan could be read"):
        read_plan(tmp_path / "plan.json")
