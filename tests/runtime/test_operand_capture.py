"""Operands that autograd does not record are captured in each step: never the previous step's, never a guess."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

import lowtide
from lowtide.planner import find_smallest_peak, predict
from lowtide.planner.address_nodes import NOTED
from lowtide.planner.records import Decisions, Profile
from lowtide.runtime.engine import Engine
from lowtide.runtime.plan_table import parse_actions
from models import build
from runtime.plans import differences, outcome

WIDTH = 64


class Calls(nn.Module):
    """A module that does what `function` does with a tensor and the module's number."""

    def __init__(self, function, number=0.7):
        super().__init__()
        self.function, self.number = function, number

    def forward(self, x):
        return self.function(x, self.number)


class Model(nn.Module):
    """Calls `inner` between two linear layers. What it gives is saved by the product that follows inside it."""

    def __init__(self, function, number=0.7):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(WIDTH, WIDTH), Calls(function, number), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


def x() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * 48 * WIDTH).view(4, 48, WIDTH)


class Doubling(TorchFunctionMode):
    """Somebody else's mode: adds twice what is added."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return func(out, args[1]) if func is torch.Tensor.add else out


def under_another_mode(x, number):
    with Doubling():
        return (x.tanh() + number) * x


WITH_NUMBERS = {
    "added": lambda x, number: (number + x.tanh()) * x,
    "subtracted": lambda x, number: (x.tanh() - number) * x,
    "from which it is subtracted": lambda x, number: (number - x.tanh()) * x,
    "with alpha": lambda x, number: torch.add(x.tanh(), number, alpha=3) * x,
    "by name": lambda x, number: torch.add(x.tanh(), other=number) * x,
    "in place": lambda x, number: x.tanh().mul(2).add_(number) * x,
    "on the way": lambda x, number: (x + number).exp(),
    "chosen": lambda x, number: torch.where(x > 0, x.tanh(), number) * x,
    "filled in, under a softmax": lambda x, number: x.exp().masked_fill(x > 0.5, number).softmax(-1) * x,
    "a tensor of one element": lambda x, number: (x.tanh() + torch.tensor(number)) * x,
    "under another mode, once each": under_another_mode,
}
KEPT = {
    "in C++": lambda x, number: torch.ops.aten.add(x.tanh(), number) * x,
    "a tensor as large as the result": lambda x, number: (x.tanh() + torch.full_like(x, number)) * x,
    "a view, changed in place": lambda x, number: x.tanh().mul(2)[:, :24].add_(number) * x[:, :24],
}


def step_of(model: nn.Module):
    def step(batch=None):
        loss = model(x()).square().sum()
        loss.backward()
        return loss

    return step


def found(profile: Profile) -> list[str]:
    """Nodes that can be recomputed only with a captured number, as plans write them."""
    return [value.node for value in profile.values if NOTED in value.node]


def recomputed(profile: Profile) -> dict[str, str]:
    """Decisions to recompute everything."""
    values = profile.values
    return {s.address: values[s.value].node for s in profile.slots if values[s.value].recipe and not s.is_input}


def rehearsed(model: nn.Module) -> Profile:
    return lowtide.rehearse(model, step_of(model), {"x": x()})


def check_other_numbers(model: nn.Module, profile: Profile) -> None:
    """The plan gives the plain bits in steps with other numbers than in the rehearsal."""
    engine = Engine(model, parse_actions(recomputed(profile), []))
    for number in (0.7, 0.1, 1e-9, -3.0):
        model.inner.number = number
        plain = outcome(model, step_of(model))
        engine.install()
        assert not differences(plain, outcome(model, step_of(model)))
        engine.remove()
    assert not engine.packer.drifted


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_a_number_that_changes_from_step_to_step(name):
    torch.manual_seed(0)
    model = Model(WITH_NUMBERS[name]).train()
    profile = rehearsed(model)
    assert len(found(profile)) == 1
    check_other_numbers(model, profile)


@pytest.mark.parametrize("name", KEPT)
def test_values_with_uncaptured_operands_are_kept(name):
    torch.manual_seed(0)
    model = Model(KEPT[name]).train()
    profile = rehearsed(model)
    assert not found(profile)
    engine = Engine(model, parse_actions(recomputed(profile), []))
    plain = outcome(model, step_of(model))
    engine.install()
    assert not differences(plain, outcome(model, step_of(model)))
    engine.remove()


def test_a_tensor_of_one_element_may_change_between_forward_and_backward():
    torch.manual_seed(0)
    model = Model(lambda x, number: (x.tanh() + number) * x, torch.tensor(0.5)).train()

    def step():
        loss = model(x()).square().sum()
        model.inner.number.add_(1)
        loss.backward()
        model.inner.number.sub_(1)
        return loss

    decisions = recomputed(rehearsed(model))
    assert any(NOTED in node for node in decisions.values())
    plain = outcome(model, step)
    engine = Engine(model, parse_actions(decisions, []))
    engine.install()
    assert not differences(plain, outcome(model, step))
    engine.remove()
    assert not engine.packer.drifted


def test_a_number_that_becomes_a_tensor_is_kept_and_that_is_said():
    torch.manual_seed(0)
    model = Model(WITH_NUMBERS["added"]).train()
    decisions = recomputed(rehearsed(model))
    model.inner.number = torch.linspace(0, 1, WIDTH)
    plain = outcome(model, step_of(model))
    engine = Engine(model, parse_actions(decisions, []))
    engine.install()
    with pytest.warns(UserWarning, match="saves different tensors than the rehearsed step"):
        assert not differences(plain, outcome(model, step_of(model)))
    assert len(engine.packer.drifted) == 1
    engine.remove()


class Outside(nn.Module):
    """Adds a number to what another module saves."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.first(x) + 0.5)


