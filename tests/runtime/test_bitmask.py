"""Masks are kept as bits, or as they are: never another mask, never other random numbers."""

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import lowtide
from comparing import equal
from lowtide.planner.address_nodes import MASK
from lowtide.planner.records import Profile
from lowtide.profiler.measure_call import identical
from lowtide.runtime import bitmask as masks
from lowtide.runtime.engine import Engine
from lowtide.runtime.partial_saves import PACKINGS, packed
from lowtide.runtime.plan_table import parse_actions
from lowtide.runtime.recipes import CannotRecompute
from lowtide.runtime.recipes.masking import single
from models import build
from runtime.plans import differences, outcome

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

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def attention(x):
    q = x.unflatten(-1, (4, 16)).transpose(-2, -3)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.25).transpose(-2, -3).flatten(-2)


def two_drawn_first(x):
    one, other = (torch.empty_like(x).bernoulli_(0.5).div_(0.5).detach() for _ in range(2))
    return (x * one).tanh() * other


def written_to(x):
    mask = torch.empty_like(x, requires_grad=False).bernoulli_(0.5).div_(0.5)
    mask[..., 3] = 7
    return x * mask


def in_channels_last(x):
    return F.dropout(x[:, :, None].to(memory_format=torch.channels_last), 0.5).flatten(1, 2)


INNER = {
    "nn.Dropout": (lambda: nn.Dropout(0.1), 1),
    "p that is no round number": (lambda: nn.Dropout(0.1234567), 1),
    "two in one call": (lambda: Calls(lambda x: F.dropout(F.dropout(x, 0.3).tanh(), 0.2)), 2),
    "attention": (lambda: Calls(attention), 1),
    "both drawn before the first is used": (lambda: Calls(two_drawn_first), 2),
    "in channels last": (lambda: Calls(in_channels_last), 1),
    "the fused form, with booleans": (lambda: Calls(lambda x: torch.native_dropout(x, 0.3, True)[0]), 1),
    "a condition": (lambda: Calls(lambda x: torch.where(x > 0, x, x.tanh())), 1),
    "masked_fill": (lambda: Calls(lambda x: x.masked_fill(x < 0.1, 0.0)), 1),
    "negative": (lambda: Calls(lambda x: x * -(x.detach() > 0).float()), 0),
    "a third value": (lambda: Calls(written_to), 0),
    "p = 0": (lambda: nn.Dropout(0.0), 0),
    "p = 1": (lambda: nn.Dropout(1.0), 0),
    "evaluation": (lambda: Calls(lambda x: F.dropout(x, 0.5, training=False)), 0),
    "too small": (lambda: nn.Dropout1d(0.5), 0),
}


def x(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * 48 * WIDTH).view(4, 48, WIDTH).to(dtype)


def rehearsed(model: nn.Module, step) -> Profile:
    return lowtide.rehearse(model, lambda batch: step().detach(), {"x": x()})


def every_mask(profile: Profile) -> dict[str, str]:
    """Decisions that keep the bits of all that the audit found to be masks."""
    found = {s.address: MASK for s in profile.slots if profile.values[s.value].recipe == MASK}
    assert all(profile.values[slot.value].flops == 0 for slot in profile.slots if slot.address in found)
    return found


class Counted:
    """Number of masks that are restored from their bits."""

    def __init__(self, monkeypatch):
        self.number = 0
        real = masks.FROM_BITS.function

        def counting(**constants):
            self.number += 1
            return real(**constants)

        monkeypatch.setitem(PACKINGS, MASK, (replace(masks.FROM_BITS, function=counting), masks.pack_mask))


@pytest.fixture
def made(monkeypatch):
    return Counted(monkeypatch)


PRECISIONS = [(name, way) for name in ("nn.Dropout", "attention") for way in ("half", "double", "autocast")]


