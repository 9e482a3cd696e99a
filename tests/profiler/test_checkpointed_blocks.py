"""Blocks that checkpoint themselves are noted, with the smallest peak that there would be without that."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import Infeasible
from lowtide.planner import find_smallest_peak
from lowtide.planner.records import Profile
from lowtide.script.rehearse_steps import StepRehearser
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


def rehearse_as_a_script(model: nn.Module, step: Callable[[Tensor], Tensor], x: Tensor) -> Profile:
    """Rehearse two steps, as `lowtide run` does."""
    rehearsing = StepRehearser(stop=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while not rehearsing.done:
        rehearsing.on_step_begin(model, ((x,), {}), (optimizer,))
        step(x)
        optimizer.step()
        rehearsing.on_step_end(model)
    rehearsing.on_stop()
    assert rehearsing.profile is not None
    return rehearsing.profile


@pytest.mark.parametrize("how", [False, True])
def test_the_smallest_peak_without_is_in_notes_and_errors(how: bool) -> None:
    plain, model = network(None), network(how)
    least = find_smallest_peak(lowtide.rehearse(plain, step_of(plain), X))[1].peak_bytes
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


class Rerun(torch.autograd.Function):
    """A program's own checkpointing, as diffusion models carry it along: backward calls the block again."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.block, ctx.x, ctx.parameters = block, x, parameters
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            result = ctx.block(x)
        return None, *torch.autograd.grad(result, (x, *ctx.parameters), grad)


class RerunBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + Rerun.apply(self.inner, x, *self.inner.parameters())


@pytest.mark.parametrize("rehearse", [lowtide.rehearse, rehearse_as_a_script], ids=["rehearse", "script"])
def test_a_function_that_calls_its_block_again_is_named(rehearse: Callable[..., Profile]) -> None:
    model = nn.Sequential(nn.Linear(32, 32), *(RerunBlock(None) for _ in range(4)))
    profile = rehearse(model, step_of(model), X)
    (note,) = [note for note in profile.notes if "checkpoint" in note]
    assert note.startswith(f"Rerun of {__name__} calls modules again in backward (4.inner, 3.inner, 2.inner, ...)")
    with pytest.raises(Infeasible) as error:
        lowtide.plan(profile, 1)
    assert note in error.value.notes


class LateBinding(nn.Module):
    """Blocks checkpointed by a function of the loop: in backward the last block runs in place of every other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*network(None)][1:])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(lambda t: block(t), x, use_reentrant=False)  # noqa: B023 - the mistake
        return x


def counting() -> nn.Module:
    """BatchNorm in checkpoints, which updates its statistics in forward and again in backward."""
    torch.manual_seed(0)
    blocks = [Block(False) for _ in range(3)]
    for block in blocks:
        block.inner.append(nn.BatchNorm1d(32))
    return nn.Sequential(nn.Linear(32, 32), *blocks)


@pytest.mark.parametrize(
    "build", [lambda: network(False), lambda: network(True), LateBinding, counting], ids=["new", "old", "late", "norm"]
)
def test_steps_of_a_script_keep_the_bits_of_its_checkpoints(build: Callable[[], nn.Module]) -> None:
    model, plain = build(), build()
    rehearsing = StepRehearser(stop=False)
    trained = []
    for each in (model, plain):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        x = torch.randn(64, 32, requires_grad=True)
        for _ in range(4):
            is_rehearsed = each is model and not rehearsing.done
            if is_rehearsed:
                rehearsing.on_step_begin(each, ((x,), {}), (optimizer,))
            each(x).square().mean().backward()
            optimizer.step()
            if is_rehearsed:
                rehearsing.on_step_end(each)
            optimizer.zero_grad()
        rehearsing.on_stop()
        trained.append(each.state_dict())
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[1])
    assert rehearsing.n_steps == 2
    assert rehearsing.profile is not None
    assert any("rehearse without that to see what a plan for it needs" in note for note in rehearsing.profile.notes)
