"""Memory snapshots of PyTorch, read and summed up."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from conftest import RunPython
from lowtide.cli import main
from lowtide.errors import LowtideError
from lowtide.memory.allocator.config import AllocatorConfig
from lowtide.memory.events import Allocate, Free, Mark
from lowtide.memory.memory_timeline import Timeline
from lowtide.memory.snapshot_summary import BEFORE, Share, State, summarize
from lowtide.memory.snapshots.history import ANNOTATION
from lowtide.memory.snapshots.plain_pickle import load_plain
from lowtide.memory.snapshots.read import Snapshot
from lowtide.memory.snapshots.stack_frames import operator, place

MIB = 2**20

STACK = [
    {"name": "torch::unwind::unwind()", "filename": "??", "line": 0},
    {"name": "at::_ops::mul_Tensor::redispatch(c10::DispatchKeySet, at::Tensor const&)", "filename": "??", "line": 0},
    {"name": "forward", "filename": "lib/python3.12/site-packages/torch/nn/modules/activation.py", "line": 7},
    {"name": "forward", "filename": "project/model.py", "line": 42},
]


def action(kind: str, address: int, size: int, time_us: int, **more: Any) -> dict[str, Any]:
    return {"action": kind, "addr": address, "size": size, "stream": 0, "time_us": time_us, "frames": [], **more}


def block(address: int, size: int, requested: int, state: str, **more: Any) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": [], **more}


SEGMENT = {"device": 0, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False}
# By hand, in the form of torch 2.13. At the start one segment with three blocks (a, b and one that is freed), 11 MiB
# in use; then 30 MiB are taken from the device and given back, and c is allocated where the third block was.
RECORD: dict[str, Any] = {
    "segments": [
        {
            **SEGMENT,
            "address": 0x1000_0000,
            "total_size": 20 * MIB,
            "blocks": [
                block(0x1000_0000, 4 * MIB, 4 * MIB - 100, "active_allocated", frames=STACK),  # a
                block(0x1040_0000, 2 * MIB, 2 * MIB, "active_pending_free"),  # b
                block(0x1060_0000, 3 * MIB, 3 * MIB, "active_allocated"),  # c
                block(0x1090_0000, 11 * MIB, 7, "inactive"),
            ],
        },
        {
            **SEGMENT,
            "address": 0x3000_0000,
            "total_size": 2 * MIB,
            "blocks": [block(0x3000_0000, 2 * MIB, 0, "inactive")],
        },
    ],
    "device_traces": [
        [
            action("segment_alloc", 0x2000_0000, 30 * MIB, 10),
            action("alloc", 0x2000_0000, 30 * MIB, 11, frames=STACK),
            action("free_requested", 0x1060_0000, 5 * MIB, 12),
            action("free_completed", 0x1060_0000, 5 * MIB, 12, frames=STACK),
            action("free_requested", 0x2000_0000, 30 * MIB, 20),
            action("free_completed", 0x2000_0000, 30 * MIB, 21),
            action("segment_free", 0x2000_0000, 30 * MIB, 22),
            action("alloc", 0x1060_0000, 3 * MIB, 23),
            action("free_requested", 0x1040_0000, 2 * MIB, 24),
            {"action": "oom", "device_free": 5, "size": 99, "stream": 0, "time_us": 25, "frames": []},
            {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": 26, "frames": []},
        ],
        [],
    ],
    "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8"},
    "external_annotations": [
        {"stage": "START", "name": "Optimizer.step", "device": 0, "time_us": 12},
        {"stage": "END", "name": "Optimizer.step", "device": 0, "time_us": 22},
    ],
}

# --- reading --------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_rewound_to_its_start_and_told_from_there() -> None:
    history = Snapshot(RECORD).history()
    assert history.stream.events == (
        Allocate(0, 4 * MIB - 100, 0x1000_0000, "aten::mul"),
        Allocate(1, 2 * MIB, 0x1040_0000, ""),
        Allocate(2, 5 * MIB, 0x1060_0000, ""),  # gone at the end; the stack of its free says nothing of its origin
        Allocate(3, 30 * MIB, 0x2000_0000, "aten::mul"),
        Mark(ANNOTATION, "Optimizer.step"),
        Free(2, 5 * MIB),
        Free(3, 30 * MIB),
        Allocate(4, 3 * MIB, 0x1060_0000, ""),
    )
    assert (history.device, history.n_entry) == (0, 3)
    assert Timeline(history.stream, history.labels).peak_bytes == 41 * MIB - 100
    assert history.places == {0: "model.py:42 forward", 3: "model.py:42 forward"}
    assert history.reserved == tuple(n * MIB for n in (22, 22, 22, 52, 52, 52, 52, 22))
    assert history.peak_reserved_bytes == 52 * MIB
    over_entry = Timeline(history.stream.between(history.n_entry, len(history.stream)))
    assert (over_entry.peak_bytes, over_entry.curve[-1]) == (30 * MIB, -2 * MIB)


def test_the_summary() -> None:
    summary = summarize(Snapshot(RECORD), others=[AllocatorConfig()])
    assert (summary.device, summary.settings, summary.n_events) == (0, "garbage_collection_threshold:0.8", 5)
    assert (summary.peak_bytes, summary.reserved_at_peak_bytes, summary.peak_reserved_bytes) == (
        41 * MIB - 100, 52 * MIB, 52 * MIB,
    )  # fmt: skip
    assert summary.peak_during is None
    assert summary.categories == ()
    assert summary.origins == (
        Share("model.py:42 forward, aten::mul", 34 * MIB - 100, 2),
        Share(BEFORE, 7 * MIB, 2),
    )
    assert summary.at_end == State(
        requested_bytes=9 * MIB - 100,
        rounding_bytes=100,
        idle_in_use_bytes=11 * MIB,
        idle_segments_bytes=2 * MIB,
        largest_idle_bytes=11 * MIB,
        n_segments=2,
    )
    assert summary.at_end.reserved_bytes == 22 * MIB
    assert summary.under == {"": 50 * MIB}  # 20 for the three from before, 30 for the large one


def test_a_snapshot_of_segments_alone() -> None:
    history = Snapshot({"segments": RECORD["segments"]}).history()
    assert [b.bytes for b in Timeline(history.stream, history.labels).blocks.values()] == [
        4 * MIB - 100,
        2 * MIB,
        3 * MIB,
    ]
    assert (history.n_entry, history.peak_reserved_bytes) == (3, 22 * MIB)
    assert Snapshot({"segments": []}).devices == ()


def test_which_device_must_be_clear() -> None:
    other = {**RECORD["segments"][1], "device": 1}
    two = Snapshot({**RECORD, "segments": [*RECORD["segments"], other]})
    assert two.devices == (0, 1)
    assert two.history(1).peak_reserved_bytes == 2 * MIB
    with pytest.raises(LowtideError, match=r"does not say of which device. It knows devices: 0, 1"):
        two.history()
    with pytest.raises(LowtideError, match=r"device 7 was asked for"):
        two.history(7)


def test_a_history_with_gaps_is_refused() -> None:
    trace = [entry for entry in RECORD["device_traces"][0] if entry["action"] != "free_completed"]
    with pytest.raises(LowtideError, match=r"31457280 bytes at 0x20000000 was allocated, not freed(.|\n)*skip_actions"):
        Snapshot({**RECORD, "device_traces": [trace]}).history()


def test_other_data_is_refused() -> None:
    for record in ({}, {"segments": 3}, 7, "text"):
        with pytest.raises(LowtideError, match="not a memory snapshot"):
            Snapshot(record)
    with pytest.raises(LowtideError, match="unknown form"):
        Snapshot({"segments": [{"device": 0}]}).history()


def test_operator_and_place_are_read_from_a_stack() -> None:
    assert (operator(STACK), place(STACK)) == ("aten::mul", "model.py:42 forward")
    assert (operator(STACK[2:]), place(STACK[:3])) == ("forward", "activation.py:7 forward")
    assert (operator([]), place([]), place(STACK[:2])) == ("", "", "")


class Harmful:
    """Unpickling it would make a folder, were it not refused."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_only_plain_data_is_read(tmp_path: Path) -> None:
    file, folder = tmp_path / "snapshot.pickle", tmp_path / "made"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        file.write_bytes(pickle.dumps({"segments": [], "x": Harmful(folder)}, protocol))
        with pytest.raises(LowtideError, match=r"not a memory snapshot: it names \w+\.mkdir(.|\n)*_dump_snapshot"):
            Snapshot.read(file)
    assert not folder.exists()
    for value in (print, Path, AllocatorConfig()):
        file.write_bytes(pickle.dumps(value))
        with pytest.raises(LowtideError, match="it names"):
            load_plain(file)
    for data in (b"", b"text", pickle.dumps(RECORD)[:-40]):
        file.write_bytes(data)
        with pytest.raises(LowtideError, match="not a memory snapshot"):
            load_plain(file)
    with pytest.raises(LowtideError, match=r"nothing\.pickle"):
        load_plain(tmp_path / "nothing.pickle")
    plain = {"a": [1, 2.5, None, True], (1, 2): "b", "big": 2**80, "c": {"d": b"e"}}
    file.write_bytes(pickle.dumps(plain))
    assert load_plain(file) == plain


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps(RECORD))
    assert main(["snapshot", str(file), "--alloc-conf", ""]) == 0
    printed = capsys.readouterr().out
    assert "device 0: peak 41 MiB requested" in printed
    assert "held from the device, garbage_collection_threshold:0.8:" in printed
    assert "at most, if default    50 MiB  (simulated)" in printed
    assert "model.py:42 forward, aten::mul    34 MiB  2 blocks" in printed
    assert "at the end, 22 MiB in 2 segments:" in printed
    assert "idle beside blocks in use    11 MiB  50 %" in printed
    assert main(["snapshot", str(file), "--top", "1"]) == 0
    assert "1 other" in capsys.readouterr().out
    assert main(["snapshot", str(file), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["peak_bytes"], record["at_end"]["idle_in_use_bytes"]) == (41 * MIB - 100, 11 * MIB)


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(b"text")
    assert main(["snapshot", str(file)]) == 2
    assert "not a memory snapshot" in capsys.readouterr().err
    file.write_bytes(pickle.dumps(RECORD))
    assert main(["snapshot", str(file), "--alloc-conf", "max_split:1"]) == 2
    assert "max_split_size_mb" in capsys.readouterr().err


def test_reading_needs_no_torch(run_python: RunPython) -> None:
    code = "import sys, lowtide.cli.snapshot, lowtide.memory.snapshot_summary; print('torch' in sys.modules)"
    assert run_python("-c", code).stdout == "False\n"