@pytest.mark.parametrize(("name", "way"), [(name, "single") for name in INNER] + PRECISIONS)
def test_masks_are_kept_as_bits(name, way, made):
    make, expected = INNER[name]
    torch.manual_seed(0)
    dtype = {"half": torch.bfloat16, "double": torch.float64}.get(way, torch.float32)
    model = Model(make()).to(dtype).train()

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"):
            loss = model(x(dtype)).float().square().sum()
        loss.backward()
        return loss

    decisions = every_mask(rehearsed(model, step))
    assert len(decisions) == expected
    plain = outcome(model, step)
    engine = Engine(model, parse_actions(decisions, []))
    engine.install()
    made.number = 0
    assert not differences(plain, outcome(model, step))
    engine.remove()
    assert not engine.packer.drifted
    assert made.number == len(decisions)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_every_mask_of_a_model(name, made):
    case = build(name)
    profile = lowtide.rehearse(case.model, case.step, case.batch)
    decisions = every_mask(profile)
    assert len(decisions) == 1 + 3 * 3  # after the embedding; attention and two residuals in each of three layers

    def step():
        loss = case.model(**case.batch).loss
        loss.backward()
        return loss

    plain = outcome(case.model, step)
    engine = Engine(case.model, parse_actions(decisions, []))
    engine.install()
    made.number = 0
    assert not differences(plain, outcome(case.model, step))
    assert made.number == len(decisions)
    assert not engine.packer.drifted


def planned(inner: nn.Module, decisions: dict[str, str]) -> tuple[nn.Module, Engine]:
    torch.manual_seed(0)
    model = Model(inner).train()
    engine = Engine(model, parse_actions(decisions, []))
    engine.install()
    return model, engine


FIRST = {"inner#0:0": MASK}


def test_again_in_each_backward_over_a_retained_graph(made):
    model, _ = planned(nn.Dropout(0.1), FIRST)
    loss = model(x()).square().sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss.backward()
    assert equal(once, [p.grad for p in model.parameters()])
    assert made.number == 2


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
    [Calls(written_to), Calls(torch.tanh), Calls(lambda x: x * x)],
    ids=["a third value", "a result", "an argument"],
)
def test_a_step_that_is_not_as_the_rehearsed_one_is_kept_and_that_is_said(inner):
    """As if the rehearsed step had saved a mask at both places."""
    decisions = {**FIRST, "inner#0:1": MASK}
    model, engine = planned(inner, decisions)

    def step():
        loss = model(x()).square().sum()
        loss.backward()
        return loss

    with pytest.warns(UserWarning, match="saves different tensors than the rehearsed step"):
        fitted = outcome(model, step)
    assert engine.packer.drifted <= decisions.keys()
    engine.remove()
    assert not differences(fitted, outcome(model, step))


def test_in_a_batch_that_is_too_small_a_mask_is_kept_and_nothing_is_said(recwarn):
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))
    profile = lowtide.rehearse(model, lambda x: model(x).sum().backward(), torch.ones(64, 64))
    engine = Engine(model, parse_actions(every_mask(profile), []))
    engine.install()
    model(torch.ones(7, 64)).sum().backward()
    engine.remove()
    assert not engine.packer.drifted
    assert not [warning for warning in recwarn if "rehearsed" in str(warning.message)]


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
    assert not engine.packer.drifted


def test_later_writes_to_the_mask_change_nothing():
    """Without a plan torch would refuse the backward pass."""
    kept = []

    def dropped(x):
        kept.append(torch.empty_like(x, requires_grad=False).bernoulli_(0.5))
        return x * kept[-1]

    model, _ = planned(Calls(dropped), FIRST)
    gradients = []
    for change in (False, True):
        torch.manual_seed(1)
        model.zero_grad()
        loss = model(x()).square().sum()
        if change:
            kept[-1].zero_()
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert equal(*gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32])
def test_signs_of_what_is_no_number_and_of_both_zeros(dtype: torch.dtype) -> None:
    """A ReLU gives `x` where that is no number, so backward has to let the gradient through there."""
    odd = [0.0, 1.0, -1.0]
    if dtype.is_floating_point:
        odd += [nan, -nan, -0.0, tiny(dtype), -tiny(dtype), inf, -inf]
    values = torch.tensor(odd, dtype=dtype).repeat(2000)
    expected = torch.tensor([0.0 if each <= 0 else 1.0 for each in values.tolist()], dtype=dtype)
    assert torch.equal(masks.mask_of(**masks.pack_signs(values)), expected)
    if dtype.is_floating_point:
        relu = values.clone().requires_grad_()
        relu.relu().sum().backward()
        assert torch.equal(relu.grad, expected)


