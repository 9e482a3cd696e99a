"""Modules are called without the interceptors that a run does not need, and these come back."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lowtide._torch.modules import CALL
from lowtide.planner.address_nodes import NOTED
from lowtide.runtime.call_interceptor import CallInterceptor, OuterInterceptor, pass_on
from lowtide.runtime.engine import Engine
from lowtide.runtime.plan_table import parse_actions

X = torch.ones(2, 4)


class KeepsAll(Engine):
    def keeps_all(self, plan: int) -> bool:
        return True


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)
        self.meanwhile: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meanwhile()
        y: torch.Tensor = self.part(x)
        return y


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def engine(model: Model) -> Iterator[KeepsAll]:
    engine = KeepsAll(model.train(), {})
    engine.install()
    yield engine
    engine.remove()
    assert CALL not in vars(model)


def in_front(module: nn.Module) -> object:
    return vars(module).get(CALL)


def test_they_are_out_while_the_model_runs_and_back_afterwards(model: Model, engine: KeepsAll) -> None:
    seen: list[object] = []
    model.meanwhile = lambda: seen.append((in_front(model.part), [*engine.interceptors.displaced()]))
    before = in_front(model.part)
    assert isinstance(before, CallInterceptor)
    model(X).sum().backward()
    assert seen == [(None, [])]
    assert in_front(model.part) is before


def test_they_are_back_after_an_error(model: Model, engine: KeepsAll) -> None:
    def fail() -> None:
        raise ValueError("of the model")

    model.meanwhile = fail
    with pytest.raises(ValueError, match="of the model"):
        model(X)
    assert isinstance(in_front(model.part), CallInterceptor)


def test_a_model_called_inside_itself(model: Model, engine: KeepsAll) -> None:
    def again() -> None:
        model.meanwhile = lambda: None
        model(X)
        assert in_front(model.part) is None

    model.meanwhile = again
    model(X)
    assert isinstance(in_front(model.part), CallInterceptor)


def test_a_plan_that_is_removed_meanwhile_stays_out(model: Model, engine: KeepsAll) -> None:
    model.meanwhile = engine.remove
    model(X)
    assert in_front(model.part) is None


class KeepsAllOfTwo(Engine):
    """Two plans, the second one for batches other than X."""

    def choose(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        return int(len(args[0]) != len(X))

    def keeps_all(self, plan: int) -> bool:
        return plan == 0


def test_a_plan_that_runs_in_another_thread_meanwhile_finds_them() -> None:
    model = Model()
    engine = KeepsAllOfTwo(model.train(), {}, parse_actions({}, ["part#0"]))
    engine.install()
    own, seen = in_front(model.part), list[object]()

    def run_planned() -> None:
        seen.clear()
        model.meanwhile = lambda: seen.append(in_front(model.part))
        thread = threading.Thread(target=lambda: model(torch.ones(3, 4)))
        thread.start()
        thread.join()

    model.meanwhile = run_planned
    model(X)
    assert seen == [own]
    assert in_front(model.part) is own

    def run_keeping() -> None:
        seen.clear()
        model.meanwhile = lambda: seen.append(in_front(model.part))
        thread = threading.Thread(target=lambda: model(X))
        thread.start()
        thread.join()

    model.meanwhile = run_keeping
    model(torch.ones(3, 4))
    assert seen == [own]
    model.meanwhile = lambda: seen.append(in_front(model.part))
    model(X)
    assert seen == [own, None]
    engine.remove()


def test_what_is_installed_meanwhile_stays(model: Model, engine: KeepsAll) -> None:
    own = in_front(model.part)
    handlers: list[OuterInterceptor] = []
    model.meanwhile = lambda: handlers.append(OuterInterceptor(model.part, pass_on))
    model(X)
    (handler,) = handlers
    assert in_front(model.part) is handler
    assert handler.before is own
    model.meanwhile = lambda: None
    assert torch.equal(model(X), nn.functional.linear(X, model.part.weight, model.part.bias))
    assert in_front(model.part) is handler
    handler.remove()
    assert in_front(model.part) is own


def test_compiled_code_stays_in_its_place(model: Model) -> None:
    model.part.compile(backend="eager")
    compiled = in_front(model.part)
    engine = KeepsAll(model.train(), {})
    engine.install()
    seen: list[object] = []
    model.meanwhile = lambda: seen.append(in_front(model.part))
    model(X)
    assert isinstance(seen[0], CallInterceptor)
    engine.remove()
    assert in_front(model.part) is compiled


class Block(nn.Module):
    """A module that recomputes the result of its first operator, and calls its part or other modules."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Tanh()
        self.further: list[nn.Module] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.further:
            x = module(x)
        return self.part(x.sin().exp().cos())


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(4, 4), nn.Sequential(Block(), Block()), nn.Sigmoid()
        self.meanwhile: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(self.blocks(self.first(x)))
        self.meanwhile()
        return y


