"""Objects of some classes among all that are alive, found without running any code of theirs."""

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn

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
