"""A plan's JSON says what is decided for alike blocks once, and reads back as the same plan."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import LowtideError
from lowtide.planner import plan
from lowtide.planner.address_nodes import NOTED, names_at
from lowtide.planner.folded_decisions import fold, ranges, unfold
from lowtide.planner.records import Plan
from planner.profiles import chain

PLAN = replace(
    plan(chain(3), "80%"),
    recompute={
        **{f"net.h.{i}.mlp.act#0:0": "GeluBackward0" for i in range(12)},
        **{f"net.h.{i}.ln#0:1": "NativeLayerNormBackward0" for i in (0, 1, 2, 5)},
        "net.h.3#0@0": "AddBackward0",
        "net.head#0:0": "MulBackward0",
        "#0:4": "ViewBackward0",
    },
    replay=("net.h.10.attn#0", "net.h.10.attn#1", "net.h.2#0"),  # in order of their text
)


def test_alike_blocks_are_written_once():
    assert fold(PLAN.recompute, PLAN.replay) == {
        "": {"recompute": {"#0:4": "ViewBackward0", "net.head#0:0": "MulBackward0"}},
        "net.h.2": {"replay": ["#0"]},
        "net.h.3": {"recompute": {"#0@0": "AddBackward0"}},
        "net.h.10": {"replay": ["attn#0", "attn#1"]},
        "net.h.{0-2,5}": {"recompute": {"ln#0:1": "NativeLayerNormBackward0"}},
        "net.h.{0-11}": {"recompute": {"mlp.act#0:0": "GeluBackward0"}},
    }


def test_a_plan_file_reads_back_as_the_plan(tmp_path: Path):
    text = PLAN.to_json(tmp_path / "plan.json")
    assert Plan.from_json(tmp_path / "plan.json") == PLAN == Plan.from_json(text)
    assert json.loads(text)["decisions"]["net.h.{0-11}"] == {"recompute": {"mlp.act#0:0": "GeluBackward0"}}
    assert not {"recompute", "replay"} & json.loads(text).keys()


def test_an_edited_file_is_read_as_edited():
    text = PLAN.to_json().replace("net.h.{0-2,5}", "net.h.{7,9-10}")
    moved = [address for address in Plan.from_json(text).recompute if ".ln" in address]
    assert moved == ["net.h.10.ln#0:1", "net.h.7.ln#0:1", "net.h.9.ln#0:1"]


components = st.sampled_from(["0", "1", "2", "7", "10", "a", "b2", "mlp"])
paths = st.lists(components, max_size=4).map(".".join)


@given(
    st.dictionaries(st.builds("{}#{}{}{}".format, paths, st.integers(0, 2), st.sampled_from(":@"), st.integers(0, 11)),
                    st.sampled_from(["MulBackward0", "AddBackward0"])),
    st.sets(st.builds("{}#{}".format, paths, st.integers(0, 1))),
    st.sets(st.builds("{}#{}".format, paths, st.integers(0, 1))),
)  # fmt: skip
def test_nothing_is_lost_by_folding(recompute: dict[str, str], replay: set[str], advance: set[str]):
    lists = tuple(tuple(sorted(found)) for found in (replay, advance, recompute.keys()))
    assert unfold(fold(recompute, *lists)) == (recompute, *lists)


@given(st.sets(st.integers(0, 30), min_size=1))
def test_ranges_name_their_numbers(numbers: set[int]):
    recompute = {f"h.{n}.act#0:0": "MulBackward0" for n in numbers}
    assert list(fold(recompute, ())) == [f"h.{ranges(numbers)}"]
    assert unfold(fold(recompute, ()))[0] == recompute


@pytest.mark.parametrize(
    ("decisions", "says"),
    [
        (None, "Expected `object`, got `null`"),
        (3, "Expected `object`, got `int`"),
        ({"h.0": {"forget": []}}, "'h.0' has forget; it can have recompute, replay, advance, offload"),
        ({"h.0": {"recompute": ["act#0:0"]}}, "'h.0' must have an object of nodes by address as recompute"),
        ({"h.0": {"replay": {"act#0": ""}}}, "a list of calls as replay"),
        ({"h.{}": {"replay": [3]}}, "Expected `str`, got `int`"),
        ({"h.{-}": {"replay": ["a#0"]}}, "'h.{-}' is not a block path"),
        ({"h.{0,5-2}": {"replay": ["a#0"]}}, "'h.{0,5-2}' is not a block path"),
    ],
)
def test_nonsense_is_refused(decisions: object, says: str):
    text = json.dumps({**json.loads(PLAN.to_json()), "decisions": decisions})
    with pytest.raises(LowtideError, match="not a Plan of format 3") as caught:
        Plan.from_json(text)
    assert says in str(caught.value)


def test_a_key_that_is_no_block_is_quoted_up_to_100_characters():
    with pytest.raises(ValueError, match=r"^'{3-1}a{95}' is not a block path"):
        unfold({"{3-1}" + "a" * 200: {"replay": ["#0"]}})


def test_only_the_first_call_that_saves_a_value_names_its_captured_operands() -> None:
    named = f"SoftmaxBackward0{NOTED} 0,2"
    slots = [("a#0:0", 7), ("a#0:3", 7), ("b#0:0", 7), ("b#0:1", 8)]
    assert names_at(slots, {7: named}) == {"a#0:0": named, "a#0:3": named, "b#0:0": "SoftmaxBackward0"}
