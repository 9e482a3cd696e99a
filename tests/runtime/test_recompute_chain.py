"""Chains of elementwise recomputes in one kernel, with torch in place of Triton: found, exact, and within memory."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import lowtide
import torch_as_triton
from lowtide.planner.records import Profile
from lowtide.profiler import chain_trials
from lowtide.runtime import recompute_chain
from lowtide.runtime.recipes.chains import CHAIN
from lowtide.runtime.recompute_chain import Chain

Runs = list[tuple[list[str], list[int]]]
"""For each chain that has run, the nodes of its members, and the numbers of those that were stored."""

PREFIX = ["PowBackward0", "MulBackward0", "AddBackward0", "MulBackward0"]
"""The first operators of `NewGelu`."""


class NewGelu(nn.Module):
    """GPT-2's activation in single operators, as transformers has it."""

    def forward(self, x: Tensor) -> Tensor:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class Gated(nn.Module):
    """Llama's product of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.silu(self.gate(x)) * self.up(x)


def network(activation: Callable[[], nn.Module] = NewGelu, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), activation(), nn.Linear(32, 32)) for _ in range(3)]
    return nn.Sequential(*layers).to(dtype)


def step_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def step(batch: Tensor) -> Tensor:
        loss = model(batch).float().square().mean()
        loss.backward()
        return loss.detach()

    return step


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(256, 32, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Let chains run here, whatever their times, and collect them."""
    ran: Runs = []
    store = Chain.store

    def noting(self: Chain, prepared: recompute_chain.Prepared, outputs: list[Tensor]) -> Tensor:
        ran.append(([maker.recipe.node for _, maker in self.members], prepared.stored))
        return store(self, prepared, outputs)

    monkeypatch.setattr(Chain, "store", noting)
    monkeypatch.setattr(recompute_chain, "has_triton", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(recompute_chain, "run_chain", torch_as_triton.run_chain)
    monkeypatch.setattr(chain_trials, "CLEARLY", float("inf"))
    return ran


def rehearsed(model: nn.Module, x: Tensor) -> Profile:
    return lowtide.rehearse(model, step_of(model), x, in_place=False)


def chained(profile: Profile) -> set[str]:
    return {node for node, name in profile.implementations.items() if name == CHAIN}


@pytest.mark.parametrize("budget", ["80%", "60%"])
def test_a_plan_computes_chains_to_the_same_bits_within_its_budget(runs: Runs, budget: str) -> None:
    model, x = network(), batch()
    profile = rehearsed(model, x)
    assert chained(profile) == {"AddBackward0", "MulBackward0", "PowBackward0", "TanhBackward0"}
    plan = lowtide.plan(profile, budget)
    assert f"MulBackward0, PowBackward0, TanhBackward0 are recomputed from {CHAIN}" in str(plan)
    del runs[:]
    verdict = lowtide.verify(model, step_of(model), x, plan)
    assert verdict.identical
    assert verdict.within_budget
    assert runs
    assert {len(nodes) for nodes, _ in runs} <= {2, 3, 8}


def test_an_operator_that_differs_is_never_in_a_chain(runs: Runs) -> None:
    """On a CPU, cubes in bfloat16 are rounded twice, but not by the kernel."""
    model, x = network(dtype=torch.bfloat16), batch(torch.bfloat16)
    profile = rehearsed(model, x)
    assert chained(profile) == {"AddBackward0", "MulBackward0", "TanhBackward0"}
    verdict = lowtide.verify(model, step_of(model), x, lowtide.plan(profile, "60%"))
    assert verdict.identical
    assert verdict.within_budget


def test_recomputing_everything(runs: Runs) -> None:
    """All saved tensors of the activation from its input: one kernel for the longest chain, which stores what backward
    reads later.
    """
    model, plain, x = network(), network(), batch()
    profile = rehearsed(model, x)
    made = lowtide.plan(profile, "80%")
    recompute = {slot.address: profile.values[slot.value].node for slot in profile.slots if slot.is_input is False}
    activations = {
        address: node
        for address, node in recompute.items()
        if ".1#0:" in address and node.startswith(("Mul", "Add", "T"))
    }
    assert len(activations) >= 9
    made = replace(made, recompute=activations, replay=(), advance=())
    del runs[:]
    with lowtide.apply(model, made):
        step_of(model)(x)
    step_of(plain)(x)
    assert runs == [([*PREFIX, "TanhBackward0", "AddBackward0"], [4, 5])] * 3
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


class Written(nn.Module):
    """Operators of which each recompute may be written over its operand, which is recomputed only for it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp((torch.cos(x) * 0.5 + 1.0) * 0.25)


def test_a_chain_that_would_hold_more_runs_as_single_recomputes(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: dict[bool, int] = {}
    count_bytes = Chain.count_bytes

    def noting(self: Chain, *, fused: bool) -> int:
        return counted.setdefault(fused, count_bytes(self, fused=fused))

    monkeypatch.setattr(Chain, "count_bytes", noting)
    model, x = network(Written), batch()
    profile = rehearsed(model, x)
    plan = lowtide.plan(profile, "1 GiB")
    nodes = {slot.address: profile.values[slot.value].node for slot in profile.slots}
    exps = {address: node for address, node in nodes.items() if node.startswith("Exp")}
    kinds = dict.fromkeys(("AddBackward0", "MulBackward0", "ExpBackward0"), CHAIN)
    plan = replace(plan, recompute=exps, implementations=kinds)
    verdict = lowtide.verify(model, step_of(model), x, plan)
    assert verdict.identical
    assert counted == {True: 2 * x.nbytes, False: x.nbytes}
    assert runs == []


def test_a_kernel_that_fails_is_replaced_by_the_recipes(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = network(), batch()
    plan = lowtide.plan(rehearsed(model, x), "60%")
    n_calls = [0]

    def fail(*_: object) -> None:
        n_calls[0] += 1
        raise OSError("no compiler")

    monkeypatch.setattr(recompute_chain, "run_chain", fail)
    monkeypatch.setattr(recompute_chain, "_failed", set())
    del runs[:]
    verdict = lowtide.verify(model, step_of(model), x, plan)
    assert verdict.identical
    assert verdict.within_budget
    assert runs == []
    assert n_calls == [len(recompute_chain._failed)]


def test_without_triton_nothing_is_chained() -> None:
    profile = rehearsed(network(), batch())
    assert not chained(profile) or recompute_chain.has_triton()
