"""A step on a card that is not there: what CUDA's operators keep, what the allocator makes of it, whether it fits."""

import pytest
import torch
from torch import nn

import lowtide
from models import build

MIB = 2**20


def test_a_linear_layer_byte_by_byte() -> None:
    """From first principles: two workspaces of cuBLAS, parameters, gradients, moments, the batch, one activation."""
    model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 512))
    optimizer = torch.optim.Adam(model.parameters())

    def step(batch):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    foreseen = lowtide.foresee(model, step, torch.randn(256, 1024), device="RTX 3060")
    parameters = 4 * (1024 * 2048 + 2048 + 2048 * 512 + 512)
    assert foreseen.static.parameters == parameters
    assert foreseen.static.optimizer == 2 * parameters  # the counters of steps are on the CPU
    assert foreseen.fits
    assert foreseen.peak_requested_bytes <= foreseen.peak_allocated_bytes <= foreseen.peak_reserved_bytes


def test_foreach_makes_the_optimizers_temporaries() -> None:
    """AdamW takes all parameters at once on CUDA: one more copy of them, where the CPU's takes them one by one."""
    case = build("gpt2")
    parameters = sum(p.numel() * p.element_size() for p in case.model.parameters())
    here = lowtide.foresee(case.model, case.step, case.batch)
    there = lowtide.foresee(case.model, case.step, case.batch, device="A100-40")
    optimizer = [next(p.peak_bytes for p in f.timeline.phases if p.name == "optimizer") for f in (here, there)]
    assert optimizer[1] >= optimizer[0] + parameters // 2


@pytest.mark.parametrize("device", ["nothing", "A100"])
def test_a_card_that_is_unclear_is_refused(device: str) -> None:
    case = build("gpt2")
    with pytest.raises(lowtide.LowtideError, match="no card that is known"):
        lowtide.foresee(case.model, case.step, case.batch, device=device)
