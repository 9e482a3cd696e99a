"""Records are the same after a trip through JSON, and nonsense is refused with an error of ours."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import RunPython
from lowtide.errors import LowtideError
from lowtide.planner import plan, predict
from lowtide.planner.records import AppliedLever, Decisions, Fingerprint, Plan, Prediction, Profile, Static
from lowtide.planner.serialization import Record
from planner.profiles import FINGERPRINT, chain, profiles

PLAN = plan(chain(3), "80%")
RECORDS: list[Record] = [
    FINGERPRINT,
    Static(parameters=3, inputs=2**40),
    Decisions(recompute=frozenset({"a#0:1", "a#0@0"}), replay=frozenset({"a#0"})),
    predict(chain(3), Decisions()),
    chain(2),
    PLAN,
    *(part for whole in (chain(1),) for part in (whole.storages[0], whole.values[0], whole.slots[0], whole.calls[0])),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_survives_json(record: Record, tmp_path: Path) -> None:
    assert type(record).from_json(record.to_json()) == record
    text = record.to_json(tmp_path / "record.json")
    assert type(record).from_json(tmp_path / "record.json") == record
    assert type(record).from_json(str(tmp_path / "record.json")) == record
    assert json.loads(text) == json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))


@given(profiles())
def test_any_profile_survives_json(profile: Profile) -> None:
    assert Profile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize("kind", [Profile, Plan, Prediction, Fingerprint])
@pytest.mark.parametrize(
    "nonsense",
    ["", "{", "{}", "[]", "null", "{\ud800", "\0", "no/such/file.json", "x" * 5000, '{"a":' * 100_000, '{"torch": 3}'],
    ids=lambda text: repr(text[:12]),
)
def test_nonsense_is_refused(kind: type[Record], nonsense: str) -> None:
    with pytest.raises(LowtideError, match=kind.__name__):
        kind.from_json(nonsense)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(LowtideError, match="not a Plan of format 3"):
        Plan.from_json(tmp_path / "plan.json")


def test_an_invalid_plan_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(
        LowtideError,
        match=r"not a Plan of format 3: it has no decisions.\n.*`lowtide plan make --budget",
    ):
        Plan.from_json('{"a": 1}')


def test_another_format_is_refused() -> None:
    for number in (1, 2):
        other = PLAN.to_json().replace('"format": 3', f'"format": {number}')
        with pytest.raises(LowtideError, match=f"not a Plan of format 3: it has format {number}, which"):
            Plan.from_json(other)


def test_a_plan_of_the_first_format_is_refused_by_its_format_and_not_by_its_fields() -> None:
    first = PLAN.to_json().replace('"format": 3', '"format": 1').replace('"recompute"', '"remake"')
    with pytest.raises(LowtideError, match=r"it has format 1, .*\n.*lowtide plan make"):
        Plan.from_json(first)


def test_a_record_of_another_kind_is_called_by_its_name() -> None:
    with pytest.raises(LowtideError, match="not a Profile but a Plan"):
        Profile.from_json(PLAN.to_json())
    with pytest.raises(LowtideError, match="not a Plan but a Profile"):
        Plan.from_json(chain(3).to_json())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(json.loads(PLAN.to_json()))), JSON)
def test_a_plan_with_another_value_somewhere_is_read_or_refused(field: str, value: object) -> None:
    content = json.loads(PLAN.to_json())
    content[field] = value
    try:
        plan = Plan.from_json(json.dumps(content))
    except LowtideError:
        return
    assert plan == Plan.from_json(plan.to_json())


def test_reading_records_does_not_import_scipy(run_python: RunPython) -> None:
    code = "import sys, lowtide.planner.budget_frontier, lowtide.report.plan_text as _\n"
    code += "print({'scipy', 'torch'} & {*sys.modules})"
    assert run_python("-c", code).stdout.strip() == "set()"


def test_fingerprints_say_where_they_differ() -> None:
    other = Fingerprint(torch="2.14.0", model="model", batch=FINGERPRINT.batch, device="cuda")
    assert FINGERPRINT.differences(FINGERPRINT) == ()
    assert FINGERPRINT.differences(other) == (
        "torch: made for 2.13.0, found 2.14.0",
        "device: made for cpu, found cuda",
    )


def test_a_function_that_takes_a_record_names_it_and_how_to_read_one(tmp_path: Path) -> None:
    hint = "Plan.from_json(path) reads one"
    for path in ("plan.json", tmp_path / "plan.json"):
        with pytest.raises(LowtideError, match=re.escape(f"apply takes a Plan, found {type(path).__name__}; {hint}.")):
            Plan.expect(path, "apply")
    with pytest.raises(LowtideError, match=r"^apply takes a Plan, found int\.$"):
        Plan.expect(3, "apply")


def test_fingerprints_differ_in_either_direction() -> None:
    one = Fingerprint(torch="2.13", model="a", batch="x", device="cpu")
    other = replace(one, torch="2.12", model="b")
    assert one.differences(other) == ("torch: made for 2.13, found 2.12", "model: made for a, found b")
    assert other.differences(one) == ("torch: made for 2.12, found 2.13", "model: made for b, found a")
    assert one.differences(one) == ()


def test_a_lever_takes_no_time_unless_that_was_measured() -> None:
    lever = AppliedLever(name="outputs", what="", exact=True)
    assert (lever.extra_ms, lever.bytes) == (0, 0)
