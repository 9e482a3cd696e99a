"""Tensors that are written to after they were made, or before backward comes to what is made of them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from budgets import step_of, within
from comparing import equal
from lowtide.planner.records import Profile
from lowtide.runtime.recompute_builder import creates_new

WIDTH = 32


def recipes_of(profile: Profile, label: str) -> set[str | None]:
    """Of the saved tensors that are called so."""
    return {profile.values[slot.value].recipe for slot in profile.slots if label in slot.label}


class Guarded(nn.Module):
    """Blocks whose hidden layer is clamped behind autograd's back: where it is small, nothing happens."""

    def __init__(self, make: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make = make
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.wide = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(3))
        self.narrow = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, wide, narrow in zip(self.norms, self.wide, self.narrow, strict=True):
            hidden = self.make(wide, norm(x))
            with torch.no_grad():
                hidden.clamp_(-3, 3)
            x = x + narrow(F.gelu(hidden))
        return x.square().mean()


@pytest.mark.parametrize(
    "make",
    [
        lambda wide, x: wide(x),
        lambda wide, x: wide(x.flatten(0, 1)).view(64, 4, -1),
        lambda wide, x: wide(x) @ torch.eye(4 * WIDTH),
        lambda wide, x: F.layer_norm(wide(x), (4 * WIDTH,)),
    ],
    ids=["linear", "a view", "product", "layer norm"],
)
def test_tensors_written_without_autograd_are_not_recomputed(make: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model, x = Guarded(make), torch.randn(64, 4, WIDTH)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        loss.backward()
        return loss.detach()

    with lowtide.fit(model, step, x, budget="75%"):
        with torch.no_grad():
            for wide in model.wide:
                wide.weight.mul_(10)  # now the guard acts
        model.zero_grad()
        step(x)
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    step(x)
    assert equal({name: p.grad for name, p in model.named_parameters()}, found)


def test_nodes_that_write_to_what_is_there() -> None:
    fresh = ("AddmmBackward0", "NativeLayerNormBackward0", "SoftmaxBackward0", "ConvolutionBackward0", "BmmBackward0")
    assert all(map(creates_new, fresh))
    assert not any(map(creates_new, ("AddBackward0", "MulBackward1", "ReluBackward0", "SiluBackward0", "DivBackward2")))


def test_a_table_that_is_normalized_again_before_backward() -> None:
    """An embedding's backward does not read its weight, so PyTorch does not mind."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(100, 64, max_norm=1.0)
            self.one, self.other, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1)

        def forward(self, ids: Tensor) -> Tensor:
            one, other = self.one(self.table(ids[0])), self.other(self.table(ids[1]))
            return self.last(one.tanh() * other.tanh()).square().mean()

    model = Pairs()
    profile, _, verdict = within(model, step_of(model), torch.randint(0, 100, (2, 8, 64)), 30)
    assert verdict.identical
    assert {value.refused for value in profile.values if value.node == "EmbeddingBackward0"} >= {
        "it is computed from a tensor that is overwritten before backward"
    }
