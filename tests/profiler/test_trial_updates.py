"""Updates that follow the step in the loop: their state and temporaries are in the budget from the beginning."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.memory.cpu_recorder import CpuRecorder
from lowtide.memory.memory_timeline import Timeline
from lowtide.profiler.online import OnlineProfiler
from lowtide.profiler.trial_updates import NO_OPTIMIZER
from lowtide.runtime.live_optimizers import state_bytes
from lowtide.units import format_bytes

X = torch.randn(64, 32)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU())), nn.Linear(32, 1))


def step_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    return step


def peaks(iteration: Callable[[], object], n: int = 3) -> list[int]:
    """Of all that is in memory in each of `n` iterations, counted without any rehearsal."""
    found = []
    for _ in range(n):
        with CpuRecorder() as recorder:
            iteration()
        found.append(recorder.count_bytes_beside(frozenset(), 0) + Timeline(recorder.stream).peak_bytes)
    return found


@pytest.mark.parametrize("is_passed", [False, True])
def test_state_of_an_optimizer_that_steps_in_the_loop_is_in_the_budget(is_passed: bool) -> None:
    model = net()
    step, optimizer = step_of(model), torch.optim.AdamW(model.parameters(), lr=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    fitted = lowtide.fit(model, step, X, budget="90%", optimizer=optimizer if is_passed else None)
    assert not optimizer.state
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    n_bytes = sum(p.nbytes for p in model.parameters())
    assert fitted.profile.static.optimizer == 2 * n_bytes + 4 * len(before)
    assert NO_OPTIMIZER not in fitted.plan.notes

    def iteration() -> None:
        step(X)
        optimizer.step()
        optimizer.zero_grad()

    assert max(peaks(iteration)) <= fitted.plan.budget_bytes
    fitted.remove()


def test_temporaries_of_an_update_are_in_the_peak() -> None:
    """A step on one row: by far the most is needed by the update, which makes as much as its parameters are."""
    model = nn.Linear(256, 256)
    step, x = step_of(model), torch.randn(1, 256)
    plain = lowtide.rehearse(model, step, x).measured_plain_peak_bytes
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    found = lowtide.rehearse(model, step, x).measured_plain_peak_bytes
    assert plain is not None
    assert found is not None
    assert not optimizer.state
    assert plain < 4 * model.weight.nbytes  # itself, the gradient that is there and the one that comes
    assert found >= 5 * model.weight.nbytes  # itself, a gradient, two averages and what they are divided into


def test_accumulation_whose_update_is_not_in_the_rehearsed_steps() -> None:
    model = net()
    optimizer, counted = torch.optim.AdamW(model.parameters(), lr=0.1), [0]

    def step(x: Tensor) -> None:
        (model(x).square().mean() / 16).backward()
        counted[0] += 1
        if counted[0] % 16 == 0:
            optimizer.step()
            optimizer.zero_grad()

    fitted = lowtide.fit(model, step, X, budget="90%")
    counted[0] = 14
    assert max(peaks(lambda: step(X), 5)) <= fitted.plan.budget_bytes
    assert optimizer.state
    fitted.remove()


def test_an_optimizer_that_is_not_there_yet_is_said_first_and_at_its_first_update() -> None:
    model = net()
    step = step_of(model)
    fitted = lowtide.fit(model, step, X, budget="90%")
    assert NO_OPTIMIZER in str(fitted)
    fitted.remove()
    optimizer, said = torch.optim.Adam(model.parameters()), list[str]()
    with lowtide.apply(model, fitted.plan, say=said.append):
        step(X)
        for each in (optimizer, optimizer, torch.optim.RAdam(model.parameters())):
            each.step()
    more = format_bytes(2 * sum(p.nbytes for p in model.parameters()) + 4 * len(list(model.parameters())))
    assert len(said) == 1
    assert f"Adam updates Sequential, whose optimizers have {more} more state than is in the plan" in said[0]


def test_an_optimizer_that_has_no_more_state_than_planned_says_nothing(recwarn: pytest.WarningsRecorder) -> None:
    model = net()
    step, optimizer = step_of(model), torch.optim.Adam(model.parameters())
    with lowtide.fit(model, step, X, budget="90%"):
        step(X)
        optimizer.step()
    assert not list(recwarn)


class Restoring(torch.optim.SGD):
    """An optimizer whose state holds the very memory of its parameters, as that of SAM does after a step."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.data
        super().step()


def test_parameters_and_gradients_in_an_optimizers_state_are_not_counted_twice() -> None:
    model = net()
    optimizer = Restoring(model.parameters(), momentum=0.9)
    said = list[str]()
    plan = lowtide.plan(lowtide.rehearse(model, step_of(model), X, optimizer=optimizer), "90%")
    with lowtide.apply(model, plan, say=said.append):
        for _ in range(2):
            step_of(model)(X)
            optimizer.step()
    assert state_bytes([optimizer], torch.device("cpu")) == sum(p.nbytes for p in model.parameters())
    assert not said


def test_an_update_that_can_not_be_tried_is_said() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters())
    profile = lowtide.rehearse(model, step_of(model), X)
    assert any(note.startswith("an update by LBFGS could not be rehearsed (TypeError") for note in profile.notes)
    assert not optimizer.state[model[0].weight]


def test_gradients_that_would_spoil_the_parameters_do_not_reach_the_next_step() -> None:
    """The loop clips them; what is rehearsed does not, and checks its loss."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)

    def step(x: Tensor) -> None:
        loss = model(x).square().mean()
        assert torch.isfinite(loss)
        loss.backward()

    lowtide.rehearse(model, step, X)
    assert optimizer.param_groups[0]["lr"] == 1e30


def test_an_optimizer_that_is_yet_to_step_is_counted_in_steps_that_are_really_taken() -> None:
    model = net()
    first, second = torch.optim.SGD(model[:3].parameters()), torch.optim.Adam(model[3:].parameters())
    observed, step = OnlineProfiler(model), step_of(model)
    for _ in range(2):
        model.zero_grad()
        observed.begin(((X,), {}), (first,))
        step(X)
        first.step()
        observed.end()
    observed.leave()
    assert observed.profile is not None
    assert not second.state
    theirs = list(model[3:].parameters())
    assert observed.profile.static.optimizer == 2 * sum(p.nbytes for p in theirs) + 4 * len(theirs)
    assert any(note.startswith("updates by Adam are yet to come, and counted") for note in observed.profile.notes)
