"""Backward that runs through a graph more than once: what is made again is made in each pass, and gone in between."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import lowtide
from budgets import within
from lowtide.planner import find_smallest_peak
from lowtide.planner.records import Decisions, Profile
from lowtide.planner.simulate.simulator import predict

WIDTH, ROWS, PASSES = 64, 256, 3


def _step_of(model: nn.Module, passes: int):
    def step(batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        for n in range(passes):
            loss.backward(retain_graph=n < passes - 1)
        model.zero_grad()
        return loss.detach()

    return step


def _rehearsed(passes: int) -> tuple[nn.Module, Tensor, Profile]:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(approximate="tanh")) for _ in range(4))
    model, batch = nn.Sequential(*layers).train(), torch.randn(ROWS, WIDTH)
    return model, batch, lowtide.rehearse(model, _step_of(model, passes), batch)


def test_each_pass_takes_as_long_and_none_holds_what_another_made():
    _, _, once = _rehearsed(1)
    model, batch, often = _rehearsed(PASSES)
    assert len(often.values) == PASSES * len(once.values)
    assert [s.address for s in often.slots] == PASSES * [s.address for s in once.slots]
    for profile in (once, often):
        assert predict(profile, Decisions()).peak_bytes == profile.measured_plain_peak_bytes
    recompute = Decisions(
        recompute=frozenset(s.address for s in once.slots if once.values[s.value].node == "GeluBackward0")
    )
    replay = Decisions(replay=frozenset(c.id for c in once.calls if c.cls == "Sequential" and c.refused is None))
    for decisions in (recompute, replay):
        assert decisions != Decisions()
        predicted = predict(often, decisions)
        assert predicted.extra_flops == PASSES * predict(once, decisions).extra_flops
        plan = replace(
            lowtide.plan(often, "100%"),
            recompute=dict.fromkeys(decisions.recompute, "GeluBackward0"),
            replay=tuple(decisions.replay),
            predicted=predicted,
        )
        verdict = lowtide.verify(model, _step_of(model, PASSES), batch, plan)
        assert verdict.identical
        assert verdict.measured_peak_bytes <= predicted.peak_bytes <= 1.01 * verdict.measured_peak_bytes


class Heads(nn.Module):
    """Two outputs from one trunk."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid()) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        hidden = self.trunk(x)
        return [head(hidden) for head in self.heads]


def test_values_read_in_one_pass_are_recomputed_once():
    model = Heads().train()

    def step(batch: Tensor) -> None:
        first, second = model(batch)
        first.square().mean().backward(retain_graph=True)
        second.square().mean().backward()
        model.zero_grad()

    profile = lowtide.rehearse(model, step, torch.randn(ROWS, WIDTH))
    assert predict(profile, Decisions()).peak_bytes == profile.measured_plain_peak_bytes
    reads: dict[str, list[int]] = {}
    for slot in profile.slots:
        if slot.need is not None:
            reads.setdefault(slot.label.partition(":")[0], []).append(slot.need)
    assert len(reads["trunk.1"]) == 2
    assert len(reads["heads.0.1"]) == len(reads["heads.1.1"]) == 1
    assert reads["heads.0.1"][0] < reads["trunk.1"][0] < reads["heads.1.1"][0] < reads["trunk.1"][1]


