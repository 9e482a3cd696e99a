"""Under a plan that keeps all, the modules inside the model are called without interceptors, which come back."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lowtide._torch.modules import CALL
from lowtide.runtime.call_interceptor import CallInterceptor, OuterInterceptor, pass_on
from lowtide.runtime.engine import Engine, actions_for

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
    engine = KeepsAllOfTwo(model.train(), {}, actions_for({}, ["part#0"]))
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
