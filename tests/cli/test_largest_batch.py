"""`lowtide largest-batch`: the largest batch on each GPU, of a script or of a model with random weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import cli
from lowtide.estimator.cuda.absent_gpu_run import estimate_on
from lowtide.estimator.cuda.gpu_estimate import GpuMemoryEstimate
from lowtide.estimator.gpu_ranking import SMALLEST, rank_gpus
from lowtide.estimator.unrehearsed_plans import How, build_engine, repeated_blocks
from lowtide.memory.gpu_specs import CONTEXT_BYTES, GPUS, GpuSpec, parse_gpu

TRAIN = """
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)))
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    x = torch.randn(32, 256, device=device)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def ranked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main(("largest-batch", "--json", "-", *arguments)) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_a_scripts_batches_are_the_largest_that_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN, encoding="utf-8")
    found = ranked(capsys, "--gpu", "cuda:1GiB", str(script))
    (row,) = found["gpus"]
    blocks = (nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6))
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    room = row["gpu_bytes"] - CONTEXT_BYTES[1]
    size = row["largest_batch"]
    peaks = [lowtide.estimate(model, step, torch.randn(n, 256), device="cuda:1GiB") for n in (size, size * 6 // 5)]
    assert peaks[0].interval[1] <= room < peaks[1].interval[1]
    assert row["largest_batch_replayed"] > row["largest_batch_recomputed"] > row["largest_batch"]
    assert found["extra_flops"]["recomputed"] == 0
    assert 0 < found["extra_flops"]["replayed"] < 1 / 3


@pytest.mark.slow
def test_a_model_of_transformers_is_ranked_with_random_weights(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--hf", "gpt2", "--layers", "2", "--seq", "64", "--gpu", "rtx 3060", "--gpu", "Jetson Orin NX 16")
    found = ranked(capsys, *options)
    assert found["of"].startswith("GPT2LMHeadModel, 54 million parameters, 64 tokens a row, float32, AdamW")
    assert [(row["gpu"], row["is_sure"]) for row in found["gpus"]] == [("RTX 3060", True), ("Jetson Orin NX 16", False)]
    assert all(row["largest_batch"] > 100 for row in found["gpus"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--hf", "gpt3"), "Nothing is downloaded. Nearest: gpt"),
        (("--hf", "org/llamma"), "Nearest: llama"),
        (("--hf", "gpt2", "--seq", "4096"), "takes at most 1024 tokens"),
        (("--layers", "2", "train.py"), "go with --hf"),
        ((), "give either a SCRIPT or --hf MODEL"),
        (("--gpu", "rtx 40900", "train.py"), "no GPU that is known"),
    ],
)
def test_models_that_can_not_be_ranked_are_refused(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(("largest-batch", *arguments)) == 2
    assert words in capsys.readouterr().err


def test_a_step_that_fits_nowhere_has_exit_code_1_and_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN, encoding="utf-8")
    assert cli.main(("largest-batch", "--gpu", "cuda:700MiB", str(script))) == 1
    assert f"under {SMALLEST}" in capsys.readouterr().out


def test_a_step_that_saves_memory_does_so_in_its_first_step_too() -> None:
    """Peaks of both steps count, and the first one has no optimizer state yet, so that its saved tensors decide."""
    blocks = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(2**14, 32)

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    gpu = parse_gpu("rtx 3060")
    ways: tuple[How, ...] = ("plain", "recomputed", "replayed")
    plain, recomputed, replayed = (
        estimate_on(gpu, model, step, x, optimizer=optimizer, engine=build_engine(how, model)) for how in ways
    )
    wide, narrow = (x.shape[0] * n * 4 for n in (128, 32))
    saved = plain.peak_requested_bytes - recomputed.peak_requested_bytes
    assert abs(saved - 3 * wide) < 512  # GELU's results, but for the one whose block backward is in
    assert plain.peak_requested_bytes - replayed.peak_requested_bytes >= 6 * wide - narrow
    assert recomputed.flops == plain.flops < replayed.flops < plain.flops * 4 / 3


def test_one_estimate_serves_gpus_that_request_the_same() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    asked: list[tuple[str, int, str]] = []

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    def estimate_at(gpu: GpuSpec, size: int, how: How) -> GpuMemoryEstimate:
        asked.append((gpu.name, size, how))
        return estimate_on(gpu, model, step, torch.randn(size, 64), engine=build_engine(how, model))

    ranking = rank_gpus(estimate_at, [parse_gpu("t4"), parse_gpu("h100-80"), parse_gpu("a100-40")])
    assert [each.gpu.name for each in ranking.limits] == ["T4", "A100-40", "H100-80"]
    assert [each.plain for each in ranking.limits] == sorted(each.plain for each in ranking.limits)
    older = [each for each in asked if each[0] == "T4"]
    assert older == [("T4", SMALLEST, "plain")]


def test_the_blocks_are_the_outermost_ones_of_one_class() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(4, 8), "encoder": nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)}
    )
    assert [*repeated_blocks(model)] == [f"encoder.layers.{n}" for n in range(3)]
    assert not repeated_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))  # nothing inside that a replay frees


@pytest.mark.slow
def test_a_gpu_that_shares_the_hosts_memory_only_probably_has_room() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    shared = next(gpu for gpu in GPUS if gpu.shared)
    own = next(gpu for gpu in GPUS if not gpu.shared)
    x = torch.randn(4, 64)
    assert " probably fits: " in str(lowtide.largest_batch(model, step, x, device=shared, most=64))
    assert " fits: " in str(lowtide.largest_batch(model, step, x, device=own, most=64)).replace("probably", "NO")
    ranking = rank_gpus(lambda gpu, n, how: lowtide.estimate(model, step, torch.randn(n, 64), device=gpu), [shared])
    assert "probably " in str(ranking)
