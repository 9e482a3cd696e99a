"""Tests of the check whether a transform of torch.func runs in this thread."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.func import functionalize, grad, jacrev, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide._torch.backward import in_transform

peek = torch._C._functorch.peek_interpreter_stack
answers: list[tuple[bool, bool]] = []
"""Pairs of the check's answer and that of torch's stack of transforms."""


def compare() -> None:
    answers.append((in_transform(), peek() is not None))


class Sine(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        compare()
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        compare()
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        compare()
        return gradient * ctx.saved_tensors[0].cos()


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        compare()
        return func(*args, **(kwargs or {}))


def compute_sum(x: Tensor) -> Tensor:
    compare()
    return Sine.apply(x).sum()  # type: ignore[no-untyped-call, no-any-return]


def compute_under_mode(x: Tensor) -> Tensor:
    compare()
    with Dispatch():
        return x.sin().sum()


def compute_with_hook(x: Tensor) -> Tensor:
    y = x * x
    y.register_hook(lambda gradient: compare())  # type: ignore[no-untyped-call]
    return y.sum()


@pytest.mark.parametrize("function", [compute_sum, compute_under_mode, compute_with_hook])
def test_check_agrees_with_torchs_stack_of_transforms(function: Any) -> None:
    answers.clear()
    x = torch.ones(1, 3)
    grad(function)(x)
    grad(lambda x: grad(function)(x).sum())(x)
    vmap(grad(function))(x)
    jacrev(function)(x)
    if function is not compute_with_hook:  # without `grad` outside, its tensors need no gradient
        vmap(function)(x)
    if function is compute_under_mode:  # torch runs no custom functions in these transforms
        functionalize(function)(x)
        jvp(function, (x,), (x,))
    assert any(answer for answer, _ in answers)
    assert all(answer == expected for answer, expected in answers)
    assert not in_transform()


def test_planned_step_never_reads_the_stack_of_transforms() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    batch = torch.randn(512, 64)

    def step(batch: Tensor) -> None:
        model(batch).square().sum().backward()
        model.zero_grad()

    lowtide.fit(model, step, batch, budget="90%")
    with mock.patch.object(torch._C._functorch, "peek_interpreter_stack", side_effect=AssertionError):
        for _ in range(3):
            step(batch)
    lowtide.remove(model)
