"""Changes that a step makes through objects that its call does not name are found, and restored after a rehearsal."""

import random
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.state.reachable_state import ReachableState
from lowtide.state.step_snapshot import StepSnapshot


class Bound(nn.Module):
    """Keeps an average in a parameter that each forward binds again, as vector quantizers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.average = nn.Parameter(torch.ones(4))
        self.last: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.average = nn.Parameter(self.average.detach() * 0.9 + x.detach().mean(0))
        self.last = nn.Parameter(torch.zeros(2))
        return self.linear(x * self.average)


def test_signs_of_zeros_are_restored_and_generators_without_a_state_left_alone() -> None:
    model, system = nn.BatchNorm1d(4), random.SystemRandom()
    assert model.running_mean is not None

    def step(batch: Tensor) -> None:
        assert 0 <= system.random() < 1
        assert model.running_mean is not None
        model(batch).sum().backward()
        model.running_mean.zero_().neg_()

    lowtide.rehearse(nn.Sequential(model), lambda batch: step(batch), torch.randn(8, 4))
    assert not model.running_mean.signbit().any()


SHARING = {
    "expand": lambda: torch.arange(4.0).expand(8, 4),
    "expand in the middle": lambda: torch.randn(8, 1, 3)[:, :, :2].expand(8, 2, 2),
    "unfold": lambda: torch.randn(11).unfold(0, 4, 1),
    "a slice": lambda: torch.randn(8, 6)[:, 1:5],
    "a transposed slice": lambda: torch.randn(6, 8)[1:5].T,
}


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("kind", SHARING)
def test_batches_whose_elements_share_memory_or_lie_apart(kind: str, *, writes: bool) -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(4, 4), SHARING[kind]()
    content, version = batch.clone(), batch._version

    def step(batch: Tensor) -> None:
        model(batch.reshape(8, 4)).sum().backward()
        if writes:
            batch[0].fill_(7)

    lowtide.rehearse(model, step, batch)
    assert torch.equal(batch, content)
    assert (batch._version == version) != writes


def test_parameters_that_are_bound_anew() -> None:
    model = Bound()
    before, content = dict(model.named_parameters()), model.average.detach().clone()
    with StepSnapshot(model) as unchanged:
        for _ in range(2):
            model(torch.randn(8, 4)).sum().backward()
            unchanged.restore()
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    assert model.last is None
    assert torch.equal(model.average, content)


class WithAuxiliaryLoss(nn.Module):
    """Leaves a loss for the step to take: under a new name, in place of a number, and with others in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.penalty: Any = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.auxiliary, self.penalty, self.each = y.abs().sum(), y.square().sum(), [y.sum(), y.mean()]
        self.calls = getattr(self, "calls", 0) + 1
        return y


def test_attributes_that_a_graph_was_left_in() -> None:
    model = WithAuxiliaryLoss()

    def step(x: Tensor) -> None:
        (model(x).sum() + model.auxiliary + model.penalty).backward()

    lowtide.rehearse(model, step, torch.randn(8, 4))
    assert not hasattr(model, "auxiliary")
    assert not hasattr(model, "each")
    assert model.penalty == 0
    deepcopy(model)
    step(torch.randn(8, 4))
    trained = model.auxiliary
    lowtide.rehearse(model, step, torch.randn(8, 4))
    assert model.auxiliary.shape == trained.shape  # it had a graph before, which is not held meanwhile


