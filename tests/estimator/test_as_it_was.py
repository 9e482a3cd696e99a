"""After a rehearsal everything is as it was: the same objects with the same bits, also when the step raises."""

import functools
import gc
import importlib
import random
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

import lowtide
from comparing import equal
from lowtide.estimator.fake_step_state import FakeStepState
from lowtide.state import reachable_objects as keeping
from models import build, same, state

WHERE: list[dict[str, Any]] = [{}, {"device": "A100-40"}]
"""On the machine at hand, and on a GPU that is not there."""


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("before", ["fresh", "after a step", "with gradients"])
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_it_was(before: str, fails: bool, where: dict[str, Any]) -> None:
    case = build("resnet")
    if before == "after a step":
        case.step(case.batch)
    if before == "with gradients":
        case.model(**case.batch).loss.backward()
    known, gradients = state(case), [p.grad for p in case.model.parameters()]
    buffers, python, numpy = [*case.model.buffers()], random.getstate(), np.random.get_state()
    keys = [*case.batch]
    steps = 0

    def step(batch):
        nonlocal steps
        steps += 1
        random.random()
        np.random.rand()
        torch.manual_seed(5)
        case.model.last = case.model(**batch).logits  # an attribute that was not there
        case.step(batch)
        batch.pop("labels")
        batch["labels"] = torch.arange(8) % 10
        if fails and steps == 2:
            raise KeyError("the second step fails")

    if fails:
        with pytest.raises(KeyError, match="the second step fails"):
            lowtide.estimate(case.model, step, case.batch, **where)
    else:
        lowtide.estimate(case.model, step, case.batch, **where)
    assert steps == 0  # it is the step's, so it is put back as well
    assert same(known, state(case))
    assert all(p.grad is g for p, g in zip(case.model.parameters(), gradients, strict=True))
    assert all(now is then for now, then in zip(case.model.buffers(), buffers, strict=True))
    assert random.getstate() == python
    assert np.array_equal(np.random.get_state()[1], numpy[1])
    assert [*case.batch] == keys
    assert not hasattr(case.model, "last")
    assert not any("_compiled_call_impl" in module.__dict__ for module in case.model.modules())


@pytest.mark.parametrize("where", WHERE)
def test_no_fake_tensor_is_left(where: dict[str, Any]) -> None:
    case = build("gpt2")
    before = {id(fake) for fake in fakes()}  # some other test's
    lowtide.estimate(case.model, case.step, case.batch, **where)
    assert [fake for fake in fakes() if id(fake) not in before] == []


def fakes() -> list[FakeTensor]:
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is FakeTensor]


@pytest.mark.parametrize("where", WHERE)
def test_the_next_real_step_gives_the_same_bits(where: dict[str, Any]) -> None:
    one, other = build("gpt2"), build("gpt2")
    lowtide.estimate(one.model, one.step, one.batch, **where)
    torch.manual_seed(3)
    first = one.step(one.batch)
    torch.manual_seed(3)
    assert torch.equal(first, other.step(other.batch))
    assert equal(one.model.parameters(), other.model.parameters())


@pytest.mark.parametrize("where", WHERE)
def test_a_schedulers_optimizer_is_not_listened_to_any_longer(where: dict[str, Any]) -> None:
    model = torch.nn.Linear(8, 8)

    def step(batch: torch.Tensor) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # leads to torch's table of hooks
        model(batch).sum().backward()
        optimizer.step()
        scheduler.step()

    hooks = list(_global_optimizer_pre_hooks.values())
    lowtide.estimate(model, step, torch.ones(2, 8), **where)
    assert list(_global_optimizer_pre_hooks.values()) == hooks


