"""Scripts that torchrun starts, estimated on GPUs that are not there: as users write them, in this process alone."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide import cli

SCRIPTS = Path(__file__).parent / "absent"


@pytest.fixture
def estimate(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str, str]]]:
    def command(script: str, *args: str) -> tuple[int, str, str]:
        capfd.readouterr()
        options = ("--device", "8 x h100-80", "--rank", "0", "--record", str(tmp_path / "estimate.json"))
        code = cli.main(("estimate", *options, str(SCRIPTS / script), *args))
        return (code, *capfd.readouterr())

    _forget_accelerators()  # of tests of the Trainer
    yield command
    _forget_accelerators()


def _forget_accelerators() -> None:
    """Reset the state of accelerate, which has one for the whole process."""
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    "way", ["fsdp", *(pytest.param(way, marks=pytest.mark.slow) for way in ("both", "hsdp", "tensor"))]
)
def test_a_llama_is_estimated_and_saves_nothing(way: str, estimate, tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints"
    code, out, err = estimate("llama.py", way, str(saved))
    assert code == 0, err
    assert "on each of 8 x H100-80, rank 0, with 79.2 GiB: it fits" in out
    assert "torch.distributed.checkpoint.save is left out" in out
    assert re.search(r"llama\.py:\d+: torch\.save is left out", out)
    assert not saved.exists()
    record = json.loads((tmp_path / "estimate.json").read_text(encoding="utf-8"))[0]
    assert 0 < record["peak_requested_bytes"] <= record["peak_allocated_bytes"] <= record["peak_reserved_bytes"]


@pytest.mark.parametrize("options", [(), ("views",), ("hook",)])
def test_ddp_is_estimated(options: tuple[str, ...], estimate) -> None:
    code, out, _ = estimate("images.py", *options)
    assert code == 0
    assert "communication buffers" in out
    assert "it fits" in out


def test_synchronized_batch_norm_keeps_no_more_than_batch_norm(estimate, tmp_path: Path) -> None:
    records = []
    for options in ((), ("together",)):
        code, out, err = estimate("images.py", *options)
        assert code == 0, err
        records.append(json.loads((tmp_path / "estimate.json").read_text(encoding="utf-8"))[0])
    assert "every process has rows for SyncBatchNorm" in out
    alone, together = (record["peak_requested_bytes"] for record in records)
    assert abs(together - alone) <= 2 * 8 * 16 * 14 * 14 * 4  # beside them a copy of the input and of the gradient


@pytest.mark.parametrize(
    ("library", "way"),
    [
        ("accelerate", "fsdp"),
        pytest.param("trainer", "fsdp", marks=pytest.mark.slow),
        pytest.param("accelerate", "ddp", marks=pytest.mark.slow),
        pytest.param("trainer", "ddp", marks=pytest.mark.slow),
    ],
)
def test_loops_of_libraries_are_estimated_and_save_nothing(library: str, way: str, estimate, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    saved = tmp_path / "checkpoints"
    code, out, err = estimate("libraries.py", library, way, str(saved))
    assert code == 0, err
    assert "it fits" in out
    skipped = {"trainer": "transformers.Trainer._save_checkpoint", "accelerate": "accelerate.Accelerator.save_state"}
    assert f"{skipped[library]} is left out" in out
    assert not any(path.is_file() for path in saved.rglob("*"))
    assert ("gathered parameters" in out) == (way == "fsdp")


def test_meshes_and_collectives_in_the_loop(estimate) -> None:
    code, out, err = estimate("by_hand.py")
    assert code == 0, err
    assert "it fits" in out
    assert "optimizer" in out


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["offload", "scaler"])
def test_recipes_are_estimated(recipe: str, estimate) -> None:
    code, out, err = estimate("recipes.py", recipe)
    assert code == 0, err
    assert "it fits" in out
    assert "communication buffers" in out
    assert ("torch.save is left out" in out) == (recipe == "offload")


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("fsdp1", "FullyShardedDataParallel (FSDP1), which is not estimated"),
        ("pipeline", "sends from one process to another, as pipelines and rings do"),
        ("receives", "torch.distributed.recv sends from one process to another"),
        ("stream", "the script allocates on a CUDA stream of its own"),
        ("compiled", "the compiler moves and merges collectives"),
        ("experts", "can't know.\n  Nor can it know what other processes send (torch.distributed.all_to_all_single)"),
        ("ring", "context parallel passes keys and values from one process to the next"),
    ],
)
def test_steps_that_depend_on_other_processes_are_refused(way: str, why: str, estimate) -> None:
    code, _, err = estimate("refused.py", way)
    assert code == 2
    assert why in err


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("options", [("--device", "2 x h100-80"), ("--processes", "2")])
def test_a_plan_for_two_processes_is_made_in_one(
    options: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script, saved = str(SCRIPTS.parent / "train_sharded.py"), tmp_path / "plan.json"
    code = cli.main(("plan", "make", *options, "--budget", "75%", "-o", str(saved), script))
    assert code == 0, capfd.readouterr().err
    plan = lowtide.Plan.from_json(saved)
    assert plan.fingerprint.model.startswith("FSDPSequential ")
    assert plan.predicted.peak_bytes <= plan.budget_bytes < plan.plain.peak_bytes
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("rank", ["2", "5"])
def test_ranks_that_there_are_not_are_refused(rank: str, capfd: pytest.CaptureFixture[str]) -> None:
    code = cli.main(("plan", "make", "--processes", "2", "--rank", rank, "--budget", "75%", "train.py"))
    assert code == 2
    assert f"--rank {rank}: the ranks of 2 processes are 0 to 1" in capfd.readouterr().err
