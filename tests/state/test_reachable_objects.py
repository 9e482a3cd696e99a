"""Numbers, words and containers that a step changes are put back in place; changes of all else are named."""

import array
import contextvars
import ctypes
import decimal
import functools
import gc
import itertools
import mmap
import os
import random
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.state import reachable_objects as keeping
from lowtide.state.reachable_objects import ReachableObjects
from lowtide.state.step_snapshot import StepSnapshot

CALLS = 0
IN_CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("IN_CONTEXT", default=0)
IN_THREAD = threading.local()
IN_THREAD.n = 0


class Phase(Enum):
    WARM = 0
    HOT = 1


@dataclass
class Settings:
    n: int = 0
    log: list[int] = field(default_factory=list)


@dataclass(slots=True)
class InSlots:
    n: int = 0
    last: Any = None


WATCHED = Settings()
Settings.__hash__ = object.__hash__  # type: ignore[method-assign,assignment]


@functools.lru_cache
def drawn(n: int) -> Tensor:
    return torch.rand(n)


class Loop:
    """A program of which a step counts in all places that it has."""

    n_all = 0

    def __init__(self) -> None:
        self.calls, self.name, self.phase, self.seen = 0, "a", Phase.WARM, set[int]()
        self.table: dict[str, Any] = {"n": 0, "inside": [{"n": 0}]}
        self.recent, self.counter, self.lists = (
            deque([1, 2], maxlen=2),
            Counter("aab"),
            defaultdict[str, list[int]](list),
        )
        self.ordered, self.settings, self.slots = OrderedDict(a=1, b=2), Settings(), InSlots()
        self.array, self.bytes, self.doubles = np.zeros(3), bytearray(b"ab"), array.array("d", [1.0])
        self.number = ctypes.c_int(3)
        self.whole = torch.zeros(6)
        self.weight = nn.Parameter(torch.zeros(3))
        self.weight.momentum = torch.zeros(3)  # type: ignore[attr-defined]
        self.watched, self.by_weak_key = weakref.ref(WATCHED), weakref.WeakKeyDictionary({WATCHED: 0})
        self.bytes_of_view, self.proxy = memoryview(bytearray(b"a")), types.MappingProxyType({"n": [0]})
        self.averages = [self.whole[:3], self.whole[3:], torch.zeros(()).expand(4)]

    def count(self) -> None:
        global CALLS, FIRST
        CALLS += 1
        FIRST = CALLS  # type: ignore[name-defined]
        Loop.n_all += 1
        self.calls, self.name, self.phase, self.more = self.calls + 1, self.name + "a", Phase.HOT, 1
        self.seen.add(self.calls)
        self.table["n"] += 1
        self.table["inside"][0]["n"] += 1
        self.table["inside"].append({})
        self.recent.append(self.calls)
        self.counter["b"] += 1
        self.lists["new"].append(1)
        self.ordered.move_to_end("a")
        self.settings.n += 1
        self.settings.log.append(1)
        self.slots.n, self.slots.last = 1, object()
        self.array += 1
        self.bytes.extend(b"c")
        self.doubles[0] += 1
        self.number.value += 1
        self.whole.add_(1)
        self.weight.momentum.add_(drawn(3))  # type: ignore[attr-defined]
        self.weight.n_updates = self.calls  # type: ignore[attr-defined]
        self.watched().n += 1
        self.by_weak_key[WATCHED] += 1
        self.bytes_of_view[0] += 1
        self.proxy["n"].append(1)
        IN_CONTEXT.set(self.calls)
        IN_THREAD.n = IN_THREAD.more = self.calls
        self.averages[0] = torch.ones(3)

    def state(self) -> dict[str, Any]:
        described = {name: repr(content) for name, content in vars(self).items()}
        inside = (
            self.table["inside"],
            self.settings.log,
            self.settings,
            self.slots,
            *self.averages,
            *vars(self).values(),
        )
        outside = (WATCHED, dict(self.by_weak_key), IN_CONTEXT.get(), vars(IN_THREAD))
        beside = (vars(self.weight), bytes(self.bytes_of_view), *outside)
        described |= {"class": repr(Loop.n_all), "globals": repr((CALLS, "FIRST" in globals())), "beside": repr(beside)}
        return {**described, "ids": [*map(id, inside)]}


