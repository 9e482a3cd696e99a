"""Plans on a GPU: within the budget by the allocator's own count, and the same bits."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_map

import lowtide
from budgets import step_of, within
from conftest import RunPython
from lowtide.planner import find_smallest_peak
from models import build
from test_random_networks import MOVES, SIDE, Network, check_bits_and_peak
from zoo import ZOO

pytestmark = pytest.mark.gpu


def on_gpu(model: nn.Module, batch: Any) -> Any:
    """The batch there, when the model is."""
    model.cuda()
    return tree_map(lambda leaf: leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf, batch)


def between(profile: lowtide.Profile, share: float = 0.4) -> int:
    """Bytes, at `share` of the way from the smallest peak to the plain one. Most of small steps are workspaces."""
    _, least = find_smallest_peak(profile)
    plain = profile.measured_plain_peak_bytes
    assert plain is not None
    return int(least.peak_bytes + share * (plain - least.peak_bytes))


@pytest.mark.parametrize("part", [0, 50])
@pytest.mark.parametrize("name", [name for name in ZOO if name not in ("autocast", "skipping")])
def test_models_of_the_zoo(name: str, part: int) -> None:
    model, batch, step = ZOO[name]()
    batch = on_gpu(model, batch)
    _, plan, verdict = within(model, step, batch, part)
    assert not verdict.drifted
    assert verdict.measured_peak_bytes <= plan.budget_bytes
    assert verdict.identical


@settings(max_examples=24, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    blocks=st.lists(MOVES, min_size=1, max_size=3),
    hasty=st.integers(0, 7),
    residual=st.booleans(),
    part=st.sampled_from([0, 30, 70]),
)
def test_random_networks(blocks: list[list[tuple[str, int, int]]], hasty: int, residual: bool, part: int) -> None:
    torch.manual_seed(0)
    model = Network(blocks, hasty=hasty, residual=residual)
    with torch.device("cuda"):
        check_bits_and_peak(model, on_gpu(model, torch.randn(2, 3, SIDE, SIDE)), part)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_with_a_scaler_and_a_fused_optimizer(dtype: torch.dtype, fused: bool) -> None:
    case = build("gpt2")
    model = case.model
    batch = on_gpu(model, case.batch)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)

    def step(batch: Any) -> torch.Tensor:
        with torch.autocast("cuda", dtype=dtype):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    profile = lowtide.rehearse(model, step, batch)
    with lowtide.fit(model, step, batch, budget=between(profile), profile=profile) as fitted:
        assert fitted.verdict.identical
        assert fitted.verdict.within_budget
        assert not fitted.applied.drifted


def test_offloading_saves_memory_that_nothing_else_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.Tanh()) for _ in range(12))).cuda()
    step, x = step_of(model), torch.randn(2**15, 512, device="cuda")
    profile = lowtide.rehearse(model, step, x)
    assert profile.offload_bytes_per_ms
    _, least = find_smallest_peak(profile)
    _, lower = find_smallest_peak(profile, offload=True)
    assert lower.peak_bytes < least.peak_bytes
    plan = lowtide.plan(profile, (least.peak_bytes + lower.peak_bytes) // 2, offload=True)
    assert plan.offload
    verdict = lowtide.verify(model, step, x, plan)
    assert verdict.identical
    assert verdict.within_budget


def test_a_step_that_has_no_room_at_first() -> None:
    """Rehearsal and plan in less memory than the plain step needs: a real error for want of memory is what it meets."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(16))).cuda()
    copied = copy.deepcopy(model)
    step, x = step_of(model), torch.randn(2**15, 1024, device="cuda")  # each block keeps 256 MiB
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    room = 3 << 30
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            step(x)
        model.zero_grad()
        torch.cuda.empty_cache()
        with lowtide.fit(model, step, x, budget=room) as fitted:
            found = step(x)
            assert torch.cuda.max_memory_allocated() <= torch.cuda.memory_reserved() + room
        assert fitted.plan.recompute or fitted.plan.replay
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    assert torch.equal(found, step_of(copied)(x))


def test_a_convolutional_model_with_cudnns_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    case = build("resnet")
    batch = on_gpu(case.model, case.batch)
    case.model.to(memory_format=torch.channels_last)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        profile = lowtide.rehearse(case.model, case.step, batch)
        with lowtide.fit(case.model, case.step, batch, budget=between(profile), profile=profile) as fitted:
            assert fitted.verdict.within_budget


def test_blocks_that_are_compiled() -> None:
    case = build("gpt2 fused")
    batch = on_gpu(case.model, case.batch)
    for block in case.model.transformer.h:  # type: ignore[union-attr]
        block.compile()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        profile = lowtide.rehearse(case.model, case.step, batch)
        with lowtide.fit(case.model, case.step, batch, budget=between(profile), profile=profile) as fitted:
            assert fitted.plan.recompute or fitted.plan.replay
            assert fitted.verdict.identical
            assert fitted.verdict.within_budget


TRAIN = """
import hashlib, torch
from torch import nn

torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Dropout(0.1), nn.Linear(4096, 1024)) for _ in range(8)]
model = nn.Sequential(*blocks).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(6):
    x = torch.randn(4096, 1024, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = (model(x).float() - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
bits = hashlib.sha256()
for parameter in model.parameters():
    bits.update(parameter.detach().cpu().numpy().tobytes())
print(bits.hexdigest())
"""


def test_a_script_that_nobody_edits(run_python: RunPython, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    plain = run_python(str(script))
    fitted = run_python("-m", "lowtide", "run", "--budget", "75%", str(script))
    assert fitted.returncode == 0, fitted.stderr
    assert fitted.stdout.split() == plain.stdout.split()
    estimated = run_python("-m", "lowtide", "estimate", "--device", "H200-141", str(script))
    assert estimated.returncode == 0, estimated.stderr