@pytest.mark.parametrize("device", [None, "L4"])
def test_parameters_whose_data_the_step_exchanges(device) -> None:
    """As clamped weights, a momentum encoder, and steps that go back to old weights do it."""
    torch.manual_seed(0)
    model, slow = nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [tensor.clone() for tensor in (*model.parameters(), *slow.parameters())]

    def step(batch):
        (model(batch) - slow(batch)).square().sum().backward()
        old = [p.data for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        for p, q, was in zip(model.parameters(), slow.parameters(), old, strict=True):
            p.data = p.data.clamp(-1, 1)
            q.data = q.data * 0.9 + p.data * 0.1
            p.data = was

    settings = {} if device is None else {"device": device}
    estimated = lowtide.estimate(model, step, torch.randn(4, 64), **settings)
    assert estimated.static.parameters == 2 * (64 * 64 + 64) * 4
    after = [*model.parameters(), *slow.parameters()]
    assert equal(after, before)
    assert {type(p) for p in after} == {nn.Parameter}
    if device is None:
        measured = lowtide.timeline(model, step, torch.randn(4, 64)).peak_bytes
        assert estimated.timeline.peak_bytes == pytest.approx(measured, rel=0.02)


class Reader:
    """State in slots, one of which has no content yet."""

    __slots__ = ("__dict__", "last", "numbers")

    def __init__(self) -> None:
        self.numbers = [1]


@dataclass(slots=True)
class Meter:
    """As training loops have them."""

    total: float = 0.0
    last: Any = None


@pytest.mark.parametrize("where", WHERE)
def test_objects_with_slots_hold_what_they_held(where: dict[str, Any]) -> None:
    model, reader, meter = torch.nn.Linear(8, 8), Reader(), Meter()

    def step(batch: torch.Tensor) -> None:
        loss = model(batch).sum()
        loss.backward()
        meter.total += 1
        meter.last = reader.last = reader.other = loss
        reader.numbers.append(2)

    lowtide.estimate(model, step, torch.ones(2, 8), **where)
    assert meter == Meter()
    assert reader.numbers == [1]
    assert not hasattr(reader, "last")
    assert not hasattr(reader, "other")


class Drawing(random.Random):
    """With an attribute."""

    def __init__(self) -> None:
        super().__init__(0)
        self.count = 0


@pytest.mark.parametrize("where", WHERE)
def test_generators_of_random_numbers_draw_what_they_would_have_drawn(where: dict[str, Any]) -> None:
    model, drawing = torch.nn.Linear(8, 8), Drawing()
    new, old, own = np.random.default_rng(1), np.random.RandomState(1), torch.Generator().manual_seed(1)
    without_state = random.SystemRandom()

    def draw() -> list[float]:
        drawing.count += 1
        return [drawing.random(), new.random(), old.rand(), *torch.rand(2, generator=own).tolist()]

    def step(batch: torch.Tensor) -> None:
        draw()
        without_state.random()
        own.manual_seed(5)
        model(batch).sum().backward()

    states = drawing.getstate(), new.bit_generator.state, old.get_state()[2], own.get_state()
    lowtide.estimate(model, step, torch.ones(2, 8), **where)
    assert (drawing.getstate(), new.bit_generator.state, old.get_state()[2]) == states[:3]
    assert torch.equal(own.get_state(), states[3])
    assert drawing.count == 0


@pytest.mark.parametrize("where", WHERE)
def test_sets_and_variables_hold_what_they_held(where: dict[str, Any]) -> None:
    model, seen, last = torch.nn.Linear(8, 8), {1}, [0]
    known = 1
    later: int

    def step(batch: torch.Tensor) -> None:
        nonlocal known, later
        known = 3
        seen.clear()
        seen.add(2)
        last[0] += 1
        model(batch).sum().backward()
        later = known
        del known

    lowtide.estimate(model, step, torch.ones(2, 8), **where)
    assert (seen, last, known) == ({1}, [0], 1)
    assert step.__closure__ is not None
    variables = dict(zip(step.__code__.co_freevars, step.__closure__, strict=True))
    with pytest.raises(ValueError, match="empty"):
        _ = variables["later"].cell_contents
    later = 0

    def fails(batch: torch.Tensor) -> None:
        nonlocal known
        model(batch).sum().backward()
        last[0] += 1
        del known

    with pytest.raises(NameError):
        lowtide.estimate(model, fails, torch.ones(2, 8), **where)
    assert (last, known, later) == ([0], 1, 0)


@pytest.mark.parametrize("where", WHERE)
def test_arrays_have_the_contents_that_they_had(where: dict[str, Any]) -> None:
    model = torch.nn.Linear(8, 8)
    mean, objects, constant = np.full(8, np.nan), np.array([None, {}], dtype=object), np.broadcast_to(np.ones(1), 8)
    part = np.zeros((8, 8))[::2, 1:]

    def step(batch: torch.Tensor) -> None:
        mean[:] = batch.numpy().mean(0)
        part[0] += constant[1:]
        objects[0] = model(batch).sum()
        objects[1]["loss"] = objects[0]
        objects[0].backward()

    lowtide.estimate(model, step, torch.ones(2, 8), **where)
    assert np.isnan(mean).all()
    assert not part.any()
    assert objects.tolist() == [None, {}]


def test_arrays_are_not_copied_beyond_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "COPIED_BYTES", 100)
    first, second = np.zeros(10), np.zeros(10)
    with FakeStepState([first, second]):
        first[0] = second[0] = 1
    assert (first[0], second[0]) == (0, 1)


MASKS: dict[int, torch.Tensor] = {}


@functools.lru_cache
def causal(length: int) -> torch.Tensor:
    """As models cache their masks."""
    return torch.full((length, length), float("-inf")).triu(1)


@functools.lru_cache
def place(number: int) -> object:
    """As scripts cache what there is to be one of."""
    return object()


