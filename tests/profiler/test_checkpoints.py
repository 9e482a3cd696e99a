"""Blocks that checkpoint themselves are noted, with the smallest peak that there would be without that."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import Infeasible
from lowtide.planner import smallest_peak
from lowtide.profiler.online import OnlineProfiler
from lowtide.script.rehearse_steps import Rehearsing
from lowtide.units import format_bytes

X = torch.randn(64, 32)


class Block(nn.Module):
    """Dropout and two layers, checkpointed in one of torch's ways or not."""

    def __init__(self, how: bool | None) -> None:
        super().__init__()
        self.how = how
        self.inner = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.inner(x) if self.how is None else checkpoint(self.inner, x, use_reentrant=self.how))


def network(how: bool | None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), *(Block(how) for _ in range(4)))


def step_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return step


@pytest.mark.parametrize("how", [False, True])
def test_the_smallest_peak_without_is_in_notes_and_errors(how: bool) -> None:
    plain, model = network(None), network(how)
    least = smallest_peak(lowtide.rehearse(plain, step_of(plain), X))[1].peak_bytes
    profile = lowtide.rehearse(model, step_of(model), X)
    (note,) = [note for note in profile.notes if "checkpoint themselves" in note]
    assert "4 calls in 1, 2, 3, ..." in note
    assert f"without that the smallest peak would be {format_bytes(least)} instead of" in note
    with pytest.raises(Infeasible) as error:
        lowtide.plan(profile, 1)
    assert note in error.value.notes
    with pytest.raises(Infeasible, match="checkpoint themselves"):
        lowtide.fit(model, step_of(model), X, budget=1, profile=profile)


def test_nothing_is_said_of_others() -> None:
    model = network(None)
    assert not any("checkpoint" in note for note in lowtide.rehearse(model, step_of(model), X).notes)


@pytest.mark.parametrize("how", [False, True])
def test_steps_of_a_script_are_rehearsed_both_ways(how: bool) -> None:
    model, plain = network(how), network(how)
    crew = Rehearsing(stop=False)
    torch.manual_seed(1)
    for _ in range(4):
        crew.begins(model, ((X,), {}), ())
        step_of(model)(X)
        crew.ends(model)
    crew.leaves()
    assert crew.profile is not None
    assert sum("without that the smallest peak would be" in note for note in crew.profile.notes) == 1
    torch.manual_seed(1)
    for _ in range(4):
        step_of(plain)(X)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_without_time_for_both_the_number_is_missing() -> None:
    model, crew = network(False), Rehearsing(stop=False)
    for _ in range(2):
        crew.begins(model, ((X,), {}), ())
        step_of(model)(X)
        crew.ends(model)
    crew.finish()
    crew.leaves()
    assert crew.profile is not None
    assert any("rehearse without that" in note for note in crew.profile.notes)


def test_checkpoints_are_off_only_while_steps_are_observed() -> None:
    model = network(False)
    observed = OnlineProfiler(model, checkpoints=False)
    observed.begin(((X,), {}))
    step_of(model)(X)
    observed.end()
    assert not observed.checkpointed or observed.checkpointed.total() == 4
    observed.leave()
    other = OnlineProfiler(model)
    other.begin(((X,), {}))
    step_of(model)(X)
    other.end()
    other.leave()
    assert other.checkpointed.total() == 4
