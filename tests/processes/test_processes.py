"""Training in several processes, real ones: what a plan does there, and what is refused."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import RunPython
from lowtide.planner.records import Plan

HERE = Path(__file__).parent
WAYS = (
    *("fsdp", "meta-fsdp-bf16", "hsdp", "offload-fsdp", "after2-fsdp", "accumulate-fsdp", "checkpoint-fsdp", "ddp"),
    "fsdp-tp",
)
"""Ways to spread a model over GPUs that `train_absent.py` knows."""


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(("sharded.fits_half_precision",), id="half precision"),
        pytest.param(
            (
                "wrapped.fits_alone",
                "wrapped.fits_views_of_buckets",
                "wrapped.fits_with_unused_parameters",
                "wrapped.fits_before_it_is_wrapped",
                "wrapped.counts_buckets",
                "wrapped.estimates_buckets",
                "wrapped.refuses_what_waits",
                "wrapped.refuses_an_update_too_early",
            ),
            marks=pytest.mark.slow,
            id="DDP",
        ),
        pytest.param(
            (
                "sharded.fits",
                "sharded.fits_what_stays_whole",
                "sharded.fits_copies",
                "sharded.fits_tensor_parallel",
                "sharded.fits_units_in_units",
                "sharded.fits_steps_of_micro_batches",
                "sharded.is_as_it_was",
                "sharded.is_told_what_is_not_whole",
                "sharded.refuses",
            ),
            marks=pytest.mark.slow,
            id="FSDP2",
        ),
        pytest.param(
            (
                "estimated.estimates_what_is_sharded",
                "estimated.estimates_half_precision",
                "estimated.estimates_what_stays_whole",
                "estimated.estimates_micro_batches",
                "estimated.estimates_checkpoints",
                "estimated.estimates_uneven_parts",
                "estimated.estimates_tensor_parallel",
                "estimated.trains_on_after_an_estimate",
            ),
            marks=pytest.mark.slow,
            id="estimates",
        ),
    ],
)
def test_two_processes(cases: tuple[str, ...], run_python: RunPython, tmp_path: Path) -> None:
    done = run_python(str(HERE / "together.py"), str(tmp_path / "meeting"), *cases, path=HERE.parent)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"(.+): as it should be", done.stdout)) == sorted(cases * 2)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_script_for_eight_gpus_is_estimated_without_any(way: str, run_python: RunPython) -> None:
    script = str(HERE / "train_absent.py")
    done = run_python("-m", "lowtide", "estimate", "--device", "8 x h100-80", "--rank", "0", script, way)
    assert done.returncode == 0, done.stderr
    assert "on each of 8 x H100-80, rank 0, with 79.2 GiB: it fits" in done.stdout


@pytest.mark.slow
def test_the_first_and_the_last_process_are_estimated(run_python: RunPython) -> None:
    script = str(HERE / "train_absent.py")
    done = run_python("-m", "lowtide", "estimate", "--device", "8 x h100-80", script, "fsdp")
    assert done.returncode == 0, done.stderr
    assert "rank 0, with 79.2 GiB: it fits" in done.stdout
    assert re.search("^rank 7: ", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_estimates_are_what_four_processes_take(run_python: RunPython) -> None:
    """One process makes each estimate: DDP, FSDP2, HSDP, tensor parallel, and settings of these.

    Copies that gloo makes of what it sends, and NCCL does not, are not estimated.
    """
    done = run_python(str(HERE / "compared.py"), path=HERE.parent)
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout)
    assert len(cases) == 23
    for case, ranks in cases.items():
        for rank, (estimated, measured, with_copies) in ranks.items():
            assert estimated == measured, (case, rank)
            assert with_copies >= measured, (case, rank)


def results_of(done: "subprocess.CompletedProcess[str]") -> list[list[str]]:
    """Return the lines in which the processes of each command print their trained parameters."""
    return [sorted(re.findall("process .*", part)) for part in done.stdout.split("--\n")[1:]]


def check_peaks(stderr: str, ranks: str = "01") -> None:
    """Each process peaks where it was predicted, or a little lower, by what gloo holds while a step is rehearsed."""
    predicted = dict(re.findall("rank (.): .*?([0-9.]+) MiB peak predicted", stderr))
    measured = dict(re.findall("rank (.): measured (.*?) MiB peak", stderr))
    assert measured.keys() == predicted.keys() == {*ranks}, stderr
    assert "within the budget" in stderr
    assert "it was copied" not in stderr
    for rank in measured:
        ratio = float(measured[rank]) / float(predicted[rank])
        assert 0.97 <= ratio <= 1.005, stderr  # how long gloo holds a gathered unit depends on the other processes


@pytest.mark.parametrize("name", ["train.py", pytest.param("train_sharded.py", marks=pytest.mark.slow)])
def test_a_script_in_several_processes_runs_within_a_budget(name: str, run_python: RunPython, tmp_path: Path) -> None:
    script, saved = str(HERE / name), tmp_path / "plan.json"
    planned = ("run", "--budget", "70%", "--save", str(saved), script)
    done = run_python(str(HERE / "forked.py"), "2", "plain", script, ",", *planned)
    assert done.returncode == 0, done.stderr
    plain, under_plan = results_of(done)
    assert len(plain) == 2
    assert plain == under_plan
    check_peaks(re.sub(r"[0-9.]+ -> ", "", done.stderr))
    assert Plan.from_json(saved).budget_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("way", "n", "budget"), [("hsdp", 4, "70%"), ("tensor", 2, "85%"), ("tensor", 4, "92%")])
def test_a_model_sends_nothing_more_under_a_plan(way: str, n: int, budget: str, run_python: RunPython) -> None:
    """The model is copied and sharded, or its matrix products are shared by two processes, and its blocks sharded."""
    script = (str(HERE / "train_sharded.py"), way)
    done = run_python(str(HERE / "forked.py"), str(n), "plain", *script, ",", "run", "--budget", budget, *script)
    assert done.returncode == 0, done.stderr
    plain, under_plan = results_of(done)
    assert len(plain) == n
    assert plain == under_plan
    check_peaks(re.sub(r"[0-9.]+ -> ", "", done.stderr), "0123"[:n])


@pytest.mark.slow
def test_torchrun_starts_lowtide(run_python: RunPython) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", sys.executable)
    done = run_python(*torchrun, "-m", "lowtide", "run", "--budget", "70%", str(HERE / "train.py"))
    assert done.returncode == 0, done.stderr
    check_peaks(re.sub(r"[0-9.]+ -> ", "", done.stderr))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_sharded.py", "train.py"])
def test_one_process_makes_the_plan_of_several(name: str, run_python: RunPython, tmp_path: Path) -> None:
    """Its profile is theirs but for the times, so its plans are theirs, and peak in them where it predicts."""
    script, real, simulated, plan = str(HERE / name), *(str(tmp_path / f"{n}.json") for n in ("real", "one", "plan"))
    done = run_python(
        *(str(HERE / "forked.py"), "2", "rehearse", "--json", real, script, "even", ","),
        *("alone", "rehearse", "--processes", "2", "--json", simulated, script, "even", ","),
        *("alone", "plan", "make", "--budget", "70%", "-o", plan, simulated, ","),
        *("run", "--plan", plan, script, "even"),
    )
    assert done.returncode == 0, done.stderr
    profiles = [json.loads(Path(path).read_text(encoding="utf-8")) for path in (real, simulated)]
    sizes = [
        [*profile.pop("base_bytes"), *(call.pop("begins_at") for call in profile["calls"])] for profile in profiles
    ]
    assert timeless(profiles[0]) == timeless(profiles[1])
    # a thread of gloo may hold blocks of 256 bytes from some point on, and for a while what it has sent
    apart = [abs(one - other) for one, other in zip(*sizes, strict=True)]
    assert sum(size >= 1024 for size in apart) <= len(apart) // 5, apart
    check_peaks(done.stderr)


def timeless(record: Any) -> Any:
    """Return a record without its times and clocks."""
    if isinstance(record, dict):
        return {name: timeless(value) for name, value in record.items() if not name.endswith("_ms")}
    return [timeless(value) for value in record] if isinstance(record, list) else record
