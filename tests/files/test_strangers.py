"""Files from anywhere: little memory, and an answer or one line of error with exit code 2. Never a traceback."""

import gzip
import json
import pickle
import tracemalloc
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from allocator_traces import Trace

from conftest import RunPython
from lowtide.cli import main
from lowtide.errors import LowtideError
from lowtide.levers import enable_plan_levers
from lowtide.memory.events import Allocate, EventStream, Free, Label, Mark
from lowtide.memory.memory_timeline import Timeline
from lowtide.planner import plan
from lowtide.planner.budget_frontier import frontier
from lowtide.planner.records import AppliedLever, Plan, Profile
from memory.test_snapshots import RECORD
from planner.profiles import chain
from report.runs import FINDINGS, run

MIB = 2**20
HERE = Path(__file__).parent
SEEDS = (1, 2)
COUNT = 40
"""Files of each format that are damaged, for each seed."""
TRACE = HERE.parent / "memory" / "data" / "t1_tiny.json.gz"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of each format."""
    to = tmp_path_factory.mktemp("files")
    profile = chain(3)
    stream = EventStream((Allocate(0, 512, 4096, "aten::mm"), Mark("phase", "forward"), Free(0, 512)))
    profile.to_json(to / "profile.json")
    plan(profile, "80%").to_json(to / "plan.json")
    points = [json.loads(point.to_json()) for point in frontier(profile, n_budgets=3).points]
    (to / "points.json").write_text(json.dumps(points))
    stream.to_json(to / "stream.json")
    Timeline(stream, {0: Label("activations", "h.0", "aten::mm")}).to_json(to / "timeline.json")
    run().to_json(to / "run.json")
    (to / "watched.json").write_text(json.dumps({"steps": 7, "findings": msgspec.to_builtins(FINDINGS)}))
    (to / "trace.json.gz").write_bytes(TRACE.read_bytes())
    (to / "snapshot.pickle").write_bytes(pickle.dumps(RECORD))
    return to


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_files_of_every_format(seed: int, folder: Path, run_python: RunPython) -> None:
    done = run_python(str(HERE / "mutations.py"), str(folder), str(seed), str(COUNT), path=HERE.parents[1] / "bench")
    assert (done.stdout, done.returncode) == ("", 0), f"seed {seed}\n{done.stdout}{done.stderr}"


def peak_of_reading(argv: list[str]) -> int:
    """Bytes that a command takes at most which ends with exit code 2."""
    assert main(["plan", "show", "/"]) == 2  # what is imported once
    tracemalloc.start()
    try:
        assert main(argv) == 2
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


SHARED = [{"address": 1, "size": 1, "state": "inactive"}] * 3000


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (bytes.fromhex("80045d72000000082e"), "value 134217728 of its memo"),
        (b"p99999999\n.", "value 99999999 of its memo"),
        (b"\x80\x04\x8e" + (2**40).to_bytes(8, "little") + b".", "announces 1099511627776 bytes"),
        (b"\x80\x04\x95" + (2**40).to_bytes(8, "little") + b".", "announces 1099511627776 bytes"),
        (b"\x80\x04" + b"]" * MIB + b".", "nothing but empty lists"),
        (b"\x80\x04" + b"\x8f" * MIB + b".", "opcode"),
        (b"\x80\x04}" + b")" + b"\x85" * MIB + b"K\x01s.", "a tuple of other things than numbers"),
        (pickle.dumps([]), ""),
        (pickle.dumps([1, 2]), "type int"),
        (pickle.dumps({"segments": [{"blocks": SHARED}] * 3000}), "entries, many of them several times"),
        (pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "size": float("nan")}]]}), "is nan"),
        (pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "size": 10**5000}]]}), "a large int"),
        (pickle.dumps({"segments": [], "allocator_settings": {"PYTORCH_ALLOC_CONF": 3}}), "text was expected"),
    ],
)
def test_a_pickle_that_would_take_much_or_says_nothing(
    data: bytes, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(data)
    assert peak_of_reading(["snapshot", str(file)]) < 3 * MIB + 8 * len(data)
    assert why in said(capsys)


@pytest.mark.parametrize("name", ["h.{0-99999999999}", "h.{0-99999,0-99999,0-99999}", "h.{0-" + "9" * 5000 + "}"])
def test_a_name_in_a_plan_that_stands_for_very_many(name: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    text = json.loads(plan(chain(3), "80%").to_json())
    file.write_text(json.dumps({**text, "decisions": {name: {"replay": ["#0"]}}}))
    assert peak_of_reading(["plan", "show", str(file)]) < 4 * MIB


@pytest.mark.parametrize(
    "block",
    [
        {"recompute": {"mlp:0": "GeluBackward0"}},
        {"recompute": {"mlp#0": "GeluBackward0"}},
        {"recompute": {"mlp#0:0": "GeluBackward0+noted x"}},
        {"replay": ["mlp"]},
        {"advance": ["mlp#\N{SUPERSCRIPT TWO}"]},
        {"offload": ["mlp#0:" + "1" * 5000]},
    ],
)
def test_a_damaged_name_in_a_plan(block: dict[str, object]) -> None:
    text = json.loads(plan(chain(3), "80%").to_json())
    for more in ({"decisions": {"h.0": block}}, {"fallback": {"decisions": {"h.0": block}}}):
        with pytest.raises(LowtideError, match=r"not a Plan of format 3: .* is (no|not an) "):
            Plan.from_json(json.dumps({**text, **more}))


@pytest.mark.parametrize("number", ["1" + "0" * 30, "-4611686018427387904", "1" + "0" * 5000, "1e999", "1e300", "NaN"])
@pytest.mark.parametrize("field", ["bytes", "cost_ms", "begins_at", "parameters"])
def test_a_number_in_a_profile_that_can_not_be_reckoned_with(number: str, field: str, tmp_path: Path) -> None:
    text = chain(3).to_json()
    at = text.index(f'"{field}": ') + len(f'"{field}": ')
    file = tmp_path / "profile.json"
    file.write_text(text[:at] + number + text[min(text.index(end, at) for end in ",}") :])
    for argv in (["rehearse", str(file)], ["plan", "make", "--budget", "80%", str(file)], ["frontier", str(file)]):
        assert main(argv) == 2


@pytest.mark.parametrize("draws", [-1, 1001, 2**61])
def test_steps_with_other_random_numbers_that_never_come_to_an_end(draws: int) -> None:
    profile = chain(3)
    for record in (profile, plan(profile, "80%")):
        with pytest.raises(LowtideError, match=r"is not a (Profile|Plan) of format 3: Expected `int` .*`\$.draws`"):
            type(record).from_json(replace(record, draws=draws).to_json())


@pytest.mark.parametrize("settings", [{}, {"n": 0.0}, {"n": -1.0}, {"n": 2.5}])
def test_a_lever_in_a_plan_with_an_impossible_number_of_pieces(settings: dict[str, float]) -> None:
    lever = AppliedLever(name="micro-batches", what="", exact=False, settings=settings)
    stranger = replace(plan(chain(3), "80%"), levers=(lever,))
    with pytest.raises(LowtideError, match="'micro-batches' needs a whole number of pieces, 1 or more; found n="):
        enable_plan_levers(Plan.from_json(stranger.to_json()), torch.nn.Linear(2, 2), ())


def test_a_compressed_file_that_stands_for_very_much(tmp_path: Path) -> None:
    file = tmp_path / "trace.json.gz"
    file.write_bytes(gzip.compress(b" " * (64 * MIB)))
    tracemalloc.start()
    with pytest.raises(LowtideError, match="more than 64 times its bytes"):
        Trace.read(file)
    assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    tracemalloc.stop()
    file.write_bytes(gzip.compress(TRACE.read_bytes())[:-9])
    with pytest.raises(LowtideError, match="it is cut off"):
        Trace.read(file)


def test_written_files_are_read_back(folder: Path) -> None:
    profile = chain(3)
    assert Profile.from_json(folder / "profile.json") == profile
    assert Plan.from_json(folder / "plan.json") == plan(profile, "80%")
    assert main(["snapshot", str(folder / "snapshot.pickle")]) == 0
