"""Plans without the GPU: a step rehearsed on fake tensors, beside one that is really rehearsed, and under the plan."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide.estimator.fake_rehearsal import FakeRehearsal, rehearsed
from lowtide.planner.address_nodes import SIGNS
from processes.test_processes import timeless

WIDTH = 32
Step = Callable[[Tensor], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.special.erf(self.inner(self.norm(x))).sinh()


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def build(way: str, n: int) -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[Block() for _ in range(2)])
    sizes, names = ((2, n // 2), ("copied", "sharded")) if way == "hsdp" else ((n,), None)
    settings = {"mp_policy": HALF} if way == "half" else {}
    if way == "ddp":
        model = DistributedDataParallel(model)
    elif n > 1:
        mesh = distributed.init_device_mesh("cpu", sizes, mesh_dim_names=names)
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh, **settings)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Tensor) -> None:
        model(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


@pytest.mark.parametrize(
    ("way", "n"),
    [
        ("fsdp", 2),
        *(pytest.param(*way, marks=pytest.mark.slow) for way in (("ddp", 2), ("hsdp", 4), ("half", 8), ("", 1))),
    ],
)
def test_a_step_peaks_where_a_plan_made_without_the_gpu_predicts(way: str, n: int) -> None:
    device = f"{n} x h100-80" if n > 1 else "h100-80"
    with lowtide.absent_processes(n):
        model, step = build(way, n)
        batch = torch.randn(512, WIDTH)
        profile = lowtide.rehearse(model, step, batch, device=device)
        plan = lowtide.Plan.from_json(lowtide.plan(profile, "75%").to_json())
        plain, planned = (lowtide.estimate(model, step, batch, device=device, plan=each) for each in (None, plan))
    assert plan.recompute
    assert plan.plain.peak_bytes == plain.peak_bytes
    assert plan.predicted.peak_bytes == planned.peak_bytes <= plan.budget_bytes
    assert plan.fingerprint.device == "cuda"


@pytest.mark.parametrize("way", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_rehearsal_on_fake_tensors_finds_what_a_real_one_finds(way: str) -> None:
    with lowtide.absent_processes(2):
        batch = torch.randn(512, WIDTH)
        model, step = build(way, 2)
        run = FakeRehearsal(model, batch, (step,))
        profiles = rehearsed(run, step, batch), lowtide.rehearse(model, step, batch, in_place=False)
    fake, real = (timeless(json.loads(profile.to_json())) for profile in profiles)
    for record in (fake, real):
        del record["measured_plain_peak_bytes"], record["notes"]
        del record["static"]["others"], record["base_bytes"][-1]  # the norm's few bytes, which the closure holds
    assert fake == real


def test_a_relu_is_kept_as_its_signs_in_a_rehearsal_on_fake_tensors() -> None:
    model, batch = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), torch.randn(512, WIDTH)

    def step(batch: Tensor) -> None:
        model(batch).sum().backward()

    fake = rehearsed(FakeRehearsal(model, batch, (step,)), step, batch)
    real = lowtide.rehearse(model, step, batch, in_place=False)
    held = [
        [profile.values[i].bytes for v in profile.values if v.recipe == SIGNS for i in v.operands]
        for profile in (fake, real)
    ]
    assert held == [[512 * WIDTH // 8]] * 2