def test_everything_is_put_back_in_place() -> None:
    loop, n = Loop(), 0

    def step(batch: Tensor, log: list[int] = []) -> None:  # noqa: B006  that is the point
        nonlocal n
        n += 1
        log.append(n)
        step.calls = n  # type: ignore[attr-defined]
        loop.count()

    before = loop.state()
    with StepSnapshot(nn.Linear(1, 1), None, None, step) as unchanged:
        for _ in range(2):
            step(torch.ones(1))
            step(torch.ones(1))
            assert loop.calls == 2
            unchanged.restore()
            assert loop.state() == before
        step(torch.ones(1))
    assert loop.state() == before
    assert drawn.cache_info().misses == 0
    assert (n, step.__defaults__, vars(step)) == (0, ([],), {})
    assert unchanged.changes == ()


class Whole(int):
    """A number with attributes."""


class Text(str):
    """A string with attributes."""


class Pair(tuple[int, int]):
    """A tuple with attributes."""


def test_attributes_of_numbers_strings_tuples_and_exceptions_are_put_back() -> None:
    objects: tuple[Any, ...] = (Whole(3), Text("a"), Pair((1, 2)), ValueError("a"))
    for obj in objects:
        obj.n = 0

    def step(batch: Tensor) -> None:
        for obj in objects:
            obj.n += 1
            obj.more = 1
        objects[-1].args = ("b",)

    with StepSnapshot(nn.Linear(1, 1), None, None, step):
        step(torch.ones(1))
    assert [vars(obj) for obj in objects] == [{"n": 0}] * len(objects)
    assert objects[-1].args == ("a",)


def test_environment_memory_maps_and_decimal_contexts_are_put_back(tmp_path: Path) -> None:
    file = tmp_path / "shared"
    file.write_bytes(b"abcd")
    own = decimal.Context(prec=5)
    os.environ["LOWTIDE_TEST_STEP"] = "1"
    os.environ.pop("LOWTIDE_TEST_NEW", None)
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 4) as mapped:

        def step(batch: Tensor) -> None:
            os.environ["LOWTIDE_TEST_STEP"] += "1"
            os.environ["LOWTIDE_TEST_NEW"] = "1"
            mapped[0:2] = b"xy"
            own.prec += 1
            decimal.getcontext().prec += 1
            decimal.Decimal(1) / decimal.Decimal(3)

        before = decimal.getcontext().copy()
        with StepSnapshot(nn.Linear(1, 1), None, None, step):
            step(torch.ones(1))
        assert mapped[:] == b"abcd"
    assert own.prec == 5
    assert repr(decimal.getcontext()) == repr(before)
    assert os.environ.pop("LOWTIDE_TEST_STEP") == "1"
    assert os.getenv("LOWTIDE_TEST_NEW") is None


class Drawing(random.Random):
    """A generator with an attribute."""

    count = 0


def test_hooks_on_gradients_and_generators_are_put_back_with_what_they_count() -> None:
    model, counts, bits, drawing = nn.Linear(4, 1), Counter[str](), np.random.PCG64(0), Drawing(0)
    table = {"before": counts}
    before = model.weight.register_hook(lambda gradient: table["before"].update(a=1))

    def step(batch: Tensor) -> None:
        bits.random_raw()
        drawing.count += 1
        if not model.bias._backward_hooks:
            model.bias.register_hook(lambda gradient: 2 * gradient)
            model.bias.register_post_accumulate_grad_hook(lambda parameter: None)
        model(batch).sum().backward()
        before.remove()

    model(torch.ones(1, 4)).sum().backward()
    state = bits.state
    with StepSnapshot(model, None, None, step):
        for _ in range(2):
            step(torch.ones(1, 4))
    assert counts == {"a": 1}
    assert [*model.weight._backward_hooks] == [before.id]  # type: ignore[arg-type]
    assert not model.bias._backward_hooks
    assert not model.bias._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    assert bits.state == state
    assert drawing.count == 0


