"""Calls that change what is no module's are not run again, not even on trial."""

import itertools
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide.state.side_effects import CHANGES, ITERATES, WRITES

COUNT = 0
NUMBERS = itertools.count(1)
SUMS = torch.zeros(64)


class Mean:
    """A running mean, as of observations in reinforcement learning."""

    def __init__(self) -> None:
        self.mean, self.n = torch.zeros(64), 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.n += len(x)
        self.mean = self.mean + (x.detach().mean(0) - self.mean) / self.n
        return x - self.mean


@dataclass(slots=True)
class Settings:
    n_calls: int = 0


class Block(nn.Module):
    n_made = 0

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)
        self.change = getattr(self, kind)
        self.means, self.settings, self.array = Mean(), Settings(), np.zeros(64)
        self.register_buffer("is_ready", torch.tensor(False))
        self.sums, self.log, self.coin = torch.zeros(64), {"inside": [object()]}, random.Random(3).random

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.change(x))))

    def an_object(self, x):
        return self.means(x)

    def slots(self, x):
        self.settings.n_calls += 1
        return x / self.settings.n_calls

    def a_global(self, x):
        global COUNT
        COUNT += 1
        return x / COUNT

    def a_class(self, x):
        Block.n_made += 1
        return x / Block.n_made

    def an_array(self, x):
        self.array *= 0.9
        self.array += x.detach().mean(0).numpy()
        return x - torch.from_numpy(self.array).float()

    def a_tensor(self, x):
        with torch.no_grad():
            self.sums.mul_(0.9).add_(x.mean(0))
        return x - self.sums.clone()

    def a_tensor_uncounted(self, x):
        SUMS.data.mul_(0.9).add_(x.detach().mean(0))
        return x - SUMS.clone()

    def a_list(self, x):
        self.log["inside"].append(object())
        return x / len(self.log["inside"])

    def an_iterator(self, x):
        return x / next(NUMBERS)

    def writes(self, x):
        if not self.is_ready:  # as activation norms are initialised by their first batch
            with torch.no_grad():
                self.wide.bias.copy_(-x.mean())
            self.is_ready.fill_(True)
        return x

    def writes_uncounted(self, x):
        self.wide.weight.data = torch.renorm(self.wide.weight.data, 2, 0, 0.5)
        return x

    def nothing(self, x):
        return x * 1.5


KINDS = [name for name in vars(Block) if name.startswith(("a", "slots", "writes")) and callable(getattr(Block, name))]


def why_refused(kind: str) -> set[str | None]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(kind), Block(kind))

    def step(batch):
        model(batch).square().mean().backward()

    profile = lowtide.rehearse(model, step, torch.randn(32, 64))
    return {call.refused for call in profile.calls if call.cls == "Block"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_changes_what_is_not_its_own_is_not_run_again(kind: str) -> None:
    assert len(KINDS) == 11
    expected = ITERATES if kind == "an_iterator" else WRITES if kind.startswith("writes") else CHANGES
    assert why_refused(kind) == {expected}


def test_a_block_that_changes_nothing_is() -> None:
    assert why_refused("nothing") == {None}
