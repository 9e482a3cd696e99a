"""From its second run on a plan sees only the saved tensors that it needs, and notices what it noticed before."""

import copy
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lowtide._torch.nodes import find_saved_slots
from lowtide.planner.address_nodes import NOTED
from lowtide.runtime.engine import Engine
from lowtide.runtime.plan_table import parse_actions
from lowtide.runtime.saved_values import Handle, unpack
from parts import WIDTH
from runtime.plans import Ops, differences, outcome


class Unit(nn.Module):
    """A product, a norm, an activation and a sum with what came in."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.act = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()
        self.on = True

    def forward(self, x):
        return x + self.act(self.norm(self.fc(x))) if self.on else x


class Net(nn.Module):
    def __init__(self, count: int = 3):
        super().__init__()
        self.units = nn.ModuleList(Unit() for _ in range(count))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for unit in self.units:
            x = unit(x)
        return self.head(x)


ACTIVATION = {"units.1.act#0:0": "TanhBackward0"}
SUM = {"units.2.fc#0:0": "AddBackward0"}
X = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


def planned(model: nn.Module, recompute: dict[str, str], replay: list[str] | None = None) -> Engine:
    engine = Engine(model, parse_actions(recompute, replay or []))
    engine.messages.tell = lambda what: None
    engine.install()
    return engine


def packed(loss: torch.Tensor) -> list[object]:
    """Return the results of the pack hook for the saved tensors of a graph."""

    def nodes() -> Iterator[torch.autograd.graph.Node]:
        seen, pending = set(), [loss.grad_fn]
        while pending:
            node = pending.pop()
            if node is not None and node not in seen:
                seen.add(node)
                yield node
                pending += [edge[0] for edge in node.next_functions]

    slots = (slot for node in nodes() for _, slot in find_saved_slots(node))
    return [slot.data for slot in slots if slot.unpack_hook is unpack]


def loss_of(model: nn.Module, x: torch.Tensor = X) -> torch.Tensor:
    return model(x).square().mean()


def test_hooks_are_in_force_only_around_calls_where_something_is_decided():
    model = Net()
    n_all = sum(1 for node in [loss_of(model)] for _ in packed(node))
    assert n_all == 0  # without a plan
    engine = planned(model, ACTIVATION)
    loss = loss_of(model)
    first, again = ({type(data) for data in packed(each)} for each in (loss, loss_of(model)))
    assert first == again == {Handle}  # no backward yet: the second call may be of the same step
    del loss
    assert [type(data) for data in packed(loss_of(model))] == [Handle]  # the result of the one tanh
    engine.remove()


def test_a_value_that_an_edge_leads_to_is_seen_in_every_run():
    """The second unit adds to its input, which its product saves and keeps."""
    model = Net()
    unplanned = copy.deepcopy(model)
    engine = planned(model, SUM)
    for turn in range(3):
        one, other = (outcome(net, lambda net=net: loss_of(net).backward()) for net in (unplanned, model))
        assert differences(one, other) == [], turn
    loss = loss_of(model)
    found = [data.value for data in packed(loss) if isinstance(data, Handle)]
    assert sum(not value.kept for value in found) == 1
    with Ops() as ops:
        loss.backward()
    assert ops.count["tanh"] == 0  # no more is made than the sum
    assert not engine.packer.drifted
    assert not engine.packer.learns_again
    engine.remove()


def test_a_tensor_that_is_seen_beside_a_decided_one_is_checked_for_changes():
    class Beside(nn.Module):
        def forward(self, x):
            self.factor = x * 2
            return self.factor.sin() + (x * 3).tanh()

    model, x = Beside(), torch.ones(8, requires_grad=True)
    engine = planned(model, {"#0:1": "TanhBackward0"})
    for turn in range(3):
        out = model(x)
        if turn:
            assert {type(data) for data in packed(out)} == {Handle, tuple}
        with torch.no_grad():
            model.factor.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    engine.remove()


def test_a_tensor_that_no_hook_sees_is_checked_for_changes():
    model, x = Net(), X.clone().requires_grad_()
    engine = planned(model, ACTIVATION)
    for _ in range(3):
        loss = loss_of(model, x)
        with torch.no_grad():
            model.head.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    engine.remove()


@pytest.mark.parametrize("part", [nn.SiLU(), nn.LayerNorm(8)])
def test_tensors_written_between_two_calls_are_not_read_for_a_recompute(part):
    """The part's input, which no hook of ours has seen."""

    class Writing(nn.Module):
        writes = False

        def __init__(self):
            super().__init__()
            self.part, self.act = part, nn.Sequential(nn.ReLU())

        def forward(self, x):
            y = x * 2
            z = self.part(y)
            if self.writes:
                y.detach().mul_(3)
            return self.act(z)

    model, x = Writing(), torch.linspace(-1, 1, 16, requires_grad=True).view(2, 8)
    engine = planned(model, {"act.0#0:0": "ReluBackward0"})
    for _ in range(2):
        model(x).sum().backward(retain_graph=True)
    assert not engine.packer.drifted
    model.writes = True
    out = model(x)
    assert engine.packer.drifted == {"act.0#0:0"}
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    engine.remove()