def tiny(dtype: torch.dtype) -> float:
    """The least number above 0."""
    return torch.nextafter(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)).item()


DTYPES = [torch.bool, torch.float32, torch.float64, torch.bfloat16, torch.float16]


@given(
    stays=st.lists(st.booleans(), min_size=1, max_size=40),
    dtype=st.sampled_from(DTYPES),
    number=st.sampled_from([1.0, 1 / 0.9, 3e-5, float("inf"), float("nan"), -2.0]),
    length=st.integers(4096, 4200),
)
def test_any_mask_comes_back_bit_for_bit(stays, dtype, number, length):
    one, zero = torch.tensor(number).to(dtype), torch.zeros((), dtype=dtype)
    mask = torch.where(torch.tensor(stays).repeat(length)[:length], one, zero)
    if not mask.any():
        return
    value = packed(MASK, mask)
    assert value.maker.constants["bits"].nbytes == -(-length // 8)
    assert identical(value.maker.make(value), mask)


@pytest.mark.parametrize("length", [masks.AT_ONCE - 8, masks.AT_ONCE, masks.AT_ONCE + 3, 3 * masks.AT_ONCE + 8])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_more_than_one_part(length, dtype):
    torch.manual_seed(0)
    mask = (torch.rand(length) < 0.5).to(dtype)
    value = packed(MASK, mask)
    assert identical(value.maker.make(value), mask)
    if dtype is torch.float32:
        mask[-1] = 0.5
        with pytest.raises(CannotRecompute, match="more than two values"):
            packed(MASK, mask)


def test_a_mask_that_begins_with_a_part_of_zeros():
    mask = torch.zeros(3 * masks.AT_ONCE)
    mask[2 * masks.AT_ONCE :: 3] = 1.25
    value = packed(MASK, mask)
    assert identical(value.maker.make(value), mask)
    mask[-1] = 2.5
    with pytest.raises(CannotRecompute, match="more than two values"):
        packed(MASK, mask)


@pytest.mark.parametrize("other", [-0.0, 5e-45, 1.0000001])
def test_values_near_zero_or_near_the_number_are_a_third_value(other):
    mask = torch.ones(5000)
    mask[::2] = 0.0
    mask[1234] = other
    with pytest.raises(CannotRecompute, match="more than two values"):
        packed(MASK, mask)


def test_tensors_that_are_no_masks_are_kept():
    ones = torch.ones(100, 100)
    eights = ones.to(torch.float8_e4m3fn)
    for tensor in (
        ones[1:],
        ones.t(),
        ones.expand(2, 100, 100),
        ones.long(),
        eights,
        torch.zeros(5000),
        ones[:8].clone(),
    ):
        with pytest.raises(CannotRecompute):
            packed(MASK, tensor)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_an_inspected_tensor_can_be_resized_as_before(dtype):
    mask, activation = torch.ones(5000, dtype=dtype), torch.randn(5000)
    packed(MASK, mask)
    masks.pack_signs(activation)
    for tensor in (mask, activation):
        tensor.resize_(10_000)


@pytest.mark.gpu
def test_booleans_on_a_device():
    mask = torch.rand(1000, 77, device="cuda") < 0.3
    value = packed(MASK, mask)
    assert identical(value.maker.make(value), mask)


def test_packing_signs_allocates_the_bits_and_nothing_else() -> None:
    x = torch.randn(2**21)
    with lowtide.measure() as measured:
        bits = masks.pack_signs(x)["bits"]
    assert measured.peak_bytes == bits.nbytes == 2**18


def test_a_table_of_bytes_and_a_rounded_scale_as_other_devices_use_them() -> None:
    expected = [[bool(byte >> bit & 1) for bit in range(8)] for byte in range(256)]
    assert masks._make_boolean_table(torch.device("cpu")).tolist() == expected
    assert single(0.1) == torch.tensor(0.1, dtype=torch.float32).item() != 0.1