class Trainer:
    """Has a model, a teacher that follows it, and a schedule; some of it belongs to the class."""

    shared: nn.Module

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4)
        self.teacher = deepcopy(self.model)
        Trainer.shared = deepcopy(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def follow(self) -> None:
        with torch.no_grad():
            for follower in (self.teacher, Trainer.shared):
                for theirs, ours in zip(follower.parameters(), self.model.parameters(), strict=True):
                    theirs.lerp_(ours, 0.5)

    def step(self, batch: Tensor) -> None:
        self.model(batch).sum().backward()
        self.optimizer.step()
        self.schedule.step()
        self.follow()

    @property
    def state(self) -> list[Any]:
        modules = (self.model, self.teacher, Trainer.shared)
        return [*(p.detach().clone() for m in modules for p in m.parameters()), self.schedule.last_epoch]


trainer = Trainer()


def step_of_a_global(batch: Tensor) -> None:
    trainer.step(batch)


def _by_a_module(trainer: Trainer) -> Callable[[Tensor], None]:
    engine = ModuleType("engine")
    engine.train_step = lambda batch: trainer.step(batch)  # type: ignore[attr-defined]
    return lambda batch: engine.train_step(batch)


def _by_a_class(trainer: Trainer) -> Callable[[Tensor], None]:
    class Steps:
        @staticmethod
        def once(batch: Tensor) -> None:
            trainer.step(batch)

    return lambda batch: Steps.once(batch)


WAYS: dict[str, Callable[[Trainer], Callable[[Tensor], None]]] = {
    "method": lambda trainer: trainer.step,
    "lambda": lambda trainer: lambda batch: trainer.step(batch),
    "function of a module": _by_a_module,
    "static method": _by_a_class,
}


@pytest.mark.parametrize("way", WAYS)
def test_objects_that_the_steps_code_reaches_are_restored(way: str) -> None:
    trainer = Trainer()
    step, before = WAYS[way](trainer), trainer.state
    with StepSnapshot(trainer.model, None, None, step) as unchanged:
        for _ in range(2):
            step(torch.ones(2, 4))
            assert trainer.state[-1] == 1
            unchanged.restore()
            assert all(map(_same, before, trainer.state))


def test_objects_that_a_global_reaches_are_restored() -> None:
    before = trainer.state
    with StepSnapshot(trainer.model, None, None, step_of_a_global):
        step_of_a_global(torch.ones(2, 4))
    assert all(map(_same, before, trainer.state))


GENERATORS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "torch": (torch.Generator(), lambda generator: torch.rand(1, generator=generator)),
    "numpy": (np.random.default_rng(3), lambda generator: generator.random()),
    "numpy of old": (np.random.RandomState(3), lambda generator: generator.rand()),
    "python": (random.Random(3), lambda generator: generator.random()),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_of_the_users_own(kind: str) -> None:
    generator, of = GENERATORS[kind]

    def draw() -> Any:
        return of(generator)

    with StepSnapshot(nn.Linear(1, 1), None, None, draw) as unchanged:
        first = draw()
        unchanged.restore_for_rerun()
        assert _same(first, draw())
        unchanged.restore()
        assert _same(first, draw())
    assert _same(first, draw())
    assert not _same(first, draw())


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def test_of_a_large_dict_the_tensors_and_modules_are_state_and_the_rest_is_data() -> None:
    count, norm = torch.zeros(()), nn.BatchNorm1d(4)
    table: dict[Any, Any] = {number: {"ids": [number]} for number in range(2000)}
    table |= {"count": count, "norm": norm}

    def step(batch: Tensor) -> None:
        table["count"] += 1
        table["norm"](batch)

    found = ReachableState(step)
    assert [module for module in found.modules if module is norm] == [norm]
    assert any(tensor is count for tensor in found.tensors)
    assert not any(thing is table[0]["ids"] for thing in found.visited)
    with StepSnapshot(nn.Linear(1, 1), None, None, step):
        step(torch.randn(8, 4))
    assert count == 0
    assert norm.num_batches_tracked == 0


CALLS, GENERATOR = torch.zeros(1), torch.Generator()


class Counting(nn.Module):
    """Refers to both where only its code says so."""

    def forward(self, x: Tensor) -> Tensor:
        CALLS.add_(1)
        return torch.nn.functional.gelu(x) * (torch.rand(x.shape, generator=GENERATOR) > 0.1)


def test_objects_that_only_code_of_modules_reaches_are_restored() -> None:
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 256), Counting(), nn.Linear(256, 64))]
    model, x = nn.Sequential(*layers), torch.randn(256, 64)

    def step(batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    GENERATOR.manual_seed(3)
    CALLS.zero_()
    fitted = lowtide.fit(model, step, x, budget="80%")
    assert fitted.verdict is not None
    assert fitted.verdict.proof.startswith("bit-identical")
    fitted.remove()
    assert CALLS == 0
    assert torch.equal(GENERATOR.get_state(), torch.Generator().manual_seed(3).get_state())


def test_another_threads_optimizer_is_let_be() -> None:
    """Its parameters are not put back where that thread has left them, and its steps are none of those rehearsed."""
    model, other = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Linear(8, 8)
    optimizer, done, raised = torch.optim.SGD(other.parameters(), lr=0.1), threading.Event(), []
    with torch.no_grad():
        other.weight.zero_()
    n_steps = 0

    def train() -> None:
        nonlocal n_steps
        try:
            while not done.is_set():
                other(torch.ones(1, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                n_steps += 1
        except BaseException as error:
            raised.append(error)

    def step(batch: Tensor) -> None:
        model(batch).sum().backward()
        model.zero_grad()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        with StepSnapshot(model, None, None, step) as unchanged:
            for _ in range(5):
                step(torch.ones(256, 64))
                before = n_steps
                while n_steps < before + 3 and not raised:
                    time.sleep(0.001)
                unchanged.restore()
            assert unchanged.optimizers == ()
    finally:
        done.set()
        thread.join()
    assert not raised
    expected = torch.zeros(8, 8)
    for _ in range(n_steps):
        expected -= 0.1
    assert torch.equal(other.weight.detach(), expected)


@pytest.mark.parametrize("call", [lowtide.rehearse, lowtide.estimate, lowtide.timeline])
def test_a_step_may_take_things_out_of_its_batch(call: Callable[..., Any]) -> None:
    model, batch = nn.Linear(8, 4), {"x": torch.randn(16, 8), "more": [torch.randint(4, (16,))]}
    labels = batch["more"][0]

    def step(given: dict[str, Any]) -> None:
        y = given.pop("more").pop()
        given["new"] = model(given["x"])
        torch.nn.functional.cross_entropy(given["new"], y).backward()
        model.zero_grad()

    call(model, step, batch)
    assert [*batch] == ["x", "more"]
    assert batch["more"][0] is labels


def test_a_fitted_step_may_as_well() -> None:
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))]
    model, batch = nn.Sequential(*layers), {"x": torch.randn(256, 64), "y": torch.randn(256, 64)}

    def step(given: dict[str, Tensor]) -> Tensor:
        y = given.pop("y")
        loss = (model(given["x"]) - y).square().mean()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    fitted = lowtide.fit(model, step, batch, budget="80%")
    assert fitted.verdict is not None
    assert fitted.verdict.within_budget
    assert [*batch] == ["x", "y"]


