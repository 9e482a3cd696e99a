"""Clipping by a common norm that is not known in time is refused in words, or is an error when it comes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import lowtide
from levers.cases import pulled, untouched
from levers.normed import FEATURES, NAME, Checkpointed, LossOf, Normed, batch_of, found_out, squares, step_of
from levers.test_optimizers import same
from lowtide.levers.lever import LeverNotApplicable


def _reversed(model: nn.Module) -> None:
    clip_grad_norm_(reversed([*model.parameters()]), 1.0)


def _by_layer(model: nn.Module) -> None:
    for layer in model.children():
        clip_grad_norm_(layer.parameters(), 1.0)


class _Once(torch.autograd.Function):
    """Keeps its gradient instead of its input, and multiplies it in place: some fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.gradient = 2 * x.detach()
        return x.square()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Tensor:
        gradient: Tensor = ctx.gradient.mul_(outer[0])
        return gradient.clone()


def _hooked(model: nn.Module, batch: Tensor) -> Tensor:
    output = model(batch)
    output.register_hook(lambda gradient: None)
    return squares(lambda _: output, batch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loss_of", "why"),
    [
        (lambda m, x: squares(m, x) + squares(m, x + 1), "goes through two calls of the model"),
        (lambda m, x: squares(m, m(x)), "goes through two calls of the model"),
        (
            lambda m, x: squares(m, x) + m[0].weight.square().sum(),
            "computed twice are not the same: the loss depends on the model",
        ),
        (lambda m, x: squares(m, x) + 1e-6 * m[0].weight.square().sum(), "computed twice are not the same"),
        (
            lambda m, x: squares(m[:1], x) + m[0].weight.sum(),
            "does not come from the outputs of a single call of the model",
        ),
        (lambda m, x: _hooked(m, x), "hooks on gradients in the step, which would run twice"),
    ],
)
def test_losses_beside_the_model_are_refused(loss_of: LossOf, why: str) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())
    _refused(model, why, loss_of=loss_of)


@pytest.mark.parametrize(
    ("clip", "why"),
    [
        (_reversed, "in an order that is neither the model's nor the optimizer's"),
        (_by_layer, "called for several sets of parameters, and each has another norm"),
        (lambda m: clip_grad_norm_(m.parameters(), float("inf")), "for what clip_grad_norm_ returns, which would be 0"),
        (lambda m: clip_grad_norm_([*m.parameters()] * 2, 1.0), "the same gradient twice"),
        (lambda m: clip_grad_norm_(m[0].parameters(), 1.0), "some gradients are clipped and others are not"),
    ],
)
def test_clippings_that_are_others_are_refused(clip: Any, why: str) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES))
    _refused(model, why, clip=clip)


def test_hooks_and_operators_that_run_once_are_refused() -> None:
    def made(*more: nn.Module) -> nn.Sequential:
        return nn.Sequential(nn.Linear(FEATURES, FEATURES), *more)

    class Custom(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = _Once.apply(x)
            return found

    _refused(made(Custom()), "an operator's backward can't run twice")
    linear = nn.Linear(FEATURES, FEATURES)
    _refused(
        made(Checkpointed(linear, reentrant=True)),
        "the step fails where gradients are computed twice: RuntimeError: When use_reentrant",
    )
    again = "have to be computed for their common norm first, which changes 1.inner.norm.running_mean"
    _refused(made(Checkpointed(Normed())), again)  # torch runs the forward again, each time with its side effects
    on_weight = made()
    on_weight[0].weight.register_hook(lambda gradient: None)
    _refused(on_weight, "there is a hook on the gradient of 0.weight, which would run twice")
    on_module = made(nn.Tanh())
    on_module[1].register_full_backward_hook(lambda *_: None)
    _refused(on_module, "there are hooks on gradients")
    head = nn.Linear(FEATURES, 1)
    body = made()
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    both = [*body.parameters(), *head.parameters()]
    step = step_of(body, optimizer, lambda m, x: head(m(x)).mean(), clip=lambda _: clip_grad_norm_(both, 1.0))
    with pytest.raises(LeverNotApplicable, match="does not come from the outputs of a single call of the model"):
        found_out(body, step, batch_of(), optimizer)


def test_accumulation_is_refused() -> None:
    model = nn.Linear(FEATURES, FEATURES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Tensor) -> None:
        for part in batch.chunk(2):
            squares(model, part).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(LeverNotApplicable, match="accumulated over several backward passes"):
        found_out(model, step, batch_of(), optimizer)  # type: ignore[arg-type]


def _refused(model: nn.Module, why: str, **step_with: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(LeverNotApplicable, match=why):
        found_out(model, step_of(model, optimizer, **step_with), batch_of(), optimizer)
    assert same(before, model.state_dict())
    assert untouched(model)
    assert all(parameter.grad is None for parameter in model.parameters())


# --- what changes later


def test_a_penalty_that_begins_later_is_an_error() -> None:
    model = nn.Linear(FEATURES, FEATURES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = [0.0]

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        loss = squares(model, batch)
        return loss + weight[0] * model.weight.square().sum() if weight[0] else loss

    step = step_of(model, optimizer, loss_of)
    with pulled(model, NAME, optimizer=optimizer, **found_out(model, step, batch_of(), optimizer)):
        step(batch_of())
        weight[0] = 1e-5
        with pytest.warns(UserWarning, match="clipped by a norm that was off by"):
            step(batch_of())
        weight[0] = 1.0
        with pytest.raises(
            lowtide.LowtideError, match="the parameters were updated with gradients that were clipped by another norm"
        ):
            step(batch_of())


def test_a_first_pass_that_fails_updates_nothing() -> None:
    model, fails = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)), [False]

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *outer: Tensor) -> Tensor:
            if fails[0]:
                raise ZeroDivisionError
            return outer[0]

    model.insert(1, type("Layer", (nn.Module,), {"forward": lambda self, x: Failing.apply(x)})())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = step_of(model, optimizer, error_if_nonfinite=True)
    with pulled(model, NAME, optimizer=optimizer, **found_out(model, step, batch_of(), optimizer)):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        fails[0] = True
        with pytest.raises(ZeroDivisionError):
            step(batch_of())
        fails[0] = False
        with pytest.raises(RuntimeError, match="non-finite, so it cannot be clipped"):
            step(batch_of() * float("inf"))
        assert same(before, model.state_dict())
        assert all(parameter.grad is None for parameter in model.parameters())
        step(batch_of())
        assert not same(before, model.state_dict())
        squares(model, batch_of()).backward()
        with pytest.raises(lowtide.LowtideError, match="the update has been made"):
            squares(model, batch_of()).backward()
    squares(model, batch_of()).backward()
    with (
        pulled(model, NAME, optimizer=optimizer, backwards=1, clip_common_norm=1.0),
        pytest.raises(lowtide.LowtideError, match=r"there is a gradient of 0.weight before .* do not accumulate"),
    ):
        step(batch_of())
