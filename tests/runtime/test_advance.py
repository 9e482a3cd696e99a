"""Results of calls that are not kept: made by running the call forward again, once, with the same bits."""

from collections.abc import Iterable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.runtime.advance import Advance
from lowtide.runtime.engine import Engine
from lowtide.runtime.plan_table import parse_actions
from lowtide.runtime.saved_values import Value
from parts import Language
from runtime.plans import (
    Ops,
    check_nothing_outlives_a_step,
    check_two_backward_passes,
    count,
    differences,
    installed,
    outcome,
)

IDS = torch.arange(20).view(2, 10)
BLOCKS = [f"blocks.{n}#0" for n in range(6)]


def in_force(model: nn.Module, replay: Iterable[str], advance: Iterable[str]) -> AbstractContextManager[Engine]:
    return installed(Engine(model, parse_actions({}, replay, advance)))


def results_of(blocks: Iterable[nn.Module]) -> list[StorageWeakRef]:
    """Grows with the memory of what each block returns."""
    found: list[StorageWeakRef] = []
    for block in blocks:
        block.register_forward_hook(lambda _, args, result: found.append(StorageWeakRef(result.untyped_storage())))
    return found


@pytest.mark.parametrize(
    ("replay", "advance"),
    [
        (BLOCKS, BLOCKS[:-1]),
        (BLOCKS, [BLOCKS[0], BLOCKS[1], BLOCKS[3], BLOCKS[4]]),
        ([], BLOCKS),
        (BLOCKS[2:4], BLOCKS[1:3]),
        ([*BLOCKS, *(f"blocks.{n}.mlp#0" for n in range(6))], BLOCKS),
    ],
)
def test_gradients_and_random_numbers_are_those_of_the_plain_step(replay, advance):
    model = Language(layers=6)  # with dropout in each block

    def step():
        loss = model(IDS).square().mean()
        loss.backward()
        return loss

    plain = outcome(model, step)
    with in_force(model, replay, advance):
        assert differences(plain, outcome(model, step)) == []
        assert differences(plain, outcome(model, step)) == []


def test_only_what_is_kept_is_held_and_no_block_advances_twice():
    model = Language(layers=6)
    results = results_of(model.blocks)
    with in_force(model, BLOCKS, [BLOCKS[0], BLOCKS[1], BLOCKS[3], BLOCKS[4]]):
        loss = model(IDS).sum()
        assert [not ref.expired() for ref in results] == [False, False, True, False, False, True]
        with Ops() as ops:
            loss.backward()
    # To x4 and x5 from x3, to x1 and x2 from x0: four layers each; and a replay of each block, which stops behind
    # its last one, at the mask of the dropout.
    linear = ops.count["addmm"] + ops.count["linear"]
    assert linear == 4 * 4 + 6 * 4


def test_a_result_that_the_call_itself_saved_is_advanced_to_as_well():
    """A block that ends in a ReLU saves its result. Where the block is replayed, that is left to the advance."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))
    x = torch.randn(3, 8)
    results = results_of(model)
    calls = [f"{n}#0" for n in range(4)]

    def step():
        model(x).sum().backward()

    plain = outcome(model, step)
    results.clear()
    with in_force(model, calls, calls[:3]):
        loss = model(x).sum()
        assert [not ref.expired() for ref in results] == [False, False, False, False]
        del loss
        assert differences(plain, outcome(model, step)) == []
    results.clear()
    with in_force(model, [], calls[:3]):  # kept by the blocks themselves
        loss = model(x).sum()
        assert [not ref.expired() for ref in results] == [True] * 4
        del loss


def test_a_call_that_saved_the_base_of_its_result_gets_that_back():
    class Transposed(nn.Sequential):
        def forward(self, x):
            return super().forward(x).transpose(0, 1)

    model = nn.Sequential(Transposed(nn.Linear(8, 8), nn.ReLU()), nn.Linear(3, 8), nn.Tanh())
    x = torch.randn(3, 8)

    def step():
        model(x).square().sum().backward()

    plain = outcome(model, step)
    with in_force(model, ["0#0"], ["0#0"]):
        assert differences(plain, outcome(model, step)) == []


def test_arguments_of_an_advanced_call_are_recomputed():
    """Arguments of a block are recomputed too, if the plan says so, although the block is not replayed."""
    model = nn.Sequential(nn.GELU(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8))
    model[1].requires_grad_(False)  # saves nothing of what it is given
    x = torch.randn(3, 8, requires_grad=True)
    results = results_of(model)

    def step():
        model(x).sum().backward()

    plain = outcome(model, step)
    results.clear()
    engine = Engine(model, parse_actions({"1#0@0": "GeluBackward0"}, (), ["1#0"]))
    engine.install()
    try:
        loss = model(x).sum()
        assert [not ref.expired() for ref in results] == [False, False, False]
        del loss
        assert differences(plain, outcome(model, step)) == []
    finally:
        engine.remove()


def test_results_that_are_views_and_results_among_others():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, given):
            x = given["x"] if isinstance(given, dict) else given
            return {"x": self.linear(x.tanh()).transpose(0, 1), "length": torch.tensor(len(x)), "name": "pair"}

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.pairs = nn.ModuleList(Pair() for _ in range(4))

        def forward(self, x):
            for pair in self.pairs:
                x = pair(x)
            return x["x"]

    model, x = Around(), torch.randn(2, 3, 6)
    calls = [f"pairs.{n}#0" for n in range(4)]

    def step():
        model(x).square().sum().backward()

    plain = outcome(model, step)
    with in_force(model, calls, calls):
        loss = model(x).square().sum()
        assert count(Advance) == 3  # nobody saves the last result
        del loss
        assert differences(plain, outcome(model, step)) == []


def test_inside_of_a_replayed_call_nothing_is_advanced():
    model = nn.Sequential(nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))))
    x = torch.randn(3, 8)

    def step():
        model(x).sum().backward()

    plain = outcome(model, step)
    inner = [f"0.{n}#0" for n in range(4)]
    with in_force(model, ["0#0", *inner], inner):
        loss = model(x).sum()
        assert not count(Advance)
        del loss
        assert differences(plain, outcome(model, step)) == []


def test_backward_over_a_retained_graph_and_after_the_plan_was_removed():
    model = Language(layers=6)
    check_two_backward_passes(model, IDS, lambda: in_force(model, BLOCKS, BLOCKS[:-1]))


@pytest.mark.parametrize("end", ["backward", "dropped", "raised"])
def test_nothing_outlives_its_step(end):
    model = Language(layers=6)
    check_nothing_outlives_a_step(model, IDS, in_force(model, BLOCKS, BLOCKS[:-1]), end, Value, Advance)


def test_a_call_that_returns_something_else_the_second_time_is_refused():
    calls = [0]

    class Fickle(nn.Linear):
        def forward(self, x):
            calls[0] += 1
            y = super().forward(x)
            return y if calls[0] == 1 else (y, y + 1)

    model = nn.Sequential(Fickle(4, 4), nn.Linear(4, 4))
    with in_force(model, [], ["0#0"]):
        loss = model(torch.randn(2, 4)).sum()
        with pytest.raises(RuntimeError, match="did not return a single tensor when it was replayed"):
            loss.backward()
