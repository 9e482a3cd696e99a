"""From the third step on a replayed call is compared with an earlier one, and each difference is still noticed."""

import datetime
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lowtide.errors import ReplayMismatch
from lowtide.runtime.call_context import MOST_KNOWN
from lowtide.runtime.engine import Engine
from lowtide.runtime.known_modules import KnownModules, bindings, rebind
from lowtide.runtime.module_attributes import Attributes
from lowtide.runtime.plan_table import parse_actions
from lowtide.runtime.tensor_writers import Overwritten
from runtime.plans import differences, outcome

X = torch.linspace(-1, 1, 12).view(3, 4)


class Part(nn.Module):
    """A replayed module with attributes of every kind; `function(part, x)` is what it computes."""

    def __init__(self, function: Callable[["Part", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.scale, self.sizes = 2.0, [1, 2]
        self.when: Any = datetime.date(2026, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        result: torch.Tensor = torch.tanh(self.function(self, y) * y.sin()) * y
        return result


class Model(nn.Module):
    def __init__(self, function: Callable[[Part, torch.Tensor], torch.Tensor] = lambda part, y: y) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.part = Part(function)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.part(x)
        return result.sum()


def known(engine: Engine) -> KnownModules | None:
    """Return what the calls of the part are compared with."""
    (interceptor,) = (interceptor for interceptor in engine.interceptors.all if interceptor.path == "part")
    return None if interceptor.mutable_state.known is None else interceptor.mutable_state.known.modules


ENGINES: list[Engine] = []


@pytest.fixture(autouse=True)
def leave() -> Iterator[None]:
    """Take off every engine after the test."""
    yield
    while ENGINES:
        ENGINES.pop().remove()


def in_force(model: Model, steps: int = 3) -> Engine:
    """Put an engine that replays the part in force, and take `steps` steps."""
    ENGINES.append(engine := Engine(model.train(), parse_actions({}, ["part#0"])))
    engine.install()
    for _ in range(steps):
        model(X).backward()
    return engine


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each comparison of modules, True if nothing had changed."""
    found: list[bool] = []
    current = KnownModules.current

    def counted(self: KnownModules) -> list[Any] | None:
        values = current(self)
        found.append(values is not None)
        return values

    monkeypatch.setattr(KnownModules, "current", counted)
    return found


def test_a_step_like_those_before_captures_no_attribute_again(count: list[bool]) -> None:
    plain, model = Model(), Model()
    for _ in range(3):
        plain(X).backward()
    in_force(model)
    count.clear()
    assert differences(outcome(plain, lambda: _whole(plain)), outcome(model, lambda: _whole(model))) == []
    assert count == [True, True]  # when the call begins, and when it is run again


def _whole(model: Model, between: Callable[[Model], object] = lambda model: None) -> torch.Tensor:
    loss: torch.Tensor = model(X)
    between(model)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def rename(model: Model) -> None:
    """Give an attribute another name, at its place among the others."""
    named = [("factor" if name == "scale" else name, content) for name, content in vars(model.part).items()]
    vars(model.part).clear()
    vars(model.part).update(named)


def reuse_address(model: Model) -> None:
    """Bind a number where an object was freed, at its address."""
    address = id(model.part.when)
    model.part.when = None
    numbers = [*range(2**40, 2**40 + 10**5)]
    model.part.when = next(number for number in numbers if id(number) == address)


BETWEEN: dict[str, tuple[Callable[[Part, torch.Tensor], torch.Tensor], Callable[[Model], object]]] = {
    "number": (lambda part, y: y * part.scale, lambda model: setattr(model.part, "scale", 3.0)),
    "contents of a list": (lambda part, y: y * part.sizes[0], lambda model: model.part.sizes.insert(0, 5)),
    "name": (lambda part, y: y * getattr(part, "scale", 7.0), rename),
    "flag": (lambda part, y: y * (2 if part.training else 3), lambda model: model.eval()),
    "parameter": (
        lambda part, y: y,
        lambda model: setattr(model.part.linear, "weight", nn.Parameter(torch.ones(4, 4))),
    ),
    "module": (lambda part, y: y, lambda model: setattr(model.part.linear, "bias", None)),
    "observing hook": (
        lambda part, y: y,
        lambda model: model.part.linear.register_forward_hook(lambda module, args, result: result * 2),
    ),
    "global hook": (
        lambda part, y: y,
        lambda model: HANDLES.append(
            nn.modules.module.register_module_forward_hook(lambda module, args, result: result * 2)
        ),
    ),
}
HANDLES: list[Any] = []


@pytest.mark.parametrize("what", BETWEEN)
def test_a_change_between_forward_and_backward_is_not_seen_by_the_replay(what: str) -> None:
    function, change = BETWEEN[what]
    plain, model = Model(function), Model(function)
    for _ in range(3):
        plain(X).backward()
    engine = in_force(model)
    assert known(engine) is not None
    results = []
    for each in (plain, model):
        each.zero_grad()
        parameters = [*each.parameters()]
        loss = _whole(each, change)
        results.append([loss, *(p.grad for p in parameters if p.grad is not None)])
        while HANDLES:
            HANDLES.pop().remove()
    assert len(results[0]) == len(results[1]) > 2
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("filled", [lambda y: y.mean(0), lambda y: y.mean(0).numpy(), lambda y: 1.0, lambda y: True])
def test_a_call_fills_a_dict_that_each_step_resets(filled: Callable[[torch.Tensor], Any]) -> None:
    """Tensors and arrays have no single truth value, and 1 equals True."""

    def function(part: Part, y: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(4, dtype=torch.int64) * part.when["load"]
        part.when["load"] = filled(y.detach())
        return y * (2 if scale.is_floating_point() else 3)

    def step(model: Model) -> torch.Tensor:
        model.part.when["load"] = 1
        return _whole(model)

    plain, model = Model(function), Model(function)
    plain.part.when, model.part.when = {"load": 1}, {"load": 1}
    for _ in range(3):
        step(plain)
    in_force(model, 0)
    for _ in range(3):
        step(model)
    assert differences(outcome(plain, lambda: step(plain)), outcome(model, lambda: step(model))) == []


def _subclass(model: Model) -> None:
    model.part.linear.__class__ = type("Other", (nn.Linear,), {"forward": lambda self, x: x * self.bias})


BEFORE: dict[str, tuple[Callable[[Part, torch.Tensor], torch.Tensor], Callable[[Model], object], str]] = {
    "class": (lambda part, y: y, _subclass, "is a Other"),
    "hook": (lambda part, y: y, lambda model: model.part.linear.register_forward_hook(print), "has the hook"),
    "module": (lambda part, y: y, lambda model: setattr(model.part, "linear", nn.Linear(4, 4)), "another module"),
    "forward": (
        lambda part, y: y,
        lambda model: setattr(model.part, "forward", model.part.linear.forward),
        "another forward",
    ),
}


@pytest.mark.parametrize("what", BEFORE)
def test_a_change_between_steps_ends_replays_and_is_said(what: str) -> None:
    function, change, words = BEFORE[what]
    model = Model(function)
    engine = in_force(model)
    assert known(engine) is not None
    said: list[str] = []
    engine.messages.tell = said.append
    change(model)
    model(X).backward()
    assert len(said) == 1
    assert words in said[0]


def test_a_number_at_the_address_of_a_freed_object_is_captured() -> None:
    """By its id alone it would count as the object."""
    model = Model()
    engine = in_force(model)
    reuse_address(model)
    assert (compared := known(engine)) is not None
    assert compared.current() is None


def test_bindings_are_restored_with_no_name_more() -> None:
    module = nn.Linear(2, 2)
    before, bound = dict(vars(module)), bindings([module, torch.jit.script(nn.Linear(2, 2))])
    module.extra, module.training = 1, False
    rebind(bound)
    assert vars(module) == before
    assert all(isinstance(table, dict) and table for table, _ in bound)


def test_what_the_replay_binds_is_undone() -> None:
    def function(part: Part, y: torch.Tensor) -> torch.Tensor:
        part.when = None
        return y

    model = Model(function)
    engine = in_force(model, 0)
    day = datetime.date(2026, 2, 3)
    for _ in range(4):
        model.part.when = day
        loss = model(X)
        assert model.part.when is None
        model.part.when = day
        loss.backward()
        assert model.part.when is day
    assert known(engine) is not None


def test_batch_norm_counts_once_in_each_step() -> None:
    model, plain = Model(lambda part, y: part.norm(y)), Model(lambda part, y: part.norm(y))
    engine = in_force(model, 5)
    for _ in range(5):
        plain.train()(X).backward()
    assert known(engine) is not None
    for (name, buffer), (_, other) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(buffer, other), name


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: float(torch.rand(()))])
def test_numbers_that_only_a_later_call_draws(draw: Callable[[], float]) -> None:
    """Calls that draw nothing restore no generator."""
    draws = [False]

    def function(part: Part, y: torch.Tensor) -> torch.Tensor:
        return y * draw() if draws[0] else y

    plain, model = Model(function), Model(function)
    for _ in range(3):
        plain(X).backward()
    in_force(model)
    draws[0] = True

    def step(model: Model) -> Callable[[], torch.Tensor]:
        return lambda: _whole(model, lambda model: draw())

    results = []
    for each in (plain, model):
        np.random.seed(5)
        results.append(outcome(each, step(each)) | {"numpy": np.random.rand()})
    assert differences(*results) == []


def _in_fork() -> float:
    with torch.random.fork_rng(devices=[]):
        return float(torch.rand(()))


def _other_state() -> float:
    torch.manual_seed(3)
    return float(torch.rand(()))


@pytest.mark.parametrize("between", [lambda: None, lambda: float(torch.randn(())), lambda: float(torch.rand(3).sum())])
@pytest.mark.parametrize(
    "draw",
    [
        lambda: 1.0,
        lambda: float(torch.randn(())),  # the generator draws two, and keeps the second one for the next call
        lambda: float(torch.randn((), dtype=torch.float64)),
        _in_fork,  # leaves the generator as it was
        _other_state,
    ],
)
def test_a_replay_draws_the_same_numbers_of_torch_and_leaves_no_trace(
    draw: Callable[[], float], between: Callable[[], float]
) -> None:
    def function(part: Part, y: torch.Tensor) -> torch.Tensor:
        return y * draw()

    plain, model = Model(function), Model(function)
    for _ in range(3):
        plain(X).backward()
    in_force(model)
    results = []
    for each in (plain, model):
        step = partial(_whole, each, lambda model: between())
        results.append(outcome(each, step) | {"next": torch.randn(()), "after": torch.get_rng_state()})
    assert differences(*results) == []


def test_a_parameter_that_is_written_to_unseen_is_refused() -> None:
    model = Model()
    in_force(model)
    loss = model(X)
    with torch.no_grad():
        torch.add(model.part.linear.weight, 1, out=model.part.linear.weight)
    with pytest.raises(Overwritten):
        loss.backward()


def test_a_module_that_always_changes_is_captured_in_each_call() -> None:
    def function(part: Part, y: torch.Tensor) -> torch.Tensor:
        part.scale += 1
        return y * part.scale

    plain, model = Model(function), Model(function)
    n_steps = 2 * MOST_KNOWN
    for _ in range(n_steps):
        plain(X).backward()
    engine = in_force(model, n_steps)
    (interceptor,) = (interceptor for interceptor in engine.interceptors.all if interceptor.path == "part")
    assert interceptor.mutable_state.n_known == MOST_KNOWN
    assert model.part.scale == plain.part.scale
    assert differences(outcome(plain, lambda: _whole(plain)), outcome(model, lambda: _whole(model))) == []


class Result:
    """An object of the user that holds a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_an_object_that_a_module_had_is_not_held() -> None:
    def function(part: Part, y: torch.Tensor) -> torch.Tensor:
        part.when = Result(y.detach())
        return y

    model = Model(function)
    in_force(model)
    reference = weakref.ref(model.part.when)
    model.part.when = None
    gc.collect()
    assert reference() is None


def test_a_parameter_that_a_module_had_is_not_held() -> None:
    model = Model()
    engine = in_force(model)
    assert known(engine) is not None
    for _ in range(MOST_KNOWN + 1):
        reference = weakref.ref(model.part.linear.weight)
        model.part.linear.weight = nn.Parameter(torch.ones(4, 4))
        model(X).backward()
        assert reference() is None


def test_a_tensor_among_the_attributes_is_compared_by_its_version() -> None:
    model = Model(lambda part, y: y * part.when)
    model.part.when = torch.ones(4)
    in_force(model)
    loss = model(X)
    torch.add(model.part.when, 1, out=model.part.when)
    with pytest.raises(Overwritten):
        loss.backward()


def test_a_large_buffer_that_a_later_call_writes_to_is_copied_from_the_next_one_on() -> None:
    writes = [False]

    def function(part: Part, y: torch.Tensor) -> torch.Tensor:
        large = part.get_buffer("large")
        result = y * large[:4].clone()
        if writes[0]:
            torch.add(large, 1, out=large)
        return result

    plain, model = Model(function), Model(function)
    for each in (plain, model):
        each.part.register_buffer("large", torch.ones(2**15))
    for _ in range(3):
        plain(X).backward()
    engine = in_force(model)
    assert known(engine) is not None
    writes[0] = True
    plain(X)
    with pytest.raises(ReplayMismatch):
        model(X)
    assert differences(outcome(plain, lambda: _whole(plain)), outcome(model, lambda: _whole(model))) == []


def test_weights_with_a_history_are_not_held() -> None:
    model = Model()
    in_force(model, 0)
    for _ in range(3):
        weight = model.part.linear.weight * 2
        torch.func.functional_call(model, {"part.linear.weight": weight}, (X,)).backward()
    reference = weakref.ref(weight)
    del weight
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize(
    ("value", "is_taken"),
    [([0] * 100, True), ([[0] * 12], True), ([[0] * 13], False), ([object()], False), ({object(): 0}, False)],
)
def test_containers_of_plain_data_are_captured_if_they_are_short(value: Any, is_taken: bool) -> None:
    module = nn.Identity()
    module.value = value
    assert (value in Attributes([module]).mutable) == is_taken
