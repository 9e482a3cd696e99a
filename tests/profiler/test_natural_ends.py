"""Tensors that a model's variables hold beyond the calls that took them live that long under any plan."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from budgets import step_of, within
from lowtide.planner.records import Decisions
from lowtide.planner.simulate.simulator import predict


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


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("cls", [InAList, UntilHalfway, OnItself])
@pytest.mark.parametrize("part", [0, 30, 70])
def test_the_prediction_knows(cls, part):
    torch.manual_seed(0)
    model, x = cls(), torch.randn(4096, 64)

    step = step_of(model)
    step(x)
    _, plan, verdict = within(model, step, x, part)
    assert verdict.measured_peak_bytes == plan.predicted.peak_bytes


class Looked(nn.Module):
    """Saves indices of its own, which become the indices of its weight's gradient."""

    def __init__(self):
        super().__init__()
        self.table, self.last = nn.EmbeddingBag(1000, 64, mode="sum", sparse=True), nn.Linear(64, 64)

    def forward(self, x):
        return self.last(F.gelu(self.table(x % 1000)))


@pytest.mark.parametrize("letting_go", ["first", "last"])
def test_memory_shared_with_a_sparse_gradient_lives_as_long_as_the_gradient(letting_go):
    torch.manual_seed(0)
    model, x = Looked(), torch.randint(10_000, (256, 40))
    dense = torch.optim.Adam(model.last.parameters())
    sparse = torch.optim.SparseAdam(model.table.parameters())

    def step(x):
        if letting_go == "first":
            model.zero_grad()
        model(x).square().mean().backward()
        dense.step()
        sparse.step()
        if letting_go == "last":
            model.zero_grad()

    step(x)
    profile = lowtide.rehearse(model, step, x)
    assert predict(profile, Decisions()).peak_bytes == profile.measured_plain_peak_bytes
