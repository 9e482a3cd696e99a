"""The scripts of examples/: plainly, by hand and under `lowtide run --budget`, with the same printed numbers."""

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lowtide import cli

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {
    "accumulation": ("80%", "--layers=1", "--rows=4"),
    "bert_layers": ("90%", "--layers=1", "--rows=4"),
    "compiled_blocks": ("80%", "--rows=4", "--backend=aot_eager"),
    "del_loss": ("70%", "--rows=512"),
    "gpt_mask": ("75%", "--layers=2", "--rows=4"),
    "known_errors": ("70%", "--rows=256"),
    "mixed_precision": ("85%", "--rows=8"),
    "resnet_blocks": ("70%", "--rows=2"),
    "sqrt_depth": ("70%", "--layers=8", "--rows=1024"),
    "training_loop": ("75%", "--layers=2", "--rows=8", "--epochs=1"),
}
"""A budget for each script, and a size at which a step takes milliseconds."""

Run = Callable[..., str]


@pytest.fixture
def plainly(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The text that a script prints in this process."""

    def run(name: str, *args: str) -> str:
        path = str(EXAMPLES / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [path, *args])
        capsys.readouterr()
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SMALL, "peak_memory"}


@pytest.mark.parametrize("name", SMALL)
def test_an_example_prints_the_same_numbers_within_its_budget(
    name: str, plainly: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    budget, *size = SMALL[name]
    assert cli.main(["run", "--budget", budget, str(EXAMPLES / f"{name}.py"), *size, "--steps=5"]) == 0
    within = capsys.readouterr()
    assert within.out == plainly(name, *size, "--steps=5")
    assert re.search(r"lowtide: measured .* peak, \d+ % of the plain step's: within the budget", within.err)


@pytest.mark.slow  # tests/profiler/test_checkpointed_blocks.py has the same on small models
@pytest.mark.parametrize(("name", "by_hand"), [("gpt_mask", "--checkpoint=late"), ("resnet_blocks", "--checkpoint")])
def test_mistakes_by_hand_stay_as_they_are(
    name: str, by_hand: str, plainly: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    args = (*SMALL[name][1:], by_hand, "--steps=5")
    assert cli.main(["run", "--budget", "100%", str(EXAMPLES / f"{name}.py"), *args]) == 0
    assert capsys.readouterr().out == plainly(name, *args)


def test_no_example_knows_lowtide() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert "import lowtide" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("name", ["bert_layers", "training_loop"])
def test_checkpoints_by_hand_change_no_number(name: str, plainly: Run) -> None:
    size = ("--layers=1", "--rows=2", "--steps=2")
    assert plainly(name, *size, "--checkpoint") == plainly(name, *size)


def test_a_function_of_the_loop_runs_another_block_and_gives_wrong_gradients(plainly: Run) -> None:
    size = ("--layers=2", "--rows=2", "--steps=2")
    plain, late, bound = (plainly("gpt_mask", *size, f"--checkpoint={how}") for how in ("no", "late", "bound"))
    assert bound == plain
    (first, *_), (wrong, *_) = plain.splitlines(), late.splitlines()
    loss, gradient = first.split(" gradient ")
    assert wrong.startswith(loss)  # the first loss is right, and nothing fails
    assert gradient not in wrong


def test_batch_norm_counts_twice_by_hand(plainly: Run) -> None:
    size = ("--rows=2", "--steps=3")
    assert "batches counted by BatchNorm 3\n" in plainly("resnet_blocks", *size)
    assert "batches counted by BatchNorm 6\n" in plainly("resnet_blocks", *size, "--checkpoint")


def test_a_mask_of_none_passes_and_a_reentrant_checkpoint_refuses_grad(plainly: Run) -> None:
    size = ("--rows=4", "--steps=2")
    assert plainly("known_errors", *size, "--checkpoint=non-reentrant") == plainly("known_errors", *size)
    with pytest.raises(RuntimeError, match=r"incompatible with \.grad\(\)"):
        plainly("known_errors", *size, "--checkpoint=reentrant")


@pytest.mark.parametrize("gpu", ["T4", *(pytest.param(gpu, marks=pytest.mark.slow) for gpu in ("RTX 4090", "H100-80"))])
def test_peaks_without_an_optimizer_are_printed_for_a_gpu_that_is_not_here(
    gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ("--layers=4", "--width=64")
    assert cli.main(["estimate", "--device", gpu, str(EXAMPLES / "peak_memory.py"), *size]) == 0
    out, err = capsys.readouterr()
    plain, checkpointed = (int(mib) for mib in re.findall(r"^[a-z ]+: (\d+) MiB$", err, re.MULTILINE))
    assert checkpointed < plain
    assert f"{plain} MiB  allocated\n" in out
    assert "of 2 forward and backward passes (no optimizer stepped), reached before the last pass" in out
