"""Budgets that are said of the GPU at hand, and refused where there is none."""

from fractions import Fraction

import pytest
import torch
from torch import nn

import lowtide
from lowtide.memory.device_budget import MARGIN, automatic_budget, on_device
from lowtide.utils.amounts import check_budget, share_of_gpu

GIB = 2**30


def test_auto_is_what_is_free_and_what_the_allocator_holds_less_a_margin() -> None:
    found, text = automatic_budget(free_bytes=60 * GIB, total_bytes=80 * GIB, reserved_bytes=10 * GIB)
    assert found == 70 * GIB - int(70 * GIB * MARGIN)
    assert "80 GiB of the GPU, less 10 GiB in CUDA contexts and other processes, less 5.6 GiB" in text


@pytest.mark.parametrize(
    ("text", "share"), [("90% of gpu", Fraction(9, 10)), (" 12.5 % of GPU", Fraction(1, 8)), ("90%", None)]
)
def test_a_share_of_the_gpu(text: str, share: Fraction | None) -> None:
    assert share_of_gpu(text) == share


@pytest.mark.parametrize("text", ["0% of gpu", "101% of gpu"])
def test_what_is_no_part_of_a_gpu_is_refused(text: str) -> None:
    with pytest.raises(lowtide.BudgetError, match="up to 100%"):
        check_budget(text)


@pytest.mark.parametrize("budget", ["auto", "90% of gpu"])
def test_on_a_cpu_the_nearest_budgets_are_named(budget: str) -> None:
    model, x = nn.Linear(8, 8), torch.ones(4, 8)
    optimizer = torch.optim.SGD(model.parameters())

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    with pytest.raises(lowtide.BudgetError, match='as in "8GiB"'):
        lowtide.fit(model, step, x, budget=budget)
    with pytest.raises(lowtide.BudgetError, match='as in "60%"'), lowtide.within(budget):
        step(x)


@pytest.mark.gpu
def test_budgets_of_the_gpu_that_is_there() -> None:
    device, said = torch.device("cuda", 0), list[str]()
    _, total = torch.cuda.mem_get_info(device)
    assert on_device("50% of gpu", device, said.append) == total // 2
    assert not said
    found = on_device("auto", device, said.append)
    assert isinstance(found, int)
    assert 0 < found < total
    assert "for the allocator's pieces" in said[0]