def test_a_call_that_was_in_no_run_before_is_seen_whole():
    model = Net()
    unplanned = copy.deepcopy(model)
    engine = planned(model, ACTIVATION)
    for turn in range(4):
        model.units[1].on = unplanned.units[1].on = turn > 1
        one, other = (outcome(net, lambda net=net: loss_of(net).backward()) for net in (unplanned, model))
        assert differences(one, other) == [], turn
        recomputed = [data for data in packed(loss_of(model)) if isinstance(data, Handle) and not data.value.kept]
        loss_of(unplanned)  # writes to the norms' buffers as often
        assert len(recomputed) == (turn > 1)
    engine.remove()


class Crossing(nn.Module):
    """Adds to its input one of two products, each of which a call of its own saves."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.of_left, self.of_right = nn.Sequential(nn.SiLU()), nn.Sequential(nn.SiLU())
        self.last = nn.Linear(WIDTH, WIDTH)
        self.crossed = False

    def forward(self, x):
        left, right = self.left(x), self.right(x)
        beside = self.of_left(left) + self.of_right(right)
        return self.last((right if self.crossed else left) + x) + beside


def test_a_recompute_that_would_go_another_way_is_not_made_but_learnt():
    """It would go through a product, which is no part of the plan."""
    model, x = Crossing(), X.clone().requires_grad_()
    engine = planned(model, {"last#0:0": "AddBackward0"})

    def recomputed() -> int:
        out = model(x)
        n_recomputed = sum(isinstance(data, Handle) and not data.value.kept for data in packed(out))
        with Ops() as ops:
            out.sum().backward()
        assert ops.count["addmm"] == 0
        return n_recomputed

    assert [recomputed(), recomputed()] == [1, 1]
    model.crossed = True
    assert [recomputed(), recomputed(), recomputed()] == [0, 1, 1]
    model.crossed = False
    assert [recomputed(), recomputed()] == [1, 1]
    engine.remove()


def test_captured_operands_have_the_same_numbers_in_every_run():
    """A mask that is added in a call inside, of which nothing else is needed, is not one of the call around it."""

    class Adding(nn.Module):
        def forward(self, x):
            return (x + torch.ones(1, WIDTH)).sin()

    class Around(Adding):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(Adding())

        def forward(self, x):
            return (self.inner(x) + torch.full((1, WIDTH), 2.0)).sin()

    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Around()), X
    plain = outcome(model, lambda: model(x).sum().backward())
    engine = planned(model, {"1#0:0": f"AddBackward0{NOTED} 0"})
    for _ in range(3):
        out = model(x)
        assert sum(isinstance(data, Handle) and not data.value.kept for data in packed(out)) == 1
        assert differences(plain, outcome(model, lambda: model(x).sum().backward())) == []
    assert not engine.packer.drifted
    engine.remove()


def test_another_activation_in_a_later_run_is_said():
    class Either(nn.Module):
        smooth = True

        def forward(self, x):
            y = x * 2
            return (y.tanh() if self.smooth else y.sigmoid()).cos()

    model, x = Either(), torch.linspace(-1, 1, 8, requires_grad=True)
    engine = planned(model, {"#0:0": "TanhBackward0", "#0:1": "TanhBackward0"})
    said: list[str] = []
    engine.messages.tell = said.append
    for _ in range(2):
        model(x).sum().backward()
    assert not said
    model.smooth, x.grad = False, None
    model(x).sum().backward()
    assert len(said) == 1
    assert engine.packer.drifted == {"#0:0"}
    engine.remove()
    planned_gradient, x.grad = x.grad, None
    model(x).sum().backward()
    assert torch.equal(planned_gradient, x.grad)


def test_a_part_that_is_left_out_in_some_steps():
    """The last unit's input is then the sum of another unit."""
    model = Net()
    unplanned = copy.deepcopy(model)
    engine = planned(model, SUM)
    for turn in range(9):
        for net in (model, unplanned):
            for number, unit in enumerate(net.units[:2]):
                unit.on = not turn >> number & 1
        one, other = (outcome(net, lambda net=net: loss_of(net).backward()) for net in (unplanned, model))
        assert differences(one, other) == [], turn
    assert not engine.packer.learns_again
    loss = loss_of(model)
    assert any(isinstance(data, Handle) and not data.value.kept for data in packed(loss))
    engine.remove()


