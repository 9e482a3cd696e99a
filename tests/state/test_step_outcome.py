"""Results that differ between repetitions of a step are not compared, by name; nor is what follows from them."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from lowtide.state.step_outcome import Outcome, find_varying_results

ALL = {"loss": ("0",), "gradients": ("bias (0)", "weight (0)"), "parameters": ("bias", "weight")}


def of_no_value(x: Tensor) -> Tensor:
    """Return zero, through which gradients flow."""
    return x - x.detach()


@pytest.mark.parametrize(
    ("varies", "expected"),
    [
        ("nothing", {}),
        ("a gradient", {"gradients": ("weight (0)",), "parameters": ("weight",)}),
        ("a clipped gradient", {kind: ALL[kind] for kind in ("gradients", "parameters")}),
        ("loss", ALL),
    ],
)
def test_results_that_vary_are_known_by_name_with_those_computed_from_them(
    varies: str, expected: dict[str, tuple[str, ...]]
) -> None:
    model, numbers, n_runs = nn.Linear(4, 4), itertools.count(1), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(batch: Tensor) -> Tensor:
        nonlocal n_runs
        n_runs += 1
        optimizer.zero_grad()
        loss = model(batch).sum()
        if varies != "nothing":
            loss = loss + of_no_value(model.weight.sum() * next(numbers))
        loss.backward()
        if varies == "a clipped gradient":
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            model.bias.grad.mul_(0.5)  # as where the norm is over the limit
        optimizer.step()
        return loss.detach() + (next(numbers) if varies == "loss" else 0)

    plain = Outcome.of(model, step, torch.ones(2, 4))
    assert find_varying_results(plain, {}, lambda: pytest.fail("repeated in vain")) == {}
    assert find_varying_results(plain, ALL, lambda: Outcome.of(model, step, torch.ones(2, 4))) == expected
    assert n_runs == (2 if varies == "loss" else 6)
