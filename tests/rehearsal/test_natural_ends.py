"""What a model's own variables hold longer than the calls it was given to is there for that long under any plan."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from budgets import step_of, within


class InAList(nn.Module):
    """All results are there until the last one is returned."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        found = [x]
        for layer in self.layers:
            found.append(F.gelu(layer(found[-1])))
        return found[-1]


class UntilHalfway(InAList):
    """One result is there until it is let go of, in the midst of functions that are no modules."""

    def forward(self, x):
        first = x = F.gelu(self.layers[0](x))
        for layer in self.layers[1:3]:
            x = F.gelu(layer(x))
        x = x.tanh()
        del first
        for layer in self.layers[3:]:
            x = F.gelu(layer(x))
        return x


class OnItself(InAList):
    """The results of a step are there until the next one."""

    def forward(self, x):
        self.found = [x]
        for layer in self.layers:
            self.found.append(F.gelu(layer(self.found[-1])).detach())
            x = F.gelu(layer(x))
        return x


@pytest.mark.parametrize("cls", [InAList, UntilHalfway, OnItself])
@pytest.mark.parametrize("part", [0, 30, 70])
def test_the_prediction_knows(cls, part):
    torch.manual_seed(0)
    model, x = cls(), torch.randn(4096, 64)

    step = step_of(model)
    step(x)
    _, plan, verdict = within(model, step, x, part)
    assert verdict.measured_peak_bytes == plan.predicted.peak_bytes
