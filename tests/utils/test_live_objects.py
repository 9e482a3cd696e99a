"""Objects of some classes among all that are alive, found without running any code of theirs."""

import contextlib
import gc
import random
import weakref
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.utils import live_objects as live_objects_module
from lowtide.utils.live_objects import LiveObjectFinder, live_objects


class ComparesByName(type):
    """A metaclass whose classes are not hashable."""

    def __eq__(cls, other: object) -> bool:
        raise AssertionError("a class was compared")

    __hash__ = None  # type: ignore[assignment]


class Odd(metaclass=ComparesByName):
    pass


class Proxy:
    """An object that claims to be a tensor, as lazy proxies do."""

    @property
    def __class__(self) -> Any:
        raise AssertionError("a proxy was asked for its class")


def test_subclasses_are_found_and_nothing_is_asked() -> None:
    kept = [nn.Linear(2, 2), Odd(), Proxy(), torch.ones(3), [1]]
    linear, *_, ones, _ = kept
    modules, tensors = live_objects(nn.Module), live_objects(Tensor)
    assert any(module is linear for module in modules)
    assert {id(ones), id(linear.weight)} <= {id(tensor) for tensor in tensors}
    assert all(issubclass(type(module), nn.Module) for module in modules)
    assert all(issubclass(type(tensor), Tensor) for tensor in tensors)


def test_an_abstract_class_is_searched_for_beside_classes_that_cannot_be_hashed() -> None:
    """`issubclass` of an abstract class hashes the class that it is asked about."""

    class Block(contextlib.AbstractContextManager[None]):
        def __exit__(self, *_: object) -> None: ...

    odd, block = Odd(), Block()
    assert live_objects(Block) == [block]
    assert live_objects(Odd) == [odd]


def test_several_classes_at_once() -> None:
    kept = [nn.Linear(2, 2), torch.ones(3)]
    assert {id(thing) for thing in kept} <= {id(thing) for thing in live_objects(nn.Module, Tensor)}


def test_a_finder_misses_no_object_whichever_generation_it_is_in() -> None:
    finder, kept = LiveObjectFinder(Tensor), [torch.ones(1)]
    for collects in (None, None, 0, 1, None, 2, None):
        if collects is not None:
            gc.collect(collects)
        kept.append(torch.ones(1))
        found = {id(obj) for obj in finder.find()}
        assert {id(tensor) for tensor in kept} <= found
        assert found == {id(tensor) for tensor in live_objects(Tensor)}
    number = id(kept.pop())
    assert number not in {id(obj) for obj in finder.find()}


def test_a_finder_sees_what_is_frozen_and_given_back() -> None:
    finder, hidden = LiveObjectFinder(Tensor), torch.ones(1)
    assert any(obj is hidden for obj in finder.find())
    gc.freeze()
    kept = torch.ones(1)
    assert [obj for obj in finder.find() if obj is hidden or obj is kept] == [kept]
    gc.unfreeze()
    gc.collect(1)
    assert sum(obj is hidden or obj is kept for obj in finder.find()) == 2
    gc.freeze()


def test_a_finder_looks_only_at_the_end_of_the_oldest_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    finder, kept = LiveObjectFinder(Tensor), [torch.ones(1)]
    looked_at: list[int] = []

    def of_classes(everything: Collection[object], classes: tuple[type, ...]) -> list[Any]:
        looked_at.append(len(everything))
        return find_in(everything, classes)

    find_in = live_objects_module._select_instances
    monkeypatch.setattr(live_objects_module, "_select_instances", of_classes)
    gc.unfreeze()
    monkeypatch.setattr(live_objects_module, "_ANCHOR", gc.get_objects(generation=2)[0])
    try:
        for _ in range(6):
            gc.collect(1)
            kept.append(torch.ones(1))
            assert {id(tensor) for tensor in kept} <= {id(obj) for obj in finder.find()}
    finally:
        gc.freeze()
    assert all(n < looked_at[0] / 2 for n in looked_at[3:])


@pytest.mark.parametrize("seed", range(8))
def test_a_finder_agrees_with_a_full_search_in_any_order_of_events(seed: int) -> None:
    finder, draw = LiveObjectFinder(Tensor), random.Random(seed)
    kept: list[torch.Tensor] = []
    gc.unfreeze()
    gc.disable()
    try:
        for _ in range(40):
            event = draw.choice(["make", "make", "make many", "drop", "freeze", "unfreeze", "collect", "search"])
            if event.startswith("make"):
                kept += [torch.ones(1) for _ in range(50 if event == "make many" else 1)]
            elif event == "drop" and kept:
                del kept[draw.randrange(len(kept)) :]
            elif event == "freeze":
                gc.freeze()
            elif event == "unfreeze":
                gc.unfreeze()
                gc.collect(1)
            elif event == "collect":
                gc.collect(draw.choice([0, 1, 1, 1, 2]))
            elif event == "search":
                everything = {id(tensor) for tensor in live_objects(Tensor)}
                assert {id(obj) for obj in finder.find()} == everything
    finally:
        gc.freeze()
        gc.enable()


def test_a_finder_keeps_nothing_and_leaves_no_cycle() -> None:
    finder = LiveObjectFinder(Tensor)
    gc.disable()
    try:
        for _ in range(2):
            tensor = torch.ones(1)
            end = weakref.ref(tensor)
            assert any(obj is tensor for obj in finder.find())
            del tensor
            assert end() is None
    finally:
        gc.enable()