RECOMPUTED = {"blocks.0#0:1": "ExpBackward0"}


@pytest.fixture
def stack() -> Iterator[tuple[Stack, Engine]]:
    model = Stack()
    engine = Engine(model.train(), parse_actions(RECOMPUTED, []))
    engine.install()
    yield model, engine
    engine.remove()
    assert not any(CALL in vars(module) for module in model.modules())


def gradients(model: Stack, x: torch.Tensor = X) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def names_out(model: Stack) -> list[list[str]]:
    """Return a list that grows by the names of the modules without interceptors, in each forward of the model."""
    seen: list[list[str]] = []
    model.meanwhile = lambda: seen.append([name for name, module in model.named_modules() if not in_front(module)])
    return seen


UNNEEDED = ["first", "blocks", "blocks.1", "blocks.1.part", "last"]


def test_those_of_modules_without_needed_tensors_are_out_after_the_first_run(stack: tuple[Stack, Engine]) -> None:
    model, engine = stack
    seen = names_out(model)
    steps = [gradients(model) for _ in range(3)]
    assert seen == [[], UNNEEDED, UNNEEDED]  # `blocks.0.part` would save its tensor as one of `blocks.0`
    assert all(in_front(module) for module in model.modules())
    assert not engine.packer.drifted
    engine.remove()
    plain = gradients(model)
    for step in steps:
        assert all(map(torch.equal, step, plain))


def test_they_stay_after_a_module_without_one_was_called_beside_decided_tensors(stack: tuple[Stack, Engine]) -> None:
    model, engine = stack
    seen = names_out(model)
    gradients(model)
    gradients(model)
    block = model.blocks[0]
    assert isinstance(block, Block)
    block.further.append(model.last)
    later = [gradients(model) for _ in range(3)]
    assert seen[1:] == [UNNEEDED, UNNEEDED, [], []]
    engine.remove()
    assert all(all(map(torch.equal, step, gradients(model))) for step in later)


def test_they_are_back_in_a_call_that_no_run_has_learnt(stack: tuple[Stack, Engine]) -> None:
    model, _ = stack
    gradients(model)
    fronts: list[object] = []
    model.blocks[0].register_forward_hook(lambda *_: fronts.append(in_front(model.last)))
    gradients(model)
    block = model.blocks[0]
    model.blocks.append(block)  # a second call
    gradients(model)
    assert [isinstance(front, CallInterceptor) for front in fronts] == [False, False, True]


def test_calls_of_captured_operands_and_replays_keep_those_of_all_their_modules() -> None:
    for recompute, replay in (({"blocks#0:7": f"AddBackward0{NOTED}"}, []), ({}, ["blocks#0"])):
        model = Stack()
        engine = Engine(model.train(), parse_actions(recompute, replay))
        engine.install()
        seen = names_out(model)
        gradients(model)
        gradients(model)
        assert seen == [[], ["first", "last"]]
        engine.remove()


def test_a_run_in_another_thread_at_the_same_time_finds_them(stack: tuple[Stack, Engine]) -> None:
    model, _ = stack
    gradients(model)
    seen: list[object] = []

    def run_again() -> None:
        model.meanwhile = lambda: seen.append(in_front(model.last))
        thread = threading.Thread(target=lambda: model(X))
        thread.start()
        thread.join()

    model.meanwhile = run_again
    gradients(model)
    (front,) = seen
    assert isinstance(front, CallInterceptor)
    assert in_front(model.last) is front