def test_an_update_in_another_thread_is_undone_as_well() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    before = model.weight.detach().clone()

    def step(batch: Tensor) -> None:
        model(batch).sum().backward()
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()

    with StepSnapshot(model, None, None, step) as unchanged:
        step(torch.ones(2, 8))
        assert unchanged.optimizers == (optimizer,)
    assert not optimizer.state
    assert torch.equal(model.weight, before)


def test_a_lever_is_timed_with_whole_batches() -> None:
    layers = [layer for _ in range(2) for layer in (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))]
    model, batch = nn.Sequential(*layers), {"x": torch.randn(64, 64), "y": torch.randn(64, 64)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(given: dict[str, Tensor]) -> None:
        y = given.pop("y")
        (model(given["x"]) - y).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    fitted = lowtide.fit(model, step, batch, budget="95%", levers=["step in backward"])
    fitted.remove()
    assert [*batch] == ["x", "y"]


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon])
def test_state_of_optimizers_that_torch_names_by_their_package_is_restored(kind: Any) -> None:
    model = nn.Linear(4, 4, bias=False)  # Adafactor.__module__ is "torch.optim", that of Adam "torch.optim.adam"
    optimizer = kind(model.parameters())

    def step(batch: Tensor) -> None:
        model(batch).square().sum().backward()
        optimizer.step()

    lowtide.rehearse(model, step, torch.randn(8, 4))
    assert not optimizer.state
