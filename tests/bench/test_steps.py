"""The benchmark's measurements: FLOPs counted by hand, torchtitan's counting, and a peer with known numbers."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from contest.claims import is_equal
from contest.flops import Flops
from contest.models import BUILDERS, SMALL, contestant
from contest.ours import Ours, Planned
from contest.pieces import Taken, taken, undisturbed
from contest.records import Cell
from contest.step import Steps
from contest.turns import AlternatingModels
from contest.ways import EverySecondMatmul, Way, blocks, first_half, ways
from torch import nn
from torch._functorch import config as functorch_config
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

from comparing import equal


def test_flops_are_those_of_torch_where_it_counts() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    x = torch.randn(2, 3, 8, 8)
    with Flops() as mine:
        model(x).sum().backward()
    with FlopCounterMode(display=False) as theirs:
        model(x).sum().backward()
    assert mine.total == theirs.get_total_flops() > 0


def test_attention_on_cpu_counts() -> None:
    q, k, v = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    with Flops() as counted:
        out = F.scaled_dot_product_attention(q, k, v)
    product = 2 * (2 * 3) * 16 * 16 * 8
    assert counted.total == 2 * product
    with Flops() as counted:
        out.sum().backward()
    assert counted.total == 5 * product  # the scores again, and two products for each of the two


@pytest.mark.parametrize("name", BUILDERS)
def test_flops_that_are_only_counted_are_those_that_are_done(name: str) -> None:
    steps = Steps.of(contestant(name, quick=True))
    with Flops() as done:
        steps.step(steps.batch)
    assert steps.flops() == done.total > 0


SOME = ("checkpoint every block", "selective: every second matmul", "AOT, memory budget 0.3")


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in ways() if way.name in SOME], ids=SOME)
def test_counted_flops_of_a_peer_are_those_it_runs(way: Way) -> None:
    made = contestant("bert", quick=True)
    with functorch_config.patch(dict(way.settings)):
        steps = Steps(made.model, made.batch, way.apply(made.model))
        steps.seconds()  # what compiles, compiles now
        with Flops() as done:
            steps.step(steps.batch)
        assert steps.flops() == done.total > 0


def step_of(*seconds: float, operators: str = "abc") -> Taken:
    return Taken(tuple(operators), np.array(seconds))


class Named:
    """Steps that take as long as they are told, in turn."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = iter(seconds)

    def taken(self) -> Taken:
        return step_of(next(self._seconds))


def test_of_each_piece_the_fastest_counts() -> None:
    assert undisturbed([step_of(1.0, 5.0, 1.0), step_of(2.0, 2.0, 3.0)]) == 1.0 + 2.0 + 1.0


def test_steps_of_other_operators_do_not_count() -> None:
    alike = [step_of(1.0, 5.0), step_of(2.0, 2.0)]
    assert undisturbed([step_of(0.1, 0.1, operators="abd"), *alike]) == 3.0


def test_the_pieces_of_a_step_are_all_of_it() -> None:
    model = nn.Linear(8, 8)
    began = time.perf_counter()
    found = taken(lambda: (model(torch.ones(4, 8)).sum().backward(), time.sleep(0.05)))
    assert 0.05 <= found.seconds.sum() <= time.perf_counter() - began
    assert len(found.seconds) == len(found.operators) > 10
    assert "aten::addmm" in found.operators


def test_each_is_timed_beside_the_plain_steps_of_the_same_rounds() -> None:
    turns = AlternatingModels(Named(1.0, 3.0, 0.5))
    turns.enter("mine", Named(1.5, 1.3, 1.4))
    turns.enter("mine", Named())  # is known
    assert turns.timed("mine") is None
    turns.take(2)
    found = turns.timed("mine")
    assert found is not None
    assert (found.seconds, found.plain_seconds, found.turns) == (1.3, 1.0, 2)


def test_a_way_with_fewer_turns_is_not_compared_with_later_plain_steps() -> None:
    turns = AlternatingModels(Named(1.0, 0.5))
    turns.enter("seldom", Named(2.0))
    turns.enter("often", Named(3.0, 2.9))
    turns.take(1)
    turns.take_until_settled(["often", "often"], 2)
    seldom, often = turns.timed("seldom"), turns.timed("often")
    assert seldom is not None
    assert often is not None
    assert (seldom.seconds, seldom.plain_seconds, seldom.turns) == (2.0, 1.0, 1)
    assert (often.seconds, often.plain_seconds, often.turns) == (2.9, 0.5, 2)


