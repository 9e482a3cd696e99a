"""The cost of a recompute is its time where it will run: in backward."""

import time
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import sdpa_flop_count

import lowtide
from budgets import step_of
from lowtide._torch.backward import in_backward
from lowtide.planner.records import Decisions
from lowtide.planner.simulate.simulator import predict
from lowtide.profiler.measure_call import FORMULAS, Flops, count_attention_flops
from lowtide.profiler.online import OnlineProfiler
from lowtide.runtime.recipes import RECIPES

SLOW_MS = 40
WIDE = 128


class Curve(nn.Module):
    """Two saved tensors; the second is recomputed through a tensor that nothing saves."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return (self.linear(x).relu() * 2).tanh()


def curves():
    return nn.Sequential(Curve(), Curve(), Curve())


@pytest.fixture
def slow(monkeypatch):
    """Makes the recipe of a node slow where `here()` holds."""

    def make(node, here):
        recipe = RECIPES[node]

        def function(*operands, **constants):
            if here():
                time.sleep(SLOW_MS / 1000)
            return recipe.function(*operands, **constants)

        monkeypatch.setitem(RECIPES, node, replace(recipe, function=function))

    return make


def costs(observed=False):
    model, x = curves(), torch.randn(64, 64)
    profile = seen(model, x) if observed else lowtide.rehearse(model, lambda x: model(x).sum().backward(), x)
    return {value.node: value.cost_ms for value in profile.values if value.recipe is not None}


def seen(model, x):
    """The profile of steps that are really taken: blocks are let go of when they have been audited."""
    observed = OnlineProfiler(model)
    for _ in range(2):
        observed.begin(x)
        model(x).sum().backward()
        observed.end()
    observed.leave()
    return observed.profile


@pytest.mark.parametrize(
    ("observed", "node", "other"),
    [
        (False, "TanhBackward0", "ReluBackward0"),
        (True, "ReluBackward0", "TanhBackward0"),  # tanh would need a freed block's tensors: it is timed in forward
    ],
)
def test_a_recompute_costs_what_it_takes_in_backward(slow, observed, node, other):
    slow(node, in_backward)
    found = costs(observed)
    assert found[node] >= SLOW_MS
    assert found[other] < SLOW_MS


def test_setup_costs_of_the_first_run_do_not_count(slow):
    slow("TanhBackward0", lambda: not in_backward())
    assert costs()["TanhBackward0"] < SLOW_MS


def test_so_does_what_is_only_passed_through(slow):
    slow("MulBackward0", in_backward)
    found = costs()
    assert found["MulBackward0"] >= SLOW_MS
    assert found["TanhBackward0"] < SLOW_MS


class Heads(nn.Module):
    """Attention written out: its products take copies of the heads, and views of these copies are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.out = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)).softmax(-1)
        return x + self.out((scores @ v).transpose(1, 2).flatten(2))


def test_a_view_of_what_was_made_on_the_way_to_it_takes_no_memory_of_its_own() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(*[Heads() for _ in range(2)]), torch.randn(8, 32, WIDE)
    step = step_of(model)
    profile = lowtide.rehearse(model, step, batch)
    values = profile.values
    views = {
        s.address for s in profile.slots if values[s.value].node == "UnsafeViewBackward0" and values[s.value].recipe
    }
    assert len(views) > 4
    for address in views:
        predicted = predict(profile, Decisions(recompute=frozenset([address])))
        plan = replace(lowtide.plan(profile, "100%"), recompute={address: "UnsafeViewBackward0"}, predicted=predicted)
        assert lowtide.verify(model, step, batch, plan).measured_peak_bytes == predicted.peak_bytes


def attended(heads_of_keys, **how):
    q, k = torch.randn(2, 6, 16, 8), torch.randn(2, heads_of_keys, 24, 8)
    with Flops() as flops:
        functional.scaled_dot_product_attention(q, k, k, **how)
    return flops.total


def test_a_formula_that_refuses_what_it_is_given_ends_no_trial(monkeypatch):
    def refuse(*shapes, **others):
        raise AssertionError("shapes are incompatible")

    monkeypatch.setitem(FORMULAS, torch.ops.aten.mm, refuse)
    x = torch.randn(3, 3)
    with Flops() as flops:
        found = x @ x
    assert torch.equal(found, x @ x)
    assert flops.total == 0


def test_flops_of_attention_are_those_of_all_its_heads():
    product = 2 * (2 * 6) * 16 * 24 * 8
    assert attended(6) == attended(2, enable_gqa=True) == 2 * product


@pytest.mark.parametrize("shapes", [[(2, 6, 16, 8)] * 3, [(2, 6, 16, 8), (2, 6, 24, 8), (2, 6, 24, 12)]], ids=str)
def test_flops_of_attention_are_those_that_torch_counts(shapes):
    assert count_attention_flops(*map(torch.empty, shapes)) == sdpa_flop_count(*shapes)