def test_a_number_of_another_call_is_refused_and_that_is_said():
    torch.manual_seed(0)
    profile = rehearsed(Outside().train())
    assert not found(profile)
    assert any("in another call" in (value.refused or "") for value in profile.values)


class EndsInANumber(nn.Module):
    """A block whose result is made with a number, and saved by what comes after it."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(self.norm(x).square().exp()) + 0.25


def test_nor_is_the_result_of_a_block_made_with_a_number_that_was_given_inside():
    torch.manual_seed(0)
    model = nn.Sequential(EndsInANumber(), EndsInANumber(), nn.LayerNorm(WIDTH))
    profile = rehearsed(model)
    blocks = [call for call in profile.calls if call.cls == "EndsInANumber"]
    assert all(call.result_value is not None for call in blocks)  # the audit has run them forward again
    for address in ("1.norm#0:1", "2#0:1"):
        value = profile.values[next(s.value for s in profile.slots if s.address == address)]
        assert value.recipe is None
        assert "in another call" in value.refused


class AddsToThat(nn.Module):
    """The saved tensor is computed from such a result, which nothing saves."""

    def __init__(self):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(WIDTH, WIDTH), EndsInANumber(), nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.block(x))


def test_nor_what_is_made_of_that():
    torch.manual_seed(0)
    model = nn.Sequential(AddsToThat(), AddsToThat())
    profile = rehearsed(model)
    plan = lowtide.plan(profile, find_smallest_peak(profile)[1].peak_bytes)
    verdict = lowtide.verify(model, lambda batch: step_of(model)(batch).detach(), {"x": x()}, plan)
    assert verdict.identical
    assert not verdict.drifted


def test_operators_are_watched_only_in_the_calls_that_need_it():
    torch.manual_seed(0)
    seen = []

    def watch(module, args):
        seen.append((module, _get_current_function_mode() is not None))

    model = nn.Sequential(Model(WITH_NUMBERS["added"]), nn.Tanh()).train()
    engine = Engine(model, parse_actions(recomputed(rehearsed(model)), []))
    hooks = [module.register_forward_pre_hook(watch) for module in model.modules()]
    engine.install()
    outcome(model, step_of(model))
    engine.remove()
    for hook in hooks:
        hook.remove()
    assert [module for module, watched in seen if watched] == [model[0].inner]


def test_an_exception_ends_the_watch():
    torch.manual_seed(0)
    model = Model(WITH_NUMBERS["added"]).train()
    engine = Engine(model, parse_actions(recomputed(rehearsed(model)), []))
    engine.install()
    model.inner.number = "no number"
    with pytest.raises(TypeError):
        model(x())
    assert _get_current_function_mode() is None
    model.inner.number = 0.7
    outcome(model, step_of(model))
    engine.remove()
    assert not engine.packer.drifted


def test_gpt2_as_it_ships_goes_without_its_activation():
    """`0.5 * x * (1 + tanh(c * (x + 0.044715 * x**3)))`: all but `x` is recomputed, and no matrix product is redone."""
    case = build("gpt2")
    profile = lowtide.rehearse(case.model, case.step, case.batch)
    inside = [slot for slot in profile.slots if ".mlp.act#" in slot.address and not slot.is_input]
    values = {slot.value: profile.values[slot.value] for slot in inside if profile.values[slot.value].bytes > 64}
    kept = [value for value in values.values() if value.recipe is None]
    assert not kept
    assert sum(value.node == f"AddBackward0{NOTED}" for value in values.values()) == 3
    plan = lowtide.plan(profile, "75%", allow="cheap")
    assert not plan.replay
    assert plan.predicted.extra_flops == 0
    assert lowtide.verify(case.model, case.step, case.batch, plan).identical


MASK = torch.linspace(0, 1, WIDTH)


def heads(x):
    return x.view(4, 48, 4, WIDTH // 4).transpose(1, 2)


def attend(x, **settings):
    """Attention with dropout on a CPU, for which there is no fused kernel."""
    q = heads(x)
    out = nn.functional.scaled_dot_product_attention(q, q * 2, q, dropout_p=0.5, **settings)
    return out.transpose(1, 2).reshape(x.shape)


WITH_TENSORS = {
    "added": lambda x, number: (number * MASK + x.tanh()) * x,
    "subtracted": lambda x, number: (x.tanh() - number * MASK) * x,
    "from which it is subtracted": lambda x, number: (number * MASK - x.tanh()) * x,
    "in place": lambda x, number: x.tanh().mul(2).add_(number * MASK) * x,
    "chosen": lambda x, number: torch.where(x > 0, x.tanh(), number * MASK) * x,
    "added to a product": lambda x, number: (
        torch.baddbmm(number * MASK[:48, None].expand(48, 48), x, x.transpose(1, 2)).softmax(-1) @ x
    ),
    "a mask that attention is given": lambda x, number: attend(x, attn_mask=MASK[:48].expand(48, 48) > abs(number) / 4),
    "numbers that attention is given": lambda x, number: attend(x, attn_mask=number * MASK[:48].expand(4, 1, 48, 48)),
}


@pytest.mark.parametrize("name", WITH_TENSORS)
def test_a_tensor_that_changes_from_step_to_step(name):
    torch.manual_seed(0)
    model = Model(WITH_TENSORS[name]).train()
    profile = rehearsed(model)
    assert any(f"{NOTED} 0" in node for node in found(profile))
    check_other_numbers(model, profile)


def test_a_tensor_made_in_inference_mode_is_not_held():
    """A tensor without a version, so that an overwrite could not be detected."""
    torch.manual_seed(0)
    with torch.inference_mode():
        shift = MASK * 0.5
    model = Model(lambda x, number: (x.tanh() + shift) * x).train()
    profile = rehearsed(model)
    assert not found(profile)
    assert any("does not record" in (value.refused or "") for value in profile.values)


def test_a_wrong_call_of_attention_fails_as_it_does_without_a_plan():
    torch.manual_seed(0)
    model = Model(lambda x, number: nn.functional.scaled_dot_product_attention(x)).train()
    with pytest.raises(TypeError, match="scaled_dot_product_attention"):
        lowtide.rehearse(model, step_of(model), {"x": x()})


def test_causal_attention_goes_without_its_scores():
    torch.manual_seed(0)
    model = Model(lambda x, number: attend(x, is_causal=True)).train()
    profile = rehearsed(model)
    assert f"SafeSoftmaxBackward0{NOTED}" in found(profile)  # no tensor is held for that
    engine = Engine(model, parse_actions(recomputed(profile), []))
    plain = outcome(model, step_of(model))
    engine.install()
    assert not differences(plain, outcome(model, step_of(model)))
    engine.remove()
    assert not engine.packer.drifted


def largest(x, number):
    """The mask is gone when it has been added; softmax saves its result."""
    return ((x @ x.transpose(1, 2)) + number * MASK[:48].expand(48, 48).contiguous()).softmax(-1) @ x


def test_held_operands_are_counted_to_the_byte():
    torch.manual_seed(0)
    model = Model(largest).train()

    def step(batch):
        return step_of(model)().detach()

    profile = lowtide.rehearse(model, step, {"x": x()})
    softmax = f"SoftmaxBackward0{NOTED} 0"
    addresses = [slot.address for slot in profile.slots if profile.values[slot.value].node == softmax]
    assert [s.bytes for s in profile.storages if s.label == "operand"] == [48 * 48 * 4]
    plain, predicted = (predict(profile, Decisions(recompute=frozenset(recomputed))) for recomputed in ([], addresses))
    assert plain.held_bytes - predicted.held_bytes == 4 * 48 * 48 * 4 - 48 * 48 * 4
    plan = replace(
        lowtide.plan(profile, "100%"),
        predicted=predicted,
        recompute=dict.fromkeys(addresses, softmax),
    )
    verdict = lowtide.verify(model, step, {"x": x()}, plan)
    assert verdict.identical
    assert verdict.measured_peak_bytes == predicted.peak_bytes


class Shifted(nn.Module):
    """Adds a buffer, which it changes afterwards."""

    def __init__(self, change):
        super().__init__()
        self.first, self.last, self.change = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), change
        self.register_buffer("mean", torch.linspace(-1, 1, WIDTH))

    def forward(self, x):
        x = self.first(x).tanh() - self.mean
        self.change(self.mean)
        return self.last(x * x)


CHANGES = {
    "not": (lambda mean: None, None),
    "in place": (lambda mean: mean.mul_(0.9), "overwritten"),
    "unseen by autograd": (lambda mean: mean.data.mul_(0.9), "overwritten"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_operand_that_is_overwritten_is_not_looked_at_again(change):
    torch.manual_seed(0)
    does, why = CHANGES[change]
    model = Shifted(does).train()
    profile = rehearsed(model)
    product = next(value for value in profile.values if value.node.startswith("SubBackward0"))
    assert (product.recipe is None) == (why is not None)
    assert why is None or why in product.refused
    engine = Engine(model, parse_actions(recomputed(profile), []))
    before = copy.deepcopy(model.state_dict())
    plain = outcome(model, step_of(model))
    model.load_state_dict(before)
    engine.install()
    assert not differences(plain, outcome(model, step_of(model)))
    engine.remove()


def test_a_buffer_is_held_for_nothing():
    torch.manual_seed(0)
    profile = rehearsed(Shifted(lambda mean: None).train())
    product = next(value for value in profile.values if value.node.startswith("SubBackward0"))
    assert product.node == f"SubBackward0{NOTED} 0"
    assert all(profile.values[need].node for need in product.operands)


def test_an_operand_that_is_overwritten_between_forward_and_backward():
    torch.manual_seed(0)
    model = Shifted(lambda mean: None).train()

    def step(batch=None):
        loss = model(x()).square().sum()
        with torch.no_grad():
            model.mean.mul_(0.9)
        loss.backward()

    profile = lowtide.rehearse(model, step, {"x": x()})
    product = next(value for value in profile.values if value.node.startswith("SubBackward0"))
    assert "overwritten" in product.refused