def test_there_are_more_turns_until_the_ratios_stay() -> None:
    def turns_of(*seconds: float) -> int:
        turns = AlternatingModels(Named(*[1.0] * 5))
        turns.enter("mine", Named(*seconds))
        turns.take(1)
        turns.take_until_settled(["mine"], 5)
        found = turns.timed("mine")
        assert found is not None
        return found.turns

    assert [turns_of(9.0, 1.4, 1.2, 1.199, 1.0), turns_of(9.0, 1.4, 1.2, 1.1, 1.0)] == [4, 5]


def test_every_second_round_goes_backwards() -> None:
    order: list[str] = []

    class Noting(Named):
        def __init__(self, name: str) -> None:
            super().__init__(1.0, 1.0)
            self.name = name

        def taken(self) -> Taken:
            order.append(self.name)
            return super().taken()

    turns = AlternatingModels(Noting("plain"))
    for name in "ab":
        turns.enter(name, Noting(name))
    turns.take(2)
    assert order == ["plain", "a", "b", "b", "a", "plain"]


def test_a_step_is_timed_under_its_plan_which_is_not_in_force_afterwards() -> None:
    steps = Steps.of(contestant("vit", quick=True), has_plan=True)
    ours = Ours(steps, Steps.of(contestant("vit", quick=True)).bits())
    cell, plan = ours.within(Cell(kind="smallest", name="the smallest", budget_bytes=ours.smallest_peak_bytes()))
    assert plan is not None
    assert is_equal(cell)
    planned = Planned(steps, plan).taken()
    plain = steps.taken()
    assert len(planned.operators) > len(plain.operators)
    assert plain.operators == Steps.of(contestant("vit", quick=True)).taken().operators


def test_of_the_matmuls_every_second_is_saved_and_attention_always() -> None:
    policy = EverySecondMatmul()
    aten = torch.ops.aten
    forward, replay = SimpleNamespace(is_recompute=False), SimpleNamespace(is_recompute=True)
    save, redo = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    ops = [aten.mm.default, aten.add.Tensor, aten.addmm.default, aten.bmm.default, aten.mm.default, aten.mm.default]
    assert [policy(forward, op) for op in ops] == [redo, redo, save, redo, redo, save]
    assert [policy(replay, op) for op in ops] == [redo, redo, save, redo, redo, save]
    assert policy(forward, aten._scaled_dot_product_flash_attention_for_cpu.default) == save


def test_every_peer_has_a_name_of_its_own() -> None:
    names = [way.name for way in ways()]
    assert len(set(names)) == len(names) == 11


def test_checkpointing_gives_the_plain_bits_for_a_known_number_of_flops() -> None:
    made, other = contestant("gpt2", quick=True), contestant("gpt2", quick=True)
    plain = Steps.of(made)
    bits = plain.bits()
    of_plain = plain.measure(bits)
    assert of_plain.equal_loss
    assert of_plain.equal_gradients
    assert of_plain.equal_buffers
    halved = Steps(other.model, other.batch, first_half(other.model))
    found = halved.measure(bits)
    assert found.equal_loss
    assert found.equal_gradients
    assert found.equal_buffers
    assert len(blocks(made.model)) == SMALL.layers == 3
    # One block of three runs again, up to its last product: 2 FLOPs for each weight and token, and attention.
    tokens, width = SMALL.rows * SMALL.length, 384
    products = 2 * tokens * (3 + 1 + 4) * width**2
    attention = 2 * 2 * SMALL.rows * SMALL.length**2 * width
    assert found.flops - of_plain.flops == products + attention


def test_a_step_that_is_measured_leaves_no_gradients_and_the_first_buffers_can_be_had_again() -> None:
    made = contestant("resnet", quick=True)
    steps = Steps.of(made)
    first = {name: buffer.clone() for name, buffer in made.model.named_buffers()}
    bits = steps.bits()
    assert not equal(first, bits.buffers)
    assert all(parameter.grad is None for parameter in made.model.parameters())
    steps.reset()
    assert equal(first, dict(made.model.named_buffers()))


def test_each_model_is_built_the_same_twice() -> None:
    for name in BUILDERS:
        one, two = contestant(name, quick=True), contestant(name, quick=True)
        assert equal(one.model.parameters(), two.model.parameters())
        assert equal(one.batch, two.batch)