def test_each_pass_overwrites_gradients_of_its_own():
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(WIDTH, WIDTH), Chain(), nn.Linear(WIDTH, WIDTH)), torch.randn(ROWS, WIDTH)
    profile = lowtide.rehearse(model, _step_of(model, 2), batch)
    over = [(number, value.overwrites) for number, value in enumerate(profile.values) if value.overwrites is not None]
    first, second = over[: len(over) // 2], over[len(over) // 2 :]
    shift = len(profile.values) // 2
    assert first
    assert second == [(number + shift, other + shift) for number, other in first]


class Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 * 3


def test_tensors_held_by_a_graph_of_gradients_are_not_freed_in_between():
    """`create_graph`: the graph of the first pass holds what was made again, and the second reads it there."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), Chain(), nn.Tanh(), Chain())]
    model, batch = nn.Sequential(*layers), torch.randn(ROWS, WIDTH)

    def step(batch: Tensor) -> Tensor:
        made = model(batch)
        gradients = torch.autograd.grad(made.sum(), list(model.parameters()), create_graph=True)
        loss = made.square().mean() + sum(gradient.square().sum() for gradient in gradients)
        loss.backward()
        model.zero_grad()
        return loss.detach()

    profile = lowtide.rehearse(model, step, batch)
    plan = lowtide.plan(profile, find_smallest_peak(profile)[1].peak_bytes)
    verdict = lowtide.verify(model, step, batch, plan)
    assert verdict.identical
    assert verdict.measured_peak_bytes <= plan.predicted.peak_bytes


@pytest.mark.parametrize("part", [0, 50])
def test_a_graph_made_by_backward_holds_what_it_read(part):
    """A gradient penalty: the first graph is let go of, and what the second one reads of it is still there."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())])
    x = torch.randn(2048, 64)

    def step(x):
        x = x.detach().requires_grad_()
        made = model(x).sum()
        (gradient,) = torch.autograd.grad(made, x, create_graph=True)
        penalty = (gradient.norm(dim=1) - 1).square().mean()
        del gradient, x, made
        penalty.backward()

    step(x)
    model.zero_grad()
    profile, plan, verdict = within(model, step, x, part)
    assert predict(profile, Decisions()).peak_bytes == profile.measured_plain_peak_bytes
    assert verdict.identical
    assert verdict.measured_peak_bytes <= plan.predicted.peak_bytes


class Energy(nn.Module):
    """A force field: backward runs inside its forward, and its graph is saved for backward as well."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        energy = self.net(x).sum(1)
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, forces


def forces(layers: list[nn.Module]):
    model = Energy(*layers)

    def loss(x: Tensor) -> Tensor:
        energy, forces = model(x)
        return energy.square().mean() + forces.square().mean()

    return model, loss


def penalty(layers: list[nn.Module]):
    model = nn.Sequential(*layers)

    def loss(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        made = model(x)
        (gradient,) = torch.autograd.grad(made.sum(), x, create_graph=True)
        return made.mean() + (gradient.norm(dim=1) - 1).square().mean()

    return model, loss


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("part", [0, 50])
@pytest.mark.parametrize("activation", [nn.LeakyReLU, nn.SiLU, nn.Tanh])
@pytest.mark.parametrize("made", [forces, penalty])
def test_values_recomputed_under_create_graph_are_recomputed_by_the_next_pass_too(made, activation, part):
    """Both read what forward saved; in between it is gone, or held by that graph, or saved by it."""
    torch.manual_seed(0)
    sizes = (WIDTH, 2 * WIDTH, 2 * WIDTH)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), activation())]
    model, loss = made([*layers, nn.Linear(sizes[-1], 1)])

    def step(x: Tensor) -> Tensor:
        found = loss(x)
        found.backward()
        model.zero_grad()
        return found.detach()

    profile, plan, verdict = within(model, step, torch.randn(4 * ROWS, WIDTH), part)
    assert predict(profile, Decisions()).peak_bytes == profile.measured_plain_peak_bytes
    assert verdict.identical
    assert not verdict.drifted
    assert verdict.measured_peak_bytes <= plan.predicted.peak_bytes <= 1.001 * verdict.measured_peak_bytes
    recomputed = plan.recompute or plan.replay
    assert recomputed or activation is nn.Tanh  # of which that graph holds everything


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def test_an_argument_that_such_a_graph_holds_is_counted_as_long_as_it_does():
    """In the trace the replay of a block holds it besides; by itself it would have ended in forward."""
    torch.manual_seed(0)
    wide = 2 * WIDTH
    first = Residual(nn.ReLU(), nn.GELU(), nn.ReLU(), nn.Linear(wide, wide))
    second = Residual(nn.Softplus(), nn.Softplus(), nn.Linear(wide, wide))
    model = nn.Sequential(nn.Linear(WIDTH, wide), first, second, nn.Linear(wide, 1))

    def step(x: Tensor) -> None:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (gradient.norm(dim=1) - 1).square().mean().backward()
        model.zero_grad()

    _, plan, verdict = within(model, step, torch.randn(2 * ROWS, WIDTH), 0)
    assert plan.recompute
    assert verdict.identical
    assert verdict.measured_peak_bytes <= plan.predicted.peak_bytes <= 1.01 * verdict.measured_peak_bytes
