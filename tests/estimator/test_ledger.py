"""Allocations and frees of operators, to the byte, compared with the CPU's own allocator."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide

aten = torch.ops.aten


class Model(nn.Module):
    """One parameter that a forward function is given."""

    def __init__(self, forward: Callable[[nn.Parameter, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64, 64))
        self.function = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.weight, x)


def fan_out(weight, x):
    h = x @ weight
    return h.sin() + h.cos() + h.tanh() + h.exp()  # backward sums four gradients of h in one of them


def in_place(weight, x):
    h = x @ weight
    h[:, :8].mul_(2)
    h += 1
    return h.relu_()


def batch_normed(weight, x):
    normed = F.batch_norm((x @ weight).t(), None, None, training=True).t()
    return normed.contiguous().sin() + normed.contiguous().cos() + normed.contiguous().exp()


class Doubled(torch.autograd.Function):
    """Sums in its backward itself: that allocates."""

    @staticmethod
    def forward(ctx: Any, x):
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad):
        once = grad * 1
        once = once + grad
        return once + 0


ENDS = torch.tensor([8, 8, 30, 64], dtype=torch.int32)

STEPS = {
    "fan-out": fan_out,
    "in place": in_place,
    "views": lambda weight, x: (x @ weight).t()[3:9].reshape(-1).unsqueeze(0).expand(5, -1),
    "index": lambda weight, x: weight[torch.tensor([1, 1, 5])] + weight[2:5],
    "slices": lambda weight, x: torch.cat([(x @ weight)[:, :4], (x @ weight)[:, 4:]], 1),
    "scatter": lambda weight, x: (x @ weight).gather(1, torch.zeros(64, 3, dtype=torch.long)),
    "own sums": lambda weight, x: Doubled.apply(x @ weight),
    "checkpoint": lambda weight, x: torch.utils.checkpoint.checkpoint(fan_out, weight, x, use_reentrant=False),
    "dropout": lambda weight, x: F.dropout(x @ weight, 0.5),
    "mixed dtypes": lambda weight, x: (x @ weight) * torch.ones(64, 64, dtype=torch.bfloat16),
    "transposed": lambda weight, x: F.linear(F.linear(x, weight), weight).cos(),
    "batch normed": batch_normed,
    "grouped": lambda weight, x: torch._grouped_mm(x, weight.view(4, 16, 64).mT, offs=ENDS).cos(),
    "normed": lambda weight, x: F.layer_norm((x @ weight).t(), (64,)).log_softmax(-1),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_step_has_the_measured_peak(name: str, accumulate: bool) -> None:
    model = Model(STEPS[name]).train()

    def step(x):
        for _ in range(2):
            model(x).sum().backward()
        if not accumulate:
            model.zero_grad()

    x = torch.rand(64, 64)
    estimated, measured = lowtide.estimate(model, step, x).timeline, lowtide.timeline(model, step, x)
    assert abs(estimated.peak_bytes - measured.peak_bytes) <= 128  # single numbers
    assert abs(estimated.curve[-1] - measured.curve[-1]) <= 128


def test_blocks_are_freed_once_and_only_what_lives_is_alive() -> None:
    model = Model(fan_out).train()

    def step(x):
        model(x).sum().backward()
        model.zero_grad()

    timeline = lowtide.estimate(model, step, torch.rand(64, 64)).timeline
    assert timeline.curve[-1] == 0
    assert min(timeline.curve) >= 0
    freed = [event.block for event in timeline.stream if type(event).__name__ == "Free"]
    assert len(freed) == len(set(freed)) == len(timeline.blocks)


LINES = [np.ones(64, "f") for _ in range(128)]
ARRAYS: dict[str, Callable[[], torch.Tensor]] = {
    "from_numpy": lambda: torch.from_numpy(np.stack(LINES)),
    "written to": lambda: torch.from_numpy(np.stack(LINES)).mul_(2),
    "as_tensor": lambda: torch.as_tensor(np.stack(LINES)),
    "as_tensor, cast": lambda: torch.as_tensor(np.stack(LINES), dtype=torch.float64).float(),
    "tensor": lambda: torch.tensor(np.stack(LINES)),
    "FloatTensor": lambda: torch.FloatTensor(np.stack(LINES)),
    "stack": lambda: torch.stack([torch.from_numpy(line) for line in LINES]),
    "double": lambda: torch.from_numpy(np.stack(LINES).astype("d")).float(),
    "frombuffer": lambda: torch.frombuffer(bytearray(np.stack(LINES)), dtype=torch.float32).view(-1, 64),
    "list": lambda: torch.tensor([line.tolist() for line in LINES]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_memory_of_arrays_is_not_torchs(name: str) -> None:
    model = nn.Linear(64, 4)

    def step(batch: torch.Tensor) -> None:
        model(ARRAYS[name]()).square().sum().backward()
        model.zero_grad()

    estimated, measured = lowtide.estimate(model, step, None).timeline, lowtide.timeline(model, step, None)
    assert estimated.peak_bytes == measured.peak_bytes
