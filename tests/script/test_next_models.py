"""Models that are trained one after another in one block, as in cross-validation: each gets a plan of its own."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide.script.fit_steps import NEXT_REHEARSED


def train(width: int, n_steps: int) -> list[Tensor]:
    """Train a new model; return its parameters."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.GELU())]
    model, x = nn.Sequential(*layers, nn.Linear(width, 1)), torch.randn(256, width)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(n_steps):
        F.mse_loss(model(x), x[:, :1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def test_a_model_that_follows_another_gets_a_plan_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    plain = train(96, 6)
    with lowtide.within("85%", progress=True) as run:
        train(64, 6)
        first = run.plan
        followed = train(96, 6)
        assert run.plan is not None
        assert first is not None
        assert run.verdict is not None
        assert run.verdict.within_budget
    assert run.plan.budget_bytes == 85 * run.plan.plain.peak_bytes // 100
    assert run.plan.plain.peak_bytes > first.plain.peak_bytes
    assert all(torch.equal(one, other) for one, other in zip(plain, followed, strict=True))
    assert capfd.readouterr().err.count(NEXT_REHEARSED) == 1


def test_training_goes_on_if_no_plan_fits_for_a_model_that_follows(capfd: pytest.CaptureFixture[str]) -> None:
    plain = train(128, 6)
    with lowtide.within("85%", progress=False) as run:
        train(64, 6)
    assert run.plan is not None
    with lowtide.within(run.plan.budget_bytes) as run:
        train(64, 6)
        followed = train(128, 6)
        assert run.verdict is not None
        assert not run.verdict.within_budget
    assert all(torch.equal(one, other) for one, other in zip(plain, followed, strict=True))
    assert "The plan with the smallest peak is in force, above the budget" in capfd.readouterr().err
