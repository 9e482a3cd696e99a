"""Results that a model never uses are saved, never read, and freed early, while rehearsals hold them for longer."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from budgets import step_of, within


class MadeOfWhatIsGone(nn.Module):
    """The sum is saved by the linear layer alone, whose result is dropped; dropout's result is made of it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        y = x + 0.25
        self.linear(y)
        return F.dropout(y, 0.2)


class ChangedAfterwards(nn.Module):
    """The tensor that the linear layer has saved is overwritten, which is an error in PyTorch only if backward reads
    it.
    """

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x):
        y = self.norm(x)
        self.linear(y)
        return F.relu(y, inplace=True)


@pytest.mark.parametrize("cls", [MadeOfWhatIsGone, ChangedAfterwards])
@pytest.mark.parametrize("part", [0, 50])
def test_a_dead_branch_does_no_harm(cls, part):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), cls(), nn.Linear(64, 64), nn.Tanh()), torch.randn(256, 64)

    step = step_of(model)
    step(x)
    _, plan, verdict = within(model, step, x, part)
    assert verdict.identical
    assert not verdict.drifted
    assert verdict.measured_peak_bytes <= plan.predicted.peak_bytes
