"""Autograd adds up gradients in place: no memory for the sum, whichever ledger watches."""

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.memory.events import Allocate


class Residual(nn.Module):
    """Its input has two gradients, of which the second one is added to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


@pytest.mark.parametrize("options", [{}, {"device": "RTX 3060"}], ids=["here", "gpu"])
def test_the_second_gradient_is_added_to_the_first(options: dict[str, str]) -> None:
    model = nn.Sequential(nn.Linear(64, 64), Residual(), Residual())

    def step(batch: Tensor) -> None:
        model(batch).sum().backward()
        model.zero_grad()

    estimated = lowtide.estimate(model, step, torch.randn(512, 64), **options)
    sums = [e for e in estimated.timeline.stream if isinstance(e, Allocate) and e.op == "aten::add"]
    assert len(sums) == 2 + 1  # those of forward, and one in backward: the gradient of a sum has no memory to add to
