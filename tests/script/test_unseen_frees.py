"""Frees in threads that the recorder of CPU memory does not follow, as those of gloo."""

from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue
from threading import Thread

import pytest
import torch
from torch import distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import lowtide
from lowtide.script.apply_plan import MOST_MEASURED, PlanApplier
from lowtide.script.run_listened import watched
from lowtide.script.step_listener import StopScript

X = torch.randn(512, 64)


class Sending(nn.Module):
    """A layer that has another thread free a tensor, in some of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.steps: range | tuple[int, ...] = ()
        self.n = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.n in self.steps:
            sent: SimpleQueue[torch.Tensor] = SimpleQueue()
            sent.put(torch.empty(3 * 2**20, dtype=torch.uint8))
            thread = Thread(target=sent.get)
            thread.start()
            thread.join()
        self.n += 1
        return self.layer(x).tanh()


def train(model: nn.Module, n_steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(n_steps):
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def plan() -> lowtide.Plan:
    model = nn.Sequential(Sending(), Sending())
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    made = lowtide.plan(lowtide.rehearse(model, step, X, optimizer=optimizer), "100%")
    return replace(made, budget_bytes=made.predicted.peak_bytes + 2**20)


@pytest.fixture
def two_processes() -> Iterator[None]:
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    distributed.destroy_process_group()


def run(plan: lowtide.Plan, unseen_in: range | tuple[int, ...]) -> str:
    model = nn.Sequential(Sending(), Sending())
    model[0].steps = unseen_in
    said: list[str] = []
    with watched(PlanApplier(plan, said.append)):
        train(model, 8)
    return said[-1]


@pytest.mark.usefixtures("two_processes")
def test_a_step_whose_frees_go_unseen_is_measured_again(plan: lowtide.Plan) -> None:
    assert "peak: within the budget" in run(plan, range(1, MOST_MEASURED))


@pytest.mark.usefixtures("two_processes")
def test_steps_above_the_budget_are_not_measured_without_end(plan: lowtide.Plan) -> None:
    with pytest.raises(StopScript) as ended:
        run(plan, range(8))
    assert isinstance(ended.value.__cause__, lowtide.OverBudget)


def test_a_process_alone_sees_its_frees(plan: lowtide.Plan) -> None:
    with pytest.raises(StopScript) as ended:
        run(plan, (1,))
    assert isinstance(ended.value.__cause__, lowtide.OverBudget)