class Within(nn.Module):
    """Runs something of the test's own between two parts."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.first, self.model, self.last = nn.Sequential(nn.Tanh()), model, nn.Sequential(nn.Tanh())
        self.between = lambda x: x

    def forward(self, x):
        return self.last(self.between(self.first(x)))


def test_a_plan_on_a_model_inside_does_nothing_while_no_hooks_of_the_outer_one_are_in_force():
    inner, x = Net(1), X.clone().requires_grad_()
    model = Within(inner)
    model.between = lambda x: inner(x)
    outer = planned(model, {"last.0#0:0": "TanhBackward0"})
    within = planned(inner, {"units.0.act#0:0": "TanhBackward0"})
    for _ in range(3):
        model(x).sum().backward()
        assert within.packer.bypassed is not None
        within.packer.bypassed = None
    outer.remove()
    model(x).sum().backward()
    assert within.packer.bypassed is None
    within.remove()


def gradients_of_rows(function):
    return torch.func.vmap(torch.func.grad(lambda row: function(row).sum()))


@pytest.mark.parametrize("transform", [torch.func.vmap, gradients_of_rows])
def test_transforms_find_no_hooks_between_calls_that_need_them(transform):
    inner, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), X.clone().requires_grad_()
    model = Within(inner)
    model.between = lambda x: x + transform(inner)(x.detach())
    plain = outcome(model, lambda: model(x).sum().backward())
    engine = planned(model, {"last.0#0:0": "TanhBackward0", "model.1#0:0": "TanhBackward0"})
    for _ in range(3):
        assert differences(plain, outcome(model, lambda: model(x).sum().backward())) == []
    engine.remove()


def test_hooks_of_the_model_win_in_every_run():
    inner, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), X.clone().requires_grad_()
    model, seen = Within(inner), []

    def between(x):
        with saved_tensors_hooks(lambda t: seen.append(t) or t.detach(), lambda t: t):
            return checkpoint(inner, inner(x), use_reentrant=False)

    model.between = between
    plain = outcome(model, lambda: model(x).sum().backward())
    n_plain = len(seen)
    engine = planned(model, {"last.0#0:0": "TanhBackward0", "model.1#0:0": "TanhBackward0"})
    for turn in range(5):
        seen.clear()
        is_ours = turn in (1, 2)  # the second time it is known how
        model.between = (lambda x: inner(inner(x))) if is_ours else between
        assert differences(plain, outcome(model, lambda: model(x).sum().backward())) == []
        assert is_ours or len(seen) == n_plain, turn
    engine.remove()


def test_an_exception_leaves_no_hooks():
    model, x = Within(nn.Identity()), X.clone().requires_grad_()
    engine = planned(model, {"first.0#0:0": "TanhBackward0", "last.0#0:0": "TanhBackward0"})
    model(x).sum().backward()

    def fails(x):
        raise KeyError

    model.between = fails
    for _ in range(2):
        with pytest.raises(KeyError):
            model(x)
        assert packed(x.tanh().sum()) == []
    engine.remove()


def test_runs_in_two_threads_see_what_they_need():
    model = Net().eval()
    model.train()
    for unit in model.units:
        unit.norm = nn.LayerNorm(WIDTH)
    engine = planned(model, ACTIVATION | SUM)
    loss_of(model).backward()
    found: list[list[object]] = []
    threads = [threading.Thread(target=lambda: found.append(packed(loss_of(model)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({len(data) for data in found}) == 1
    assert all(isinstance(it, Handle | tuple) for data in found for it in data)
    engine.remove()


def test_a_replayed_call_beside_calls_that_are_only_kept():
    model = Net()
    model.units[1].norm = nn.LayerNorm(WIDTH)
    engine = planned(model, {}, ["units.1#0"])
    plain = None
    for _ in range(3):
        found = outcome(model, lambda: loss_of(model).backward())
        found = {name: it for name, it in found.items() if "buffer" not in name}
        plain = plain or found
        assert differences(plain, found) == []
    found = packed(loss_of(model))
    assert any(isinstance(data, Handle) and not data.value.kept for data in found)
    engine.remove()
    engine.install()
    assert len(packed(loss_of(model))) > 2 * len(found)  # where all are seen
    engine.remove()
