"""Compiled code is compared on the current batch, also if it runs backward itself; state stays as it was."""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.profiler.compiled_bits import compiled_bits, record_scheduled_calls


@pytest.mark.parametrize("runs_backward", [False, True])
def test_gradients_are_those_of_one_backward_pass(runs_backward: bool) -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)

    def call(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().sum()
        if runs_backward:
            loss.backward()
        return loss

    outcome = compiled_bits(model, call, ((x,), {}))
    assert outcome is not None
    assert outcome.digests["gradients"].keys() == {"weight (0)", "bias (0)"}
    assert model.weight.grad is None


def doubling(on_backward: Callable[[tuple[Tensor, ...]], object]) -> Callable[[Tensor], Tensor]:
    """Return a function that doubles its argument; `on_backward` is called with the gradients that arrive at it."""

    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            on_backward(gradients)
            return gradients[0] * 2

    apply: Callable[[Tensor], Tensor] = Doubles.apply
    return apply


def test_gradients_of_outputs_are_freed_as_soon_as_backward_has_read_them() -> None:
    arrived = list[weakref.ref[Tensor]]()
    is_freed = list[bool]()

    def arrive(gradients: tuple[Tensor, ...]) -> None:
        is_freed.extend(each() is None for each in arrived)
        arrived.extend(map(weakref.ref, gradients))

    model, x, double = nn.Linear(4, 4), torch.ones(2, 4), doubling(arrive)
    assert compiled_bits(model, lambda x: double(double(model(x))), ((x,), {})) is not None
    assert is_freed == [True]


@pytest.mark.parametrize("n_held", [0, 1])
def test_outputs_that_the_step_does_not_hold_are_released_before_backward(n_held: int) -> None:
    """In `loss = model(**batch).loss`, logits end with their last reader in backward."""
    output = list[weakref.ref[Tensor]]()
    is_alive = list[bool]()
    model, x, double = nn.Linear(4, 4), torch.ones(2, 4), doubling(lambda _: is_alive.append(output[-1]() is not None))

    def call(x: Tensor) -> dict[str, Tensor]:
        logits = model(x)
        output.append(weakref.ref(logits))
        return {"loss": double(logits).sum(), "logits": logits}

    assert record_scheduled_calls(model, call, ((x,), {}), Counter({32: n_held})) is not None
    assert is_alive == 2 * [bool(n_held)]  # it runs once before it is recorded
    outcome = compiled_bits(model, call, ((x,), {}))
    assert outcome is not None
    assert len(outcome.digests["loss"]) == 2  # of loss and logits
    assert not is_alive[-1]
