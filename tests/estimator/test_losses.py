"""Losses whose one number lies in memory for all elements, as long as the loss lives."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide

LOSSES = ["mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss", "l1_loss", "huber_loss"]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_needs_what_it_is_measured_to_need(name: str, reduction: str) -> None:
    model = nn.Sequential(nn.Linear(500, 500), nn.Sigmoid())
    goal = torch.rand(128, 500)

    def step(batch: torch.Tensor) -> None:
        getattr(functional, name)(model(batch), goal, reduction=reduction).mean().backward()
        model.zero_grad()

    batch = torch.randn(128, 500)
    estimated, measured = lowtide.estimate(model, step, batch).timeline, lowtide.timeline(model, step, batch)
    assert estimated.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.001)
