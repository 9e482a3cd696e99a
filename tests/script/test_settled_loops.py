"""A loop in which nothing is left to observe: the Python calls that a block adds to each of its steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from overhead import count_python_calls, mlp, settled
from torch import nn

import lowtide

IN_FORCE = 13
"""Calls that look if a batch is larger than the plan's, if more is trained, and if the step is of another kind."""
UNPLANNED = 4
"""Calls that look if another model is trained."""


def added(step: Callable[[], object], **settings: Any) -> int:
    n_plain = count_python_calls(step)
    run = settled(step, **settings)
    n_inside = count_python_calls(step)
    run.leave()
    assert count_python_calls(step) == n_plain
    return n_inside - n_plain


def test_a_plan_that_changes_nothing_adds_few_calls() -> None:
    _, step = mlp()
    assert added(step, budget=10**12) <= IN_FORCE


def test_a_loop_without_a_plan_adds_fewer() -> None:
    _, step = mlp()
    assert added(step, budget=1, on_infeasible="plain") <= UNPLANNED


@pytest.mark.parametrize("n_layers", [4, 32])
def test_the_calls_do_not_grow_with_the_model(n_layers: int) -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(n_layers)])
    optimizer, x = torch.optim.SGD(model.parameters()), torch.randn(2, 4)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()

    assert added(step, budget=10**12) <= IN_FORCE


LARGER = 34
"""Calls that also look if a batch is for the plan of larger ones."""


@pytest.mark.parametrize("n_layers", [4, 16])
def test_nor_where_larger_batches_would_get_a_plan(n_layers: int) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(n_layers)])
    optimizer, x = torch.optim.SGD(model.parameters()), torch.randn(256, 32)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()

    run = settled(step, budget=10**12)
    fallback = None if run.plan is None else run.plan.fallback
    run.leave()
    assert fallback is not None
    assert added(step, budget=10**12) <= LARGER


def test_parameters_that_are_trained_later_are_still_noticed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    optimizer = torch.optim.SGD(model.parameters())

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    with lowtide.within(10**12):
        for _ in range(12):
            step(torch.randn(2, 4))
        model[1].requires_grad_(True)
        step(torch.randn(2, 4))
    assert "has 4 parameters that are trained, and the plan is for 2" in capsys.readouterr().err
