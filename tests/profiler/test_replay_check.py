"""Tensors that backward reads are compared with those that forward saved; a block that reads other state later is not
replayed.
"""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import lowtide
from budgets import step_of, within
from lowtide.errors import ReplayMismatch
from lowtide.memory.events import OWN_WORK, Allocate, Free, Mark, without_own_work
from lowtide.profiler import replay_check
from lowtide.profiler.online import OnlineProfiler
from lowtide.profiler.replay_check import ReplayChecker
from lowtide.profiler.replay_trials import CHANGED
from lowtide.runtime.replay import ReplayFrame
from lowtide.runtime.saved_values import Handle
from runtime.plans import in_force

WIDTH = 32


class Twice(torch.autograd.Function):
    """Saves two tensors, for which there is no recipe."""

    @staticmethod
    def forward(ctx, x):
        y = x.sigmoid() * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, outer):
        x, y = ctx.saved_tensors
        gate = x.sigmoid()
        return outer * (y + gate * (1 - y))


class State:
    """Something that no replay can put back: reached through a module, and no attribute of one."""

    scale = 1.0


class Block(nn.Module):
    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = Twice.apply(Twice.apply(self.wide(x) * self.state.scale))
        return x + self.narrow(hidden).tanh()


class Scaled(nn.Module):
    """Tells each of its blocks how large it is by writing that into one object."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.state, self.growth = State(), 1.0
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(self.state) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            self.state.scale = 1 + number * self.growth
            x = block(x)
        return x.square().mean()


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(256, WIDTH)


def test_a_block_that_finds_something_else_in_backward_is_not_run_again() -> None:
    model = Scaled()
    profile, plan, verdict = within(model, step_of(model), batch(), 20)
    assert {call.refused for call in profile.calls if call.cls == "Block"} == {CHANGED}
    assert not plan.replay
    assert verdict.identical
    assert verdict.within_budget


class Turned(Scaled):
    """Tells its blocks which way round to take what they are given: the same rows in another order."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = self.turning(block)

    def turning(self, block: Block):
        def forward(x: Tensor) -> Tensor:
            x = x.flip(0) if self.state.scale > 1 else x
            hidden = Twice.apply(Twice.apply(block.wide(x)))
            return x + block.narrow(hidden).tanh()

        return forward


def test_a_block_that_finds_the_same_in_another_order_is_not_run_again() -> None:
    model = Turned()
    profile, _, verdict = within(model, step_of(model), batch(), 20)
    assert {call.refused for call in profile.calls if call.cls == "Block"} == {CHANGED}
    assert verdict.identical
    assert verdict.within_budget


def test_blocks_that_read_a_parametrization_cache_keep_their_bits() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Block(State()) for _ in range(3))
            for block in self.blocks:
                parametrizations.spectral_norm(block.wide)

        def forward(self, x: Tensor) -> Tensor:
            with parametrize.cached():
                for block in [*self.blocks, *self.blocks]:
                    x = block(x)
            return x.square().mean()

    model = Cached()
    _, _, verdict = within(model, step_of(model), batch(), 20)
    assert verdict.identical


def test_a_step_under_a_plan_that_would_have_other_gradients_ends_in_backward() -> None:
    """The check of `lowtide run` in the first step under its plan."""
    model, x = Scaled(), batch()
    model.growth = 0.0
    _, plan, _ = within(model, step_of(model), x, 0)
    assert plan.replay
    model.growth = 1.0
    applied = lowtide.apply(model, plan)
    other_bits = pytest.raises(ReplayMismatch, match="gives other bits in backward than in forward")
    with applied.checked(), other_bits:
        model(x).backward()
    model.growth = 0.0
    model.zero_grad()
    with applied.checked():
        model(x).backward()
    applied.remove()


def test_nondeterministic_sums_are_no_mismatch() -> None:
    class Any(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.numbers = nn.Linear(4, 4), itertools.count()

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * next(self.numbers)).square()

    model = nn.Sequential(nn.Linear(4, 4), Any())
    with in_force(model, "replay", Any) as engine, ReplayChecker(engine).running():
        model(batch()[:, :4]).sum().backward()


def test_a_second_replay_does_not_count_as_memory_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kernels, such as oneDNN's LSTM, leave bytes of what they save unwritten, so no two runs have equal sums."""

    def temporaries() -> int:
        model, x = Scaled(), batch()
        model.growth = 0.0
        observed = OnlineProfiler(model)
        for _ in range(2):
            observed.begin(x)
            step_of(model)(x)
            observed.end()
        observed.leave()
        assert observed.profile is not None
        return lowtide.plan(observed.profile, "100%").plain.parts["temporaries"]

    expected = temporaries()
    numbers, read = itertools.count(1), replay_check.Witness.read

    def read_if_replayed(witness: replay_check.Witness, key: int, handle: Handle, tensor: Tensor) -> None:
        if isinstance(handle.value.maker, ReplayFrame):
            read(witness, key, handle, tensor)

    monkeypatch.setattr(replay_check, "content_hash", lambda tensor: next(numbers))
    monkeypatch.setattr(replay_check.Witness, "read", read_if_replayed)
    assert temporaries() == expected
    assert next(numbers) > 1


def test_two_models_that_are_trained_in_one_step_are_fitted_one_after_the_other() -> None:
    torch.manual_seed(0)

    def net(i: int, o: int) -> nn.Module:
        return nn.Sequential(nn.Linear(i, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, o))

    generator, critic = net(16, 64), net(64, 1)
    optimizers = [torch.optim.Adam(model.parameters()) for model in (generator, critic)]

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        real, noise = batch
        fake = generator(noise)
        for loss, optimizer in (
            (lambda: critic(fake.detach()).mean() - critic(real).mean(), optimizers[1]),
            (lambda: -critic(fake).mean(), optimizers[0]),
        ):
            found = loss()
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
        return found.detach()

    given = torch.randn(256, 64), torch.randn(256, 16)
    fitted = [lowtide.fit(model, step, given, budget="92%") for model in (generator, critic)]
    assert all(each.verdict.identical and each.verdict.within_budget for each in fitted)
    assert all(each.plan.recompute or each.plan.replay for each in fitted)
    for each in fitted:
        each.remove()


def test_allocations_of_the_check_are_not_in_the_recording() -> None:
    events = [
        Allocate(0, 64, 1, "a"),
        Mark(OWN_WORK, True),
        Allocate(1, 8, 2, "sum"),
        Free(1, 8),
        Free(0, 64),
        Allocate(2, 32, 1, "kept"),
        Mark(OWN_WORK, False),
        Mark("read", 0),
        Allocate(3, 8, 2, "sum"),
        Free(3, 8),
        Free(2, 32),
    ]
    found = without_own_work(events)
    assert found == (*events[:1], *events[4:6], *events[7:])
    assert without_own_work(found) == found
