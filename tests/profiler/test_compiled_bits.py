"""Compiled code is compared on the current batch, also if it runs backward itself; state stays as it was."""

import pytest
import torch
from torch import Tensor, nn

from lowtide.profiler.compiled_bits import compiled_bits


@pytest.mark.parametrize("runs_backward", [False, True])
def test_gradients_are_those_of_one_backward_pass(runs_backward: bool) -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)

    def call(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().sum()
        if runs_backward:
            loss.backward()
        return loss

    outcome = compiled_bits(model, call, ((x,), {}))
    assert outcome is not None
    assert outcome.digests["gradients"].keys() == {"weight (0)", "bias (0)"}
    assert model.weight.grad is None
