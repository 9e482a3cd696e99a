"""Modules and objects whose classes cannot be hashed, as where a metaclass defines `__eq__` alone: as any others."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

import lowtide
from comparing import equal


class ComparesAlone(type):
    def __eq__(cls, other: object) -> bool:
        return cls is other


class Scale(metaclass=ComparesAlone):
    def __init__(self) -> None:
        self.factors = torch.full((3,), 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factors[0]


class Block(nn.Module, metaclass=ComparesAlone):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.scale, self.scales = Scale(), [Scale()]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gelu(self.up(self.scale(x))))


scale = Scale()


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block() for _ in range(3)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = scale(self.model(x)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@pytest.mark.parametrize("budget", ["75%", "60%"])
def test_a_step_with_unhashable_classes_is_fitted_to_the_same_bits(budget: str) -> None:
    plain, fitted, x = Training(), Training(), torch.randn(256, 32)
    found = lowtide.fit(fitted.model, fitted.step, x, budget=budget)
    assert found.plan.predicted.peak_bytes <= found.plan.budget_bytes
    assert equal([plain.step(x) for _ in range(2)], [fitted.step(x) for _ in range(2)])
    assert equal(plain.model.state_dict(), fitted.model.state_dict())
    lowtide.remove(fitted.model)


def test_a_loop_with_unhashable_classes_is_planned_to_the_same_bits() -> None:
    plain, planned, x = Training(), Training(), torch.randn(256, 32)
    expected = [plain.step(x) for _ in range(10)]
    with lowtide.within("75%") as run:
        assert equal(expected, [planned.step(x) for _ in range(10)])
    assert run.verdict is not None
    assert run.verdict.within_budget
    assert equal(plain.model.state_dict(), planned.model.state_dict())


def test_a_step_with_unhashable_classes_is_estimated_as_measured() -> None:
    training, x = Training(), torch.randn(256, 32)
    n_bytes_before = sum(tensor.nbytes for tensor in (x, *training.model.parameters()))
    estimated = lowtide.estimate(training.model, training.step, x)
    with lowtide.measure(training.model) as measured:
        training.step(x)
    assert estimated.peak_bytes == n_bytes_before + measured.peak_bytes
