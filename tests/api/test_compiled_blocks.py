"""Blocks that inductor compiles one by one: a plan decides what their shared code saves, to the same bits."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor_config

import lowtide
from lowtide._torch.inductor import kernels_left_out
from lowtide.script.run_verdict import COMPARED

pytestmark = pytest.mark.usefixtures("inductor")


@pytest.fixture(autouse=True)
def empty_compile_caches() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert inductor_config.custom_partitioner_fn is None


class Widens(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Gates(nn.Module):
    """A block of another graph, whose modules have the names of those of `Widens`."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.up(x)) * self.up(x))
        return x + y


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module, in_place: bool = True) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(32, 64), nn.ModuleList(blocks), nn.Linear(64, 32)
        for index, block in enumerate(blocks):
            if in_place:
                block.compile()
            else:
                self.blocks[index] = torch.compile(block)  # type: ignore[assignment]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), ids)


def built(*kinds: type[nn.Module], in_place: bool = True) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Stack(*(kind() for kind in kinds), in_place=in_place), torch.randint(32, (2048,))


def step_of(model: Any) -> Any:
    def step(ids: Tensor) -> Tensor:
        loss: Tensor = model(ids)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return step


def test_one_decision_for_equal_blocks_counts_once_for_each_call() -> None:
    model, ids = built(Widens, Widens, Widens)
    with kernels_left_out():
        profile = lowtide.rehearse(model, step_of(model), ids)
        assert len(profile.graphs) == 1
        assert set(Counter(slot.address for slot in profile.slots).values()) == {3}
        plan = lowtide.plan(profile, "75%")
        assert plan.recompute
        assert not plan.replay
        with lowtide.apply(model, plan) as applied:
            step_of(model)(ids)
            model.zero_grad()
            with lowtide.measure(model) as memory:
                step_of(model)(ids)
            assert not applied.drifted
    assert memory.peak_bytes <= plan.budget_bytes - profile.static.total
    assert plan.plain.peak_bytes - plan.budget_bytes > 2048 * 256 * 4  # less than one of three blocks would not do


@pytest.mark.slow
def test_blocks_of_other_graphs_have_decisions_of_their_own() -> None:
    model, ids = built(Widens, Gates, Widens)
    with kernels_left_out():
        profile = lowtide.rehearse(model, step_of(model), ids)
        assert len(profile.graphs) == 2
        uses = Counter(slot.address for slot in profile.slots)
        of_graph = [{n for address, n in uses.items() if address.startswith(f"{key}/")} for key in profile.graphs]
        assert of_graph == [{2}, {1}]  # in the order of their first calls
        plan = lowtide.plan(profile, "75%")
        assert lowtide.Plan.from_json(plan.to_json()) == plan
        with lowtide.apply(model, plan) as applied:
            step_of(model)(ids)
            assert not applied.drifted


@pytest.mark.slow
def test_a_planned_step_of_wrapped_blocks_has_the_bits_of_the_compiled_step() -> None:
    model, ids = built(Widens, Widens, in_place=False)
    with lowtide.fit(model, step_of(model), ids, budget="85%") as fitted:
        assert fitted.plan.graphs
        assert fitted.plan.recompute
        assert fitted.verdict.proven
        assert {"loss", "gradients", "random numbers"} <= {*(fitted.verdict.differences or {})}
        assert fitted.verdict.within_budget


@pytest.mark.slow
def test_blocks_are_replayed_whole_where_no_plan_inside_them_fits() -> None:
    model, ids = built(*[Widens] * 10)
    with kernels_left_out(), lowtide.fit(model, step_of(model), ids, budget="21%") as fitted:
        assert fitted.plan.replay
        assert not fitted.plan.graphs
        assert fitted.verdict.within_budget
        assert any("compiled blocks are replayed as a whole" in note for note in fitted.plan.notes)


@pytest.mark.slow
def test_a_loop_over_compiled_blocks_is_planned_inside_them() -> None:
    model, losses = trained()
    torch._dynamo.reset()
    with lowtide.within("85%") as run:
        planned, planned_losses = trained()
    assert planned_losses == losses
    assert all(map(torch.equal, planned.parameters(), model.parameters()))
    assert run.plan is not None
    assert run.plan.graphs
    assert run.plan.recompute
    assert run.verdict is not None
    assert run.verdict.within_budget
    assert run.verdict.proof == COMPARED


def trained() -> tuple[nn.Module, list[float]]:
    model, ids = built(Widens, Widens)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), list[float]()
    for _ in range(6):
        losses.append(step_of(model)(ids).item())
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


@pytest.mark.slow
def test_a_loop_replays_compiled_blocks_whole_where_no_plan_inside_them_fits() -> None:
    with kernels_left_out(), lowtide.within("21%") as run:
        model, ids = built(*[Widens] * 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            step_of(model)(ids)
            optimizer.step()
            optimizer.zero_grad()
    assert run.plan is not None
    assert run.plan.replay
    assert not run.plan.graphs
    assert run.verdict is not None
    assert run.verdict.within_budget