class Masked(nn.Module):
    """Refers to both where only its code says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) not in MASKS:
            MASKS[len(x)] = torch.ones(len(x), len(x)).tril()
        return MASKS[len(x)] @ torch.softmax(causal(len(x)) + x @ self.inner(x).T, -1)


@pytest.mark.parametrize("where", WHERE)
def test_caches_of_a_models_own_code(where: dict[str, Any]) -> None:
    model, x = Masked(), torch.randn(4, 8)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().sum()
        loss.backward()
        return loss.detach()

    MASKS.clear()
    causal.cache_clear()
    lowtide.estimate(model, step, x, **where)
    assert MASKS == {}
    assert type(causal(4)) is torch.Tensor
    assert type(step(x)) is torch.Tensor
    known = MASKS[4], causal(4)
    lowtide.estimate(model, step, x, **where)
    assert (MASKS[4], causal(4)) == known
    place(0)
    before = place(0), place.cache_info().currsize
    lowtide.estimate(model, lambda batch: (place(1), step(batch)), x, **where)
    assert (place(0), place.cache_info().currsize) == (before[0], 2)  # there is no fake tensor in it


@pytest.mark.parametrize("where", WHERE)
def test_a_fake_tensor_in_an_unreachable_cache_raises_on_use(
    where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instead of a step without numbers, in which nothing is learned."""
    model, module = nn.Linear(8, 8), ModuleType("hidden")
    module.left = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hidden", module)

    def step(batch: torch.Tensor) -> None:
        out = model(batch)
        importlib.import_module("hidden").left.append(out.detach())
        out.sum().backward()

    lowtide.estimate(model, step, torch.randn(4, 8), **where)
    with pytest.raises(Exception, match=r"[Ff]ake"):
        _ = model(torch.randn(4, 8)) + module.left[0]


class Meters(defaultdict[str, float]):
    def __init__(self) -> None:
        super().__init__(float)


class Losses(deque[Any]):
    def __init__(self, name: str, size: int) -> None:
        super().__init__(maxlen=size)
        self.name = name


class Output(OrderedDict[str, Any]):
    """As transformers' outputs: what is in it are its attributes, too, and parts of it can't be exchanged."""

    def __init__(self, *, loss: Any = None) -> None:
        super().__init__(loss=loss)
        self.loss = loss

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("it is not to be updated")

    def copy(self) -> Any:
        raise TypeError("it can't be copied")


@pytest.mark.parametrize("where", WHERE)
def test_containers_with_constructors_and_methods_of_their_own(where: dict[str, Any]) -> None:
    model, meters, losses, output = nn.Linear(8, 8), Meters(), Losses("losses", 4), Output(loss=0)

    def step(batch: torch.Tensor) -> None:
        loss = model(batch).sum()
        loss.backward()
        meters["steps"] += 1
        losses.append(loss)
        losses.last = loss  # type: ignore[attr-defined]
        output["loss"] = output.loss = loss
        output["other"] = loss

    lowtide.estimate(model, step, torch.ones(2, 8), **where)
    assert (meters, [*losses], vars(losses)) == ({}, [], {"name": "losses"})
    assert ({**output}, vars(output)) == ({"loss": 0}, {"loss": 0})


class Trainer:
    last: Any = None
    count = 0


@pytest.mark.parametrize("where", WHERE)
def test_classes_functions_and_defaults_hold_what_they_held(where: dict[str, Any]) -> None:
    model = nn.Linear(8, 8)

    def step(batch: torch.Tensor, *, log: list[Any] = []) -> None:  # noqa: B006  that is the point
        loss = model(batch).sum()
        loss.backward()
        log.append(loss)
        step.last = loss  # type: ignore[attr-defined]
        Trainer.last = loss
        Trainer.count += 1
        Trainer.other = loss  # type: ignore[attr-defined]

    lowtide.estimate(model, step, torch.ones(2, 8), **where)
    assert step.__kwdefaults__ == {"log": []}
    assert vars(step) == {}
    assert (Trainer.last, Trainer.count, hasattr(Trainer, "other")) == (None, 0, False)


def in_threads(*work: Callable[[], object]) -> list[BaseException]:
    """Errors of all threads, which run at once."""
    raised: list[BaseException] = []

    def run(one: Callable[[], object]) -> None:
        try:
            one()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@pytest.mark.slow
def test_several_at_once_wait_for_each_other_and_leave_nothing_behind() -> None:
    run, rebuild = torch.autograd._engine_run_backward, torch._utils._rebuild_tensor  # type: ignore[attr-defined]

    def estimate() -> None:
        case = build("gpt2")
        for _ in range(3):
            lowtide.estimate(case.model, case.step, case.batch)

    assert in_threads(estimate, estimate, estimate) == []
    assert torch.autograd._engine_run_backward is run  # type: ignore[attr-defined]
    assert torch._utils._rebuild_tensor is rebuild


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
def test_another_thread_trains_meanwhile(where: dict[str, Any]) -> None:
    """Its backward passes, and what hooks in them ask, are none of the rehearsal's."""
    case, model = build("gpt2"), nn.Linear(8, 8)
    optimizer, numbers, done = torch.optim.SGD(model.parameters(), lr=0.1), [], threading.Event()
    model.weight.register_hook(lambda gradient: numbers.append(gradient.norm().item()))

    def train() -> None:
        while not done.is_set():
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def estimate() -> None:
        try:
            for _ in range(3):
                lowtide.estimate(case.model, case.step, case.batch, **where)
        finally:
            done.set()

    assert in_threads(train, estimate) == []
    assert {type(number) for number in numbers} == {float}
    assert len({*numbers}) == 1
