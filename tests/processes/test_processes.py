"""Training in several processes, real ones: what a plan does there, and what is refused."""

import re
import sys
from pathlib import Path

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
        pytest.param(
            ("sharded.fits_half_precision", "sharded.refuses", "estimated.estimates_half_precision"),
            id="plan and estimate",
        ),
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
                "sharded.fits_units_in_units",
                "sharded.fits_steps_of_micro_batches",
                "sharded.is_as_it_was",
                "sharded.is_told_what_is_not_whole",
            ),
            marks=pytest.mark.slow,
            id="FSDP2",
        ),
        pytest.param(
            (
                "estimated.estimates_what_is_sharded",
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


@pytest.mark.parametrize("name", ["train.py", pytest.param("train_sharded.py", marks=pytest.mark.slow)])
def test_a_script_in_several_processes_runs_within_a_budget(name: str, run_python: RunPython, tmp_path: Path) -> None:
    script, saved = str(HERE / name), tmp_path / "plan.json"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    plain = run_python(*torchrun, script)
    if "terminate called" in plain.stderr:  # torch's own end of a process group, now and then, without Lowtide
        plain = run_python(*torchrun, script)
    assert plain.returncode == 0, plain.stderr
    lowtide = ("--no-python", sys.executable, "-m", "lowtide", "run", "--budget", "70%", "--save", str(saved))
    planned = run_python(*torchrun, *lowtide, script)
    assert planned.returncode == 0, planned.stderr
    lines = [sorted(re.findall("process .*", done.stdout)) for done in (plain, planned)]
    assert len(lines[0]) == 2
    assert lines[0] == lines[1]
    predicted = dict(re.findall("rank (.): .* -> (.*) MiB peak predicted", planned.stderr))
    measured = dict(re.findall("rank (.): measured (.*?) MiB peak", planned.stderr))
    assert measured.keys() == predicted.keys() == {"0", "1"}, planned.stderr
    assert "within the budget" in planned.stderr
    for rank in measured:  # what threads of gloo hold for a moment may be there at the peak, or not
        assert float(measured[rank]) == pytest.approx(float(predicted[rank]), rel=0.05)
    assert Plan.from_json(saved).budget_bytes
