"""A model that is called several times in a step: what is saved at one address may have been made by several nodes."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from budgets import within
from lowtide.profiler.address_checks import OTHER_NODE, map_addresses_to_nodes, refuse_other_nodes
from lowtide.profiler.drafts import SlotDraft, ValueDraft

WIDTH, ROWS = 512, 256


class _Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(F.silu(x)))


@pytest.mark.parametrize("part", [20, 60])
def test_a_model_that_is_called_on_its_own_result_keeps_to_what_was_predicted(part: int):
    torch.manual_seed(0)
    model = _Cell().train()

    def step(x: Tensor) -> None:
        # The first call's input needs no gradient: what it saves has other places than in the calls after it.
        model(model(model(x) * 2) * 3).square().mean().backward()
        model.zero_grad()

    _, plan, verdict = within(model, step, torch.randn(ROWS, WIDTH), part)
    assert plan.recompute
    assert all(plan.recompute.values())
    assert verdict.measured_peak_bytes == plan.predicted.peak_bytes
    assert verdict.within_budget
    assert verdict.identical


def test_tensors_that_a_second_call_is_known_to_keep_are_not_reported():
    """Weights that were made by a step of descent: at the address of what the first call recomputes, it can't."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.LeakyReLU(), nn.Linear(256, 256), nn.LeakyReLU(), nn.Linear(256, 8))

    def step(x: Tensor) -> None:
        weights = dict(model.named_parameters())
        loss = functional_call(model, weights, (x,)).square().mean()
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        better = {name: w - 0.01 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        (functional_call(model, better, (x,)) - 1).square().mean().backward()
        model.zero_grad()

    profile, plan, verdict = within(model, step, torch.randn(1024, 64), 0)
    refused = {s.address for s in profile.slots if profile.values[s.value].recipe is None}
    assert plan.ambiguous_addresses
    assert set(plan.ambiguous_addresses) == refused & plan.recompute.keys()
    assert verdict.identical
    assert not verdict.drifted
    assert verdict.measured_peak_bytes <= plan.predicted.peak_bytes <= 1.001 * verdict.measured_peak_bytes


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


@pytest.mark.filterwarnings("error")
def test_tensors_of_other_nodes_in_a_second_call_are_not_reported():
    torch.manual_seed(0)
    model, before = nn.Sequential(*[_Block() for _ in range(3)]), nn.Linear(64, 64)

    def step(x: Tensor) -> None:
        (model(before(x)).square().mean() + model(before(x) * 2 + 1).mean()).backward()
        model.zero_grad()

    _, plan, verdict = within(model, step, torch.randn(16, 32, 64), 0)
    assert any("@" in address for address in plan.ambiguous_addresses)
    assert verdict.identical
    assert not verdict.drifted
    assert verdict.measured_peak_bytes <= plan.predicted.peak_bytes <= 1.001 * verdict.measured_peak_bytes


def test_of_several_nodes_at_an_address_the_larger_is_decided_about():
    def slot(address: str, value: int) -> SlotDraft:
        return SlotDraft(address=address, label="", value=value, call=0)

    leaf = ValueDraft(bytes=100, node="")
    small = ValueDraft(bytes=10, node="GeluBackward0", recipe="GeluBackward0")
    large = ValueDraft(bytes=20, node="SiluBackward0", recipe="SiluBackward0")
    values = [leaf, small, large]
    slots = [slot("a#0:0", 0), slot("a#0:0", 1), slot("a#0:0", 2), slot("b#0:0", 0)]
    refuse_other_nodes(values, slots)
    assert [value.refused for value in values] == [None, OTHER_NODE, None]
    assert map_addresses_to_nodes(values, slots) == {"a#0:0": "SiluBackward0"}
    assert map_addresses_to_nodes(values, reversed(slots)) == {"a#0:0": "SiluBackward0"}