def test_an_array_and_a_tensor_that_grow_are_put_back() -> None:
    array_, tensor, whole = np.ones(2), torch.ones(2), torch.arange(4.0)

    def step(batch: Tensor) -> None:
        array_.resize(5, refcheck=False)
        tensor.resize_(2000).zero_()
        whole.untyped_storage().resize_(8)

    with StepSnapshot(nn.Linear(1, 1), None, None, step):
        step(torch.ones(1))
    assert (array_.tolist(), tensor.tolist(), whole.tolist()) == ([1, 1], [1, 1], [0, 1, 2, 3])


class Marked(torch.Tensor):
    """A tensor of a class of the user's own."""

    n_reads = 0


def test_sparse_tensors_and_tensors_of_own_classes_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, marked = torch.sparse_coo_tensor([[0]], [1.0], (4,)), torch.zeros(2).as_subclass(Marked)

    def step(batch: Tensor) -> None:
        counts.add_(torch.sparse_coo_tensor([[1]], [1.0], (4,)))
        marked.add_(1)
        marked.n_reads += 1

    with StepSnapshot(nn.Linear(1, 1), None, None, step) as unchanged:
        step(torch.ones(1))
    assert (counts.to_dense().tolist(), marked.tolist(), marked.n_reads) == ([1, 0, 0, 0], [0, 0], 0)
    assert unchanged.changes == ()
    monkeypatch.setattr(keeping, "COPIED_BYTES", 0)
    with StepSnapshot(nn.Linear(1, 1), None, None, step) as unchanged:
        step(torch.ones(1))
    assert sum("was written to" in change for change in unchanged.changes) == 2


def test_what_can_be_set_only_once_is_named() -> None:
    generator, first = np.random.default_rng(0), contextvars.ContextVar[int]("first")

    def step(batch: None) -> None:
        generator.spawn(2)
        first.set(3)

    with StepSnapshot(nn.Linear(1, 1), None, None, step) as unchanged:
        unchanged.run(None)
    assert set(unchanged.changes) == {
        "`SeedSequence.n_children_spawned` went from 0 to 2",
        "`ContextVar.first` went from None to 3",
    }


def test_counts_have_the_same_names_in_each_run() -> None:
    counts: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
    layer = nn.Linear(1, 1)

    def step(batch: None) -> None:
        counts[layer] = counts.get(layer, 0) + 1

    with StepSnapshot(layer, None, None, step) as unchanged:
        unchanged.run(None)
        before = unchanged.counts()
        reference = weakref.ref(counts)  # takes the memory of the weak reference that is freed now
        unchanged.restore()
        unchanged.run(None)
        assert unchanged.counts() == before
        assert reference() is counts


