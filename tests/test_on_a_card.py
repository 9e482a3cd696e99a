"""Plans on a CUDA card: within the budget by the allocator's own count, and the same bits."""

import copy
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_map

import lowtide
from budgets import step_of, within
from models import build
from test_random_networks import MOVES, SIDE, Network
from zoo import ZOO

pytestmark = pytest.mark.gpu


def on_card(model: nn.Module, batch: Any) -> Any:
    """The batch there, when the model is."""
    model.cuda()
    return tree_map(lambda leaf: leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf, batch)


def peak_of(step: Any, batch: Any) -> int:
    """The most bytes that were asked for at once in a second step."""
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        step(batch)
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"])


@pytest.mark.parametrize("part", [0, 50])
@pytest.mark.parametrize("name", [name for name in ZOO if name not in ("autocast", "skipping")])
def test_models_of_the_zoo(name: str, part: int) -> None:
    model, batch, step = ZOO[name]()
    batch = on_card(model, batch)
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
        x, step = on_card(model, torch.randn(2, 3, SIDE, SIDE)), step_of(model)
        try:
            step(x)
        except RuntimeError:  # what is saved is changed in place
            return
        _, plan, verdict = within(model, step, x, part)
    assert verdict.identical
    assert not verdict.drifted
    assert verdict.measured_peak_bytes <= plan.predicted.peak_bytes


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_with_a_scaler_and_a_fused_optimizer(dtype: torch.dtype, fused: bool) -> None:
    case = build("gpt2")
    model = case.model
    batch = on_card(model, case.batch)
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

    with lowtide.fit(model, step, batch, budget="70%") as fitted:
        assert fitted.verdict.identical
        assert peak_of(step, batch) <= fitted.plan.budget_bytes
        assert not fitted.applied.drifted


def test_offloading_saves_memory_that_nothing_else_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.Tanh()) for _ in range(12))).cuda()
    step, x = step_of(model), torch.randn(4096, 512, device="cuda")
    profile = lowtide.rehearse(model, step, x)
    assert profile.offload_bytes_per_ms
    for part in ("60%", "40%"):
        plan = lowtide.plan(profile, part, offload=True)
        verdict = lowtide.verify(model, step, x, plan)
        assert verdict.identical
        assert verdict.measured_peak_bytes <= plan.budget_bytes


def test_a_step_that_has_no_room_at_first() -> None:
    """Rehearsal and plan in less memory than the plain step needs: a real error for want of memory is what it meets."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(16))).cuda()
    twin = copy.deepcopy(model)
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
        assert fitted.plan.remake or fitted.plan.replay
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    assert torch.equal(found, step_of(twin)(x))


def test_a_convolutional_model_with_cudnns_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    case = build("resnet")
    batch = on_card(case.model, case.batch)
    case.model.to(memory_format=torch.channels_last)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with lowtide.fit(case.model, case.step, batch, budget="70%") as fitted:
            assert peak_of(case.step, batch) <= fitted.plan.budget_bytes


def test_blocks_that_are_compiled() -> None:
    case = build("gpt2 fused")
    batch = on_card(case.model, case.batch)
    for block in case.model.transformer.h:  # type: ignore[union-attr]
        block.compile()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with lowtide.fit(case.model, case.step, batch, budget="80%") as fitted:
            assert fitted.plan.replay
            assert fitted.verdict.identical
            assert peak_of(case.step, batch) <= fitted.plan.budget_bytes
