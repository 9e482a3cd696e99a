"""The bench for GPUs, tried on a CPU with tiny models: its rows, its breakdown, and the page made of its numbers."""

import json
import sys
from pathlib import Path

import on_gpu
import pytest
import torch
from step_clocks import count_python_calls, measure_step_times

CPU = torch.device("cpu")
CLOCKS = {"wall_ms", "pipelined_ms", "host_ms", "device_ms", "kernel_ms", "n_kernels", "n_calls"}


ROW = {"allocated": 100, "ms": 2.0, "host_ms": 1.5, "device_ms": None, "n_calls": 4000}
RESULT = {"model": "resnet", "rows": {"plain": ROW, "half": {**ROW, "ms": 2.2, "predicted_ms": 0.3}}}


@pytest.mark.slow
def test_every_way_has_its_clocks_and_its_peak(capsys: pytest.CaptureFixture[str]) -> None:
    resnet = on_gpu.work("resnet", 1, "cpu", tiny=True)
    rows = resnet["rows"]
    assert {"plain", "all kept", "less half", "less three quarters"} <= rows.keys()
    for row in rows.values():
        assert row.keys() >= CLOCKS | {"requested", "allocated", "ms"}
        assert row["device_ms"] is row["kernel_ms"] is row["n_kernels"] is None
    assert rows["all kept"]["n_calls"] > rows["plain"]["n_calls"]
    assert rows["less half"]["measured"] <= rows["less half"]["budget"]
    assert rows["less half"]["identical"]
    on_gpu.show(resnet)
    assert "Python calls" in capsys.readouterr().out


def test_the_page_has_the_rows_of_the_recorded_runs_and_nothing_else_changes(tmp_path: Path) -> None:
    file = tmp_path / "cuda.json"
    about = {"date": "2026-11-28", "gpu": "a CPU", "driver": "none", "torch": "2.13.0"}
    for _ in range(2):
        on_gpu.record(file, about, [RESULT])
    runs = json.loads(file.read_text())
    assert len(runs) == 2
    page = f"above\n{on_gpu.MARKS[0]}\nold rows\n{on_gpu.MARKS[1]}\nbelow\n"
    new = on_gpu.renewed(page, runs)
    assert "old rows" not in new
    assert new.startswith("above\n")
    assert new.endswith("\nbelow\n")
    assert new.count("| **resnet** ") == 2
    assert "| half | 100 | 100% | 2.2 ms | +10.0% | +15.0% | 1.5 ms |  |  |  | 4,000 |" in new
    assert on_gpu.renewed(new, runs) == new
    with pytest.raises(ValueError, match="no lines"):
        on_gpu.renewed("a page", runs)


def test_the_page_in_the_repository_is_made_of_its_numbers() -> None:
    page = on_gpu.PAGE.read_text()
    assert on_gpu.renewed(page, json.loads(on_gpu.RECORDS.read_text())) == page


def test_a_breakdown_goes_on_after_a_part_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(device: torch.device, tiny: bool) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(on_gpu.PARTS, "rates", fails)
    found = on_gpu.break_down([], "cpu", tiny=True, limit_s=1e9, steps=1)
    assert found["rates"] == {"failed": "RuntimeError: no such kernel"}
    assert all(way["equal"] for row in found["recomputes"].values() for way in row.values())
    assert found["slots"]["a saved tensor, beyond its operators"]["recomputed_us"] > 0
    assert found["models"] == {}
    assert "rates: failed" in capsys.readouterr().out


def test_no_part_begins_after_the_limit() -> None:
    assert on_gpu.break_down(["resnet"], "cpu", tiny=True, limit_s=0.0, steps=1) == {}


def test_python_calls_are_counted() -> None:
    def called() -> None:
        pass

    n = count_python_calls(lambda: None)
    assert count_python_calls(lambda: [called() for _ in range(5)]) - n in (
        5,
        6,
    )  # 6 where a list has a frame of its own
    assert measure_step_times(lambda: called(), CPU, runs=1).n_calls == count_python_calls(lambda: called())


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--device", "cpu"], "takes --tiny"), (["gpt5"], "no model gpt5: there are gpt2, bert")]
)
def test_bad_arguments_are_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", *arguments])
    with pytest.raises(SystemExit):
        on_gpu.main()
    assert said in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: a CPU has no kernels to count")
@pytest.mark.gpu
def test_a_gpu_has_times_of_device_and_kernels() -> None:
    x = torch.ones(1024, 1024, device="cuda")
    found = measure_step_times(lambda: [x @ x for _ in range(20)], torch.device("cuda"))
    assert found.n_kernels is not None
    assert found.n_kernels >= 20
    assert found.device_ms is not None
    assert found.kernel_ms is not None
    assert 0 < found.kernel_ms <= 1.2 * found.device_ms