class Warm(nn.Module):
    """Counts its calls, and is another function after the twelfth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.calls, self.state = 0, {"phases": [0]}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.state["phases"][0] += 1
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * (0.1 if self.state["phases"][0] <= 12 else min(1.0, self.calls / 20))
        return x.square().mean()


def test_a_counter_on_a_module_goes_on_from_where_it_was() -> None:
    losses: dict[bool, list[float]] = {}
    for fitted in (False, True):
        torch.manual_seed(0)
        model, x = Warm(), torch.randn(256, 64)
        optimizer, phases = torch.optim.SGD(model.parameters(), lr=0.1), model.state["phases"]

        def step(batch: Tensor) -> Tensor:
            loss = model(batch)  # noqa: B023
            loss.backward()
            optimizer.step()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023
            return loss.detach()

        if fitted:
            proof = lowtide.fit(model, step, x, budget="80%").verdict.proof
            assert proof == "bit-identical to the plain step: loss, gradients, parameters, counters and random numbers"
            assert model.calls == 0
            assert model.state["phases"] is phases
        losses[fitted] = [step(x).item() for _ in range(15)]
    assert losses[True] == losses[False]


class Stream:
    """Gives numbers, and knows how many."""

    def __init__(self) -> None:
        self.position, self.given = 0, [0]

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.position += 1
        self.given.append(self.position)
        return self.position


class Numbers(torch.utils.data.Dataset[int]):
    def __init__(self) -> None:
        self.served = 0

    def __getitem__(self, index: int) -> int:
        self.served += 1
        return index


NAMES = itertools.count()


def test_unrestored_changes_are_named(tmp_path: Path) -> None:
    stream, numbers, letters = Stream(), Numbers(), iter("abcdefghijklmnop")
    model, loader = nn.Linear(2, 2), iter(torch.utils.data.DataLoader([1] * 9))  # type: ignore[arg-type]

    def generate() -> Iterator[int]:
        index = 0
        while True:
            index += 1
            yield index

    generated = generate()
    with (tmp_path / "log").open("w") as log:

        def step(batch: Tensor) -> None:
            log.write("abc")
            next(stream), numbers[0], next(letters), next(generated), next(loader), next(NAMES)
            model(batch).sum().backward()

        with StepSnapshot(model, None, None, step) as unchanged:
            step(torch.ones(2))
            unchanged.restore()
            step(torch.ones(2))
        assert {*unchanged.changes} == {
            "`log` went from position 0 to position 6",
            "`Stream.position` went from 0 to 2",
            "`Stream.given` went from 1 entry to 3 entries",
            "`Numbers.served` went from 0 to 2",
            "`letters` went from 16 to come to 14 to come",
            "`generate.index` went from nothing to 2",
            "`_SingleProcessDataLoaderIter._num_yielded` went from 0 to 2",
            "`NAMES` went from count(0) to count(2)",
        }
        assert next(stream) == 3  # it was never asked for more
        assert next(letters) == "c"


def test_results_that_a_cache_gets_are_emptied_or_named() -> None:
    """A random number that the first step draws and later ones take from a cache is drawn again in training."""
    for is_filled in (False, True):
        cached = functools.lru_cache(lambda n: torch.rand(8, n))
        model = nn.Sequential(*[nn.Linear(64, 64), nn.GELU()] * 4)

        def step(batch: Tensor) -> None:
            model(batch + cached(64)).square().mean().backward()  # noqa: B023
            model.zero_grad()  # noqa: B023

        if is_filled:
            cached(1)
        fitted = lowtide.fit(model, step, torch.randn(8, 64), budget="100%")
        assert fitted.verdict.identical
        assert cached.cache_info().currsize == 2 * is_filled
        named = "`cached` went from 1 computed result to 2 computed results"
        assert (named in " ".join((*fitted.verdict.changes, *fitted.plan.notes))) == is_filled


def test_fit_and_rehearse_say_so() -> None:
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))]
    model = nn.Sequential(*layers)

    class Position(Stream):
        def __next__(self) -> int:
            self.position += 1
            return self.position

    position = Position()

    def step(batch: Tensor) -> None:
        next(position)
        model(batch).square().mean().backward()
        model.zero_grad()

    profile = lowtide.rehearse(model, step, torch.randn(256, 64))
    first = position.position
    assert profile.notes[-1] == f"not put back: `Position.position` went from 0 to {first}"
    proof = lowtide.fit(model, step, torch.randn(256, 64), budget="80%").verdict.proof
    assert proof == (
        "bit-identical to the plain step: gradients and random numbers; not put back: `Position.position` went from "
        f"{first} to {position.position}"
    )
    assert position.position > first + 4


def test_copies_have_a_limit_but_for_averages_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "COPIED_BYTES", 10_000)
    model = nn.Linear(100, 100)
    averages = [p.detach().clone() for p in model.parameters()]
    small, large, many = torch.zeros(100), torch.zeros(3000), list(range(2000))
    array = np.zeros(5000)

    def step(batch: Tensor) -> None:
        for tensor in (*averages, small, large):
            tensor.add_(1)
        many.append(1)
        array[0] = 1

    before = [average.clone() for average in averages]
    with StepSnapshot(model, None, None, step) as unchanged:
        step(torch.ones(1))
    assert all(torch.equal(now, then) for now, then in zip(averages, before, strict=True))
    assert (small.sum(), large.sum(), len(many), array.sum()) == (0, 3000, 2001, 1)
    assert {*unchanged.changes} == {
        "`large` was written to (11.7 KiB)",
        "`many` went from 2,000 entries to 2,001 entries",
        "`array` was written to (39.1 KiB)",
    }


def test_the_walk_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "MOST", 500)
    data = [[{"n": number}] for number in range(5000)]

    def step(batch: Any) -> None:
        data.clear()

    kept = ReachableObjects(step)
    assert len(kept.visited) == 500
    assert kept.changes() == ("the step reaches more than 500 objects: what the others hold is not known",)


def test_a_data_set_is_not_walked_into() -> None:
    data, other = [{"n": 0} for _ in range(keeping.LARGEST + 1)], range(10)

    def step(batch: Any) -> None:
        data[0]["n"] += 1
        data.append({})
        _ = other

    kept = ReachableObjects(step)
    assert len(kept.visited) < 20
    step(None)
    kept.restore()
    assert len(data) == keeping.LARGEST + 1


def test_nothing_is_held_afterwards() -> None:
    def program() -> list[weakref.ref[Any]]:
        loop, model = Loop(), nn.Linear(2, 2)

        def step(batch: Tensor) -> None:
            loop.count()
            loop.loss = model(batch).sum()  # type: ignore[attr-defined]

        with StepSnapshot(model, None, None, step) as unchanged:
            step(torch.ones(2))
            left = weakref.ref(loop.loss)  # type: ignore[attr-defined]
            unchanged.restore()
            assert left() is None
        return [*map(weakref.ref, (loop, loop.settings, model, step))]

    known = program()
    gc.collect()
    assert [reference() for reference in known] == [None] * 4


def test_a_graph_of_the_last_step_is_not_held_meanwhile() -> None:
    loop = Loop()
    loop.table["losses"] = [torch.ones(2, requires_grad=True).sum()]
    loop.last = torch.ones(2, requires_grad=True).sum()  # type: ignore[attr-defined]
    graph = weakref.ref(loop.last)  # type: ignore[attr-defined]

    def step(batch: Any) -> None:
        loop.last = None  # type: ignore[attr-defined]
        loop.table["losses"].append(2)

    with StepSnapshot(nn.Linear(1, 1), None, None, step):
        step(None)
        assert graph() is None
    assert len(loop.table["losses"]) == 1


def test_a_rate_is_put_back_where_the_optimizer_does_not_step() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(batch: Tensor) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5
        model(batch).sum().backward()

    group = optimizer.param_groups[0]
    with StepSnapshot(model, None, None, step):
        step(torch.ones(2))
    assert optimizer.param_groups[0] is group
    assert group["lr"] == 1.0


def test_accelerate_goes_on_from_where_it_was() -> None:
    """Gradients of four micro-batches are accumulated, and the fourth is the one that updates."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    try:
        torch.manual_seed(0)
        layers = [layer for _ in range(3) for layer in (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

        def step(batch: Tensor) -> None:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        x = torch.randn(128, 64)
        step(x)  # so the first update comes after three more
        shared = vars(accelerator.gradient_state)
        gradients = [p.grad.clone() for p in model.parameters()]
        fitted = lowtide.fit(model, step, x, budget="90%")
        assert (accelerator.step, accelerator.sync_gradients) == (1, False)
        assert vars(accelerator.gradient_state) is shared
        assert all(torch.equal(p.grad, then) for p, then in zip(model.parameters(), gradients, strict=True))
        updates, rates = [], []
        for number in range(2, 9):
            before = model[0].weight.detach().clone()
            step(x)
            if not torch.equal(before, model[0].weight):
                updates.append(number)
                rates.append(optimizer.param_groups[0]["lr"])
        assert updates == [4, 8]
        assert rates == [0.005, 0.0025]
        fitted.remove()
    finally:
        accelerator.free_memory()
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
