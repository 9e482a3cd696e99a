"""Dropout masks are drawn again from the generator's state, or kept: never another mask, never other random numbers."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.planner.records import Profile
from lowtide.remat import masks
from lowtide.remat.actions import DROPOUT_MASK, actions_for
from lowtide.remat.engine import Engine
from lowtide.remat.replay import ReplayMismatch
from models import build
from remat.plans import differences, outcome

WIDTH = 64


class Model(nn.Module):
    """Calls `inner` between two linear layers."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


class Calls(nn.Module):
    """A module that does what `function` does."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.function = function
        vars(self).update(attributes)

    def forward(self, x):
        return self.function(x)


def attention(x):
    q = x.unflatten(-1, (4, 16)).transpose(-2, -3)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.25).transpose(-2, -3).flatten(-2)


def coin_in_front(x):
    return F.dropout(x * torch.rand(()), 0.3)


def two_drawn_first(x):
    one, other = (torch.empty_like(x).bernoulli_(0.5).div_(0.5).detach() for _ in range(2))
    return (x * one).tanh() * other


def coin_between(x):
    x = F.dropout(x, 0.3)
    return F.dropout(x * torch.rand(()), 0.3)


def written_to(x):
    mask = torch.empty_like(x, requires_grad=False).bernoulli_(0.5).div_(0.5)
    mask[..., 3] = 0
    return x * mask


INNER = {
    "nn.Dropout": (lambda: nn.Dropout(0.1), 1),
    "p that is no round number": (lambda: nn.Dropout(0.1234567), 1),
    "p of low precision": (lambda: nn.Dropout(torch.tensor(0.1).item()), 1),
    "a function with p in the code": (lambda: Calls(lambda x: F.dropout(x, 0.3)), 1),
    "two in one call": (lambda: Calls(lambda x: F.dropout(F.dropout(x, 0.3).tanh(), 0.2)), 2),
    "attention": (lambda: Calls(attention), 1),
    "with its p as an attribute": (lambda: Calls(attention, dropout=0.25), 1),
    "p = 0": (lambda: nn.Dropout(0.0), 0),
    "p = 1": (lambda: nn.Dropout(1.0), 0),
    "evaluation": (lambda: Calls(lambda x: F.dropout(x, 0.5, training=False)), 0),
    "another draw before it": (lambda: Calls(coin_in_front), 0),
    "another draw between two": (lambda: Calls(coin_between), 1),
    "both drawn before the first is used": (lambda: Calls(two_drawn_first), 1),
    "written to": (lambda: Calls(written_to), 0),
    "channels": (lambda: nn.Dropout1d(0.5), 0),
}


def x(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * 48 * WIDTH).view(4, 48, WIDTH).to(dtype)


def rehearsed(model: nn.Module, step) -> Profile:
    return lowtide.rehearse(model, lambda batch: step().detach(), {"x": x()})


def every_mask(profile: Profile) -> dict[str, str]:
    """Decisions that draw again all that the audit found to be masks."""
    found = {s.address: DROPOUT_MASK for s in profile.slots if profile.values[s.value].recipe == DROPOUT_MASK}
    assert all(profile.values[slot.value].flops == 0 for slot in profile.slots if slot.address in found)
    return found


class Counted:
    """How many masks are drawn again in backward."""

    def __init__(self, monkeypatch):
        self.number = 0
        real = masks._RECIPE.function

        def counting(**constants):
            self.number += 1
            return real(**constants)

        monkeypatch.setattr(masks, "_RECIPE", replace(masks._RECIPE, function=counting))


@pytest.fixture
def drawn(monkeypatch):
    return Counted(monkeypatch)


PRECISIONS = [("nn.Dropout", way) for way in ("half", "autocast")] + [("with its p as an attribute", "half")]


@pytest.mark.parametrize(("name", "way"), [(name, "single") for name in INNER] + PRECISIONS)
def test_what_is_drawn_again_and_what_is_kept(name, way, drawn):
    make, expected = INNER[name]
    torch.manual_seed(0)
    dtype = torch.bfloat16 if way == "half" else torch.float32
    model = Model(make()).to(dtype).train()

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"):
            loss = model(x(dtype)).float().square().sum()
        loss.backward()
        return loss

    decisions = every_mask(rehearsed(model, step))
    assert len(decisions) == expected
    plain = outcome(model, step)
    engine = Engine(model, actions_for(decisions, []))
    engine.install()
    drawn.number = 0
    assert not differences(plain, outcome(model, step))
    engine.remove()
    assert not engine.drifted
    assert drawn.number == len(decisions)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_every_mask_of_a_model(name, drawn):
    case = build(name)
    profile = lowtide.rehearse(case.model, case.step, case.batch)
    decisions = every_mask(profile)
    assert len(decisions) == 1 + 3 * 3  # after the embedding; attention and two residuals in each of three layers

    def step():
        loss = case.model(**case.batch).loss
        loss.backward()
        return loss

    plain = outcome(case.model, step)
    engine = Engine(case.model, actions_for(decisions, []))
    engine.install()
    drawn.number = 0
    assert not differences(plain, outcome(case.model, step))
    assert drawn.number == len(decisions)
    assert not engine.drifted


def planned(inner: nn.Module, decisions: dict[str, str]) -> tuple[nn.Module, Engine]:
    torch.manual_seed(0)
    model = Model(inner).train()
    engine = Engine(model, actions_for(decisions, []))
    engine.install()
    return model, engine


FIRST = {"inner#0:0": DROPOUT_MASK}


def test_again_in_each_backward_over_a_retained_graph(drawn):
    model, _ = planned(nn.Dropout(0.1), FIRST)
    torch.manual_seed(1)
    loss = model(x()).square().sum()
    torch.rand(3)
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    torch.rand(5)
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(once, model.parameters(), strict=True))
    assert drawn.number == 2


def test_the_generator_is_left_alone():
    model, _ = planned(nn.Dropout(0.1), FIRST)
    torch.manual_seed(1)
    loss = model(x()).square().sum()
    after_forward = torch.get_rng_state()
    loss.backward()
    assert torch.equal(after_forward, torch.get_rng_state())
    torch.manual_seed(1)
    torch.empty(4, 48, WIDTH).bernoulli_(0.9)
    assert torch.equal(after_forward, torch.get_rng_state())


@pytest.mark.parametrize(
    "inner",
    [
        Calls(coin_in_front),
        Calls(written_to),
        Calls(two_drawn_first),
        Calls(lambda x: x * torch.ones(48, WIDTH)),
        Calls(lambda x: F.dropout(x[:, :1], 0.1) + x),
        Calls(torch.tanh),
        Calls(lambda x: F.dropout(x, 0.123456)),
    ],
    ids=["another draw", "written to", "two", "no mask", "small", "nothing random", "unknown p"],
)
def test_a_step_that_is_not_as_the_rehearsed_one_is_kept_and_that_is_said(inner):
    """As if the rehearsed step had saved a mask at both places."""
    decisions = {**FIRST, "inner#0:1": DROPOUT_MASK}
    model, engine = planned(inner, decisions)

    def step():
        loss = model(x()).square().sum()
        loss.backward()
        return loss

    with pytest.warns(UserWarning, match="does not save what the rehearsed one did"):
        fitted = outcome(model, step)
    assert engine.drifted <= decisions.keys()
    engine.remove()
    assert not differences(fitted, outcome(model, step))


def test_p_may_change_from_step_to_step():
    model, engine = planned(nn.Dropout(0.1), FIRST)

    def step():
        loss = model(x()).square().sum()
        loss.backward()
        return loss

    for p in (0.1, 0.5, 0.2, 0.0):
        model.inner.p = p
        fitted = outcome(model, step)
        engine.remove()
        assert not differences(fitted, outcome(model, step))
        engine.install()
    assert not engine.drifted


def test_a_mask_of_a_slightly_wrong_p_is_never_used(monkeypatch):
    """Where `p` in the code is not what the scale seems to tell, the number of elements that are left tells."""
    monkeypatch.setattr(masks, "_COMPARED", 64)
    model, _ = planned(Calls(lambda x: F.dropout(x.bfloat16(), 0.1015).float(), p=0.1), FIRST)
    loss = model(x()).float().square().sum()
    with pytest.raises(ReplayMismatch, match="is not the one that forward drew"):
        loss.backward()


def test_what_single_precision_makes_of_p_is_tried_before_giving_up(monkeypatch, drawn):
    """True single precision differs in one of some 100 million elements: here it is a coarser one."""
    monkeypatch.setattr(masks, "_COMPARED", 64)
    monkeypatch.setattr(masks, "single", lambda p: 0.1015)
    model, engine = planned(Calls(lambda x: F.dropout(x.bfloat16(), 0.1015).float(), p=0.1), FIRST)

    def step():
        loss = model(x()).square().sum()
        loss.backward()
        return loss

    fitted = outcome(model, step)
    assert drawn.number == 1
    engine.remove()
    assert not differences(fitted, outcome(model, step))


def test_other_random_numbers_and_an_exception_between_forward_and_backward():
    model, _ = planned(nn.Dropout(0.1), FIRST)

    def step(fails: bool):
        torch.manual_seed(3)
        model.zero_grad()
        loss = model(x()).square().sum()
        torch.manual_seed(4)
        torch.rand(7)
        if fails:
            hook = model.first.weight.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            hook.remove()
        else:
            loss.backward()
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    first = step(False)
    step(True)
    assert all(torch.equal(a, b) for a, b in zip(first, step(False), strict=True))
