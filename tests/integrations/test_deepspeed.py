"""An engine of DeepSpeed: refused in a ZeRO stage, trained to the same bits where ZeRO is off."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="deepspeed is not installed")

LOOP = """
import sys, torch, deepspeed, lowtide
from contextlib import nullcontext
from torch import nn
stage, budget, around = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.manual_seed(0)
block = lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.GELU(), nn.Linear(64, 64))
model = nn.Sequential(*[block() for _ in range(3)])
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
zero = {"stage": stage}
config = {"train_batch_size": 512, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=True)
x = torch.randn(512, 64)
def step(x):
    loss = engine(x).square().mean()
    engine.backward(loss)
    engine.step()
    return loss
if around == "fit":
    lowtide.fit(model, step, x, budget=budget)
given = {"model": model} if around == "given" else {}
with nullcontext() if budget == "none" else lowtide.within(budget, **given) as run:
    for _ in range(5):
        print("loss", step(x).item())
if run is not None:
    print("kept", run.verdict.within_budget)
"""


def done(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", **alone}
    file = folder / "train.py"
    file.write_text(LOOP)
    command = [sys.executable, str(file), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("around", ["loop", "given", "fit"])
@pytest.mark.parametrize("stage", ["1", "3"])
def test_it_is_refused_in_a_stage_of_zero(stage: str, around: str, tmp_path: Path) -> None:
    refused = done(tmp_path, stage, "90%", around)
    assert refused.returncode != 0
    assert "this DeepSpeedEngine trains by DeepSpeed" in refused.stderr
    assert "fully_shard (FSDP2)" in refused.stderr


@pytest.mark.slow
def test_it_trains_to_the_same_losses_where_zero_is_off(tmp_path: Path) -> None:
    plain, under = done(tmp_path, "0", "none", "loop"), done(tmp_path, "0", "85%", "loop")
    assert plain.returncode == under.returncode == 0, under.stderr

    def lines(of: subprocess.CompletedProcess[str], begin: str) -> list[str]:
        return [line for line in of.stdout.splitlines() if line.startswith(begin)]

    assert len(lines(plain, "loss")) == 5
    assert lines(under, "loss") == lines(plain, "loss")
    assert lines(under, "kept") == ["kept True"]
