"""From its third run on a recompute's operands are found by position, and whatever differs there is noticed."""

import copy
import sys
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.planner.address_nodes import NOTED
from lowtide.runtime.engine import Engine
from lowtide.runtime.plan_table import parse_actions
from lowtide.runtime.recipes import RECIPES
from lowtide.runtime.recompute import Recompute, certain
from lowtide.runtime.recompute_builder import Builder
from lowtide.runtime.saved_values import Handle, Value
from runtime.plans import differences, outcome

WIDTH = 8
X = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


class Net(nn.Module):
    """Recomputes over slots, edges, leaves, a norm's eps, captured numbers and tensors, and results of others."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.bn = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.act, self.more, self.scale = nn.Tanh(), 0.5, 2.0

    def forward(self, x):
        y = self.act(self.norm(self.fc(x)))
        z = torch.nn.functional.elu(self.bn(y * self.scale), self.more) + self.more
        return z.sin() * (z + torch.ones(1, WIDTH)).cos()


DECIDED = {
    "act#0:0": "TanhBackward0",
    "bn#0:0": "MulBackward0",
    "#0:0": "NativeBatchNormBackward0",
    "#0:1": f"AddBackward0{NOTED}",
    "#0:2": f"AddBackward0{NOTED} 0",
}


def planned(model: nn.Module, decided: dict[str, str]) -> Engine:
    engine = Engine(model, parse_actions(decided, []))
    engine.messages.tell = lambda what: None
    engine.install()
    return engine


def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by each node whose operands are searched for."""
    names, own = [], Builder.recompute

    def recompute(self: Builder, node: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(node.name())
        return own(self, node, *args, **kwargs)

    monkeypatch.setattr(Builder, "recompute", recompute)
    return names


def decisions(engine: Engine) -> list[Any]:
    return [
        it for table in engine.tables for calls in table.values() for a in calls.values() for it in a.recompute.values()
    ]


def check(plain: nn.Module, model: nn.Module, x: torch.Tensor = X) -> None:
    """Compare the step of the plan with that of the same model without one."""
    one, other = (outcome(net, lambda net=net: net(x).square().mean().backward()) for net in (plain, model))
    assert differences(one, other) == []


def test_nothing_is_searched_for_from_the_third_run_on(monkeypatch):
    model = Net()
    plain = copy.deepcopy(model)
    engine, names = planned(model, DECIDED), searches(monkeypatch)
    for turn in range(5):
        names.clear()
        check(plain, model, X[: 4 - turn % 2])
        assert bool(names) == (turn < 2), (turn, names)
    assert not engine.packer.drifted
    assert all(it.path is not None for it in decisions(engine))
    engine.remove()


def test_constants_are_read_in_each_step():
    model = Net()
    plain = copy.deepcopy(model)
    engine = planned(model, DECIDED)
    for turn in range(6):
        for net in (model, plain):
            net.more, net.scale = 0.5 + turn, 2.0 * turn
            net.norm.eps = 10.0**-turn
            net.bn.eps = 10.0**-turn
        check(plain, model)
    assert not engine.packer.drifted
    engine.remove()


def test_a_parameter_that_is_another_tensor_is_the_one_that_is_read():
    model = Net()
    plain = copy.deepcopy(model)
    engine = planned(model, DECIDED)
    for turn in range(4):
        for net in (model, plain):
            net.norm.weight = nn.Parameter(torch.linspace(1, 2 + turn, WIDTH))
            net.bn.bias = nn.Parameter(torch.linspace(1, 2 + turn, WIDTH))
        check(plain, model)
    engine.remove()


class Changing(nn.Module):
    """Saves a product whose first factor is what `kind` says."""

    kind = "kept"

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, WIDTH))

    def forward(self, x):
        factor = {"kept": x.sin, "further": x.neg, "leaf": lambda: self.weight, "constant": lambda: X[:1]}[self.kind]()
        return (factor * x).tanh().cos()


@pytest.mark.parametrize("kind", ["further", "leaf", "constant"])
def test_an_operand_from_elsewhere_is_noticed(kind):
    """The values are those of a step without a plan, whatever the steps before have found where."""
    model = Changing()
    plain, x = copy.deepcopy(model), X.clone().requires_grad_()
    engine = planned(model, {"#0:3": "TanhBackward0", "#0:4": "TanhBackward0"})
    for turn in range(8):
        model.kind = plain.kind = kind if turn in (3, 6) else "kept"
        gradients = []
        for net in (plain, model):
            x.grad = net.weight.grad = None
            net(x).sum().backward()
            gradients.append((x.grad, net.weight.grad))
        for one, other in zip(*gradients, strict=True):
            assert (one is None and other is None) or torch.equal(one, other), turn
    engine.remove()


def test_a_structure_that_changes_on_is_searched_for_in_each_step(monkeypatch):
    """No time is spent on paths that are of no use."""
    model, x = Changing(), X.clone().requires_grad_()
    engine, names = planned(model, {"#0:3": "TanhBackward0"}), searches(monkeypatch)
    for turn in range(24):
        model.kind = ("kept", "leaf")[turn % 2]
        model(x).sum().backward()
    assert names
    assert all(it.n_paths <= 4 for it in decisions(engine))
    engine.remove()


def test_a_plan_that_is_put_in_force_again_keeps_its_paths(monkeypatch):
    model = Net()
    engine, names = planned(model, DECIDED), searches(monkeypatch)
    for _ in range(6):
        for _ in range(3):
            model(X).sum().backward()
        engine.remove()
        engine.install()
    model(X).sum().backward()  # sees all, and searches
    names.clear()
    for _ in range(2):
        model(X).sum().backward()
    assert not names
    engine.remove()


class Pieces(nn.Module):
    """A module that uses one of many outputs of a node, another one in each call."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64).view(4, 16))

    def forward(self, x, number):
        h = x * self.weight
        return (h * h).chunk(16, -1)[number].tanh().sum()


def test_an_output_of_a_higher_number_than_before_is_searched_for():
    model, plain = Pieces(), Pieces()
    x = torch.linspace(-1, 1, 64).view(4, 16)
    engine = planned(model, {f"#0:{slot}": "TanhBackward0" for slot in range(6)})
    for number in (1, 1, 1, 2, 9, 15, 1):
        for net in (model, plain):
            net.zero_grad()
            net(x, number).backward()
        assert torch.equal(model.weight.grad, plain.weight.grad)
    engine.remove()


@pytest.mark.parametrize("is_laid_out", [True, False])
def test_a_chain_of_recomputes_may_be_longer_than_pythons_recursion(is_laid_out: bool) -> None:
    constants = {} if is_laid_out else {"out_stride": None}
    value = Value(maker=Recompute(RECIPES["TanhBackward0"], (Handle(Value(X), None),), None, constants, None))
    for _ in range(2 * sys.getrecursionlimit()):
        both = Handle(value, None), Handle(value, None)  # without a memory of visited ones 2 ** n would be looked at
        value = Value(maker=Recompute(RECIPES["MulBackward0"], both, None, {}, None))
    assert certain(value) == is_laid_out
