"""Calls that change what is no module's are not run again, not even on trial."""

import array
import contextvars
import ctypes
import itertools
import queue
import random
import threading
import types
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide.state.side_effects import CHANGES, ITERATES, UNSEEN, WRITES

COUNT = 0
NUMBERS = itertools.count(1)
SUMS = torch.zeros(64)
CALLS: contextvars.ContextVar[int] = contextvars.ContextVar("CALLS", default=0)
IN_THREAD = threading.local()
IN_THREAD.n = 0


class Mean:
    """A running mean, as of observations in reinforcement learning."""

    def __init__(self) -> None:
        self.mean, self.n = torch.zeros(64), 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.n += len(x)
        self.mean = self.mean + (x.detach().mean(0) - self.mean) / self.n
        return x - self.mean


@dataclass(slots=True)
class Settings:
    n_calls: int = 0


class Slot:
    __slots__ = ("n",)


class SlotAndAttributes(Slot):
    def __init__(self) -> None:
        self.n, self.name = 0, "of both kinds"


class Counter:
    def __init__(self) -> None:
        self.n = 0

    def more(self) -> int:
        self.n += 1
        return self.n


def counting() -> int:
    counting.n += 1  # type: ignore[attr-defined]
    return counting.n  # type: ignore[attr-defined,no-any-return]


counting.n = 0  # type: ignore[attr-defined]

COUNTER = Counter()
PLACES: dict[str, Any] = {
    "a_slot_beside_attributes": SlotAndAttributes,
    "an_array_of_python": lambda: array.array("l", [0]),
    "bytes": lambda: bytearray(1),
    "a_number_of_c": ctypes.c_long,
    "a_view_of_bytes": lambda: memoryview(bytearray(1)),
    "a_weak_reference": lambda: weakref.ref(COUNTER),
    "a_weak_set": lambda: weakref.WeakSet([COUNTER]),
    "weak_keys": weakref.WeakKeyDictionary,
    "an_array_of_objects": lambda: np.array([Counter()], dtype=object),
    "a_proxy_of_a_dict": lambda: types.MappingProxyType({"n": Counter()}),
    "items_of_a_dict": lambda: {"n": Counter()}.items(),
    "a_queue": queue.Queue,
    "a_simple_queue": queue.SimpleQueue,
}
"""Places of a count that a class of C keeps, or that another object leads to."""


class Block(nn.Module):
    __slots__ = ("n_calls",)

    n_made = 0

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)
        self.change = getattr(self, kind)
        self.means, self.settings, self.array = Mean(), Settings(), np.zeros(64)
        self.register_buffer("is_ready", torch.tensor(False))
        self.n_calls, self.place = 0, PLACES.get(kind, int)()
        self.sums, self.log, self.coin = torch.zeros(64), {"inside": [object()]}, random.Random(3).random

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.change(x))))

    def an_object(self, x):
        return self.means(x)

    def slots(self, x):
        self.settings.n_calls += 1
        return x / self.settings.n_calls

    def a_global(self, x):
        global COUNT
        COUNT += 1
        return x / COUNT

    def a_class(self, x):
        Block.n_made += 1
        return x / Block.n_made

    def an_array(self, x):
        self.array *= 0.9
        self.array += x.detach().mean(0).numpy()
        return x - torch.from_numpy(self.array).float()

    def a_tensor(self, x):
        with torch.no_grad():
            self.sums.mul_(0.9).add_(x.mean(0))
        return x - self.sums.clone()

    def a_tensor_uncounted(self, x):
        SUMS.data.mul_(0.9).add_(x.detach().mean(0))
        return x - SUMS.clone()

    def a_list(self, x):
        self.log["inside"].append(object())
        return x / len(self.log["inside"])

    def an_iterator(self, x):
        return x / next(NUMBERS)

    def writes(self, x):
        if not self.is_ready:  # as activation norms are initialised by their first batch
            with torch.no_grad():
                self.wide.bias.copy_(-x.mean())
            self.is_ready.fill_(True)
        return x

    def writes_uncounted(self, x):
        self.wide.weight.data = torch.renorm(self.wide.weight.data, 2, 0, 0.5)
        return x

    def a_slot_of_the_module(self, x):
        self.n_calls += 1
        return x / self.n_calls

    def a_slot_beside_attributes(self, x):
        self.place.n += 1
        return x / self.place.n

    def a_number_of_c(self, x):
        self.place.value += 1
        return x / self.place.value

    def an_item(self, x):
        self.place[0] += 1
        return x / self.place[0]

    an_array_of_python = bytes = a_view_of_bytes = an_item

    def a_weak_reference(self, x):
        return x / self.place().more()

    def a_weak_set(self, x):
        return x / sum(counter.more() for counter in self.place)

    def weak_keys(self, x):
        self.place[self] = self.place.get(self, 0) + 1
        return x / self.place[self]

    def an_array_of_objects(self, x):
        return x / self.place[0].more()

    def a_proxy_of_a_dict(self, x):
        return x / self.place["n"].more()

    def items_of_a_dict(self, x):
        return x / sum(counter.more() for _, counter in self.place)

    def a_queue(self, x):
        self.place.put(1)
        return x / self.place.qsize()

    a_simple_queue = a_queue

    def a_context_variable(self, x):
        CALLS.set(CALLS.get() + 1)
        return x / CALLS.get()

    def a_variable_of_the_thread(self, x):
        IN_THREAD.n += 1
        return x / IN_THREAD.n

    def an_attribute_of_a_function(self, x):
        return x / counting()

    def an_attribute_of_a_parameter(self, x):
        weight = self.wide.weight
        weight.n_reads = getattr(weight, "n_reads", 0) + 1
        return x / weight.n_reads

    def a_global_by_its_name(self, x):
        globals()["COUNT"] += 1
        return x / COUNT

    def nothing(self, x):
        return x * 1.5


KINDS = [name for name in vars(Block) if name[0] in "abisw" and name != "an_item" and callable(getattr(Block, name))]


def why_refused(kind: str) -> set[str | None]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(kind), Block(kind))

    def step(batch):
        model(batch).square().mean().backward()

    profile = lowtide.rehearse(model, step, torch.randn(32, 64))
    return {call.refused for call in profile.calls if call.cls == "Block"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_changes_what_is_not_its_own_is_not_run_again(kind: str) -> None:
    assert len(KINDS) == 30
    expected = ITERATES if kind == "an_iterator" else WRITES if kind.startswith("writes") else CHANGES
    assert why_refused(kind) == {expected}


def test_a_block_that_changes_nothing_is() -> None:
    assert why_refused("nothing") == {None}


@pytest.mark.parametrize(
    ("kind", "place", "expected"),
    [
        ("an_item", lambda: np.zeros(2**20), CHANGES),
        ("an_item", lambda: np.zeros(2**23 + 1), UNSEEN),
        ("an_item", lambda: bytearray(2**26 + 1), UNSEEN),
        ("nothing", lambda: np.broadcast_to(np.zeros(1), 2**23 + 1), None),
    ],
    ids=["8 MiB", "above 64 MiB", "bytes", "read-only"],
)
def test_a_block_that_can_write_to_a_large_array_is_not_run_again(
    kind: str, place: Any, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PLACES, kind, place)
    assert why_refused(kind) == {expected}
