"""Find the objects of some classes among all that the garbage collector knows."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def live_objects(*classes: type[T]) -> list[T]:
    """Return the live objects of `classes` and of their subclasses, but for those that `gc.freeze` has hidden.

    A process that has imported torch and transformers holds a million objects of a few thousand classes, so each class
    is looked at once. No code of an object is run: `isinstance` would run a proxy's.
    """
    return _of_classes(gc.get_objects(), classes)


class LiveObjectFinder:
    """Search for the live objects of some classes that is repeated often, and mostly looks at the youngest objects
    only.

    Objects that survive a collection of the middle generation are moved to the oldest. As long as none was collected,
    the oldest generation has nothing but what the last full search has seen. Objects are remembered by weak references.
    """

    def __init__(self, *classes: type) -> None:
        self._classes = classes
        self._known: dict[int, weakref.ref[object]] = {}
        self._state: tuple[int, ...] = ()

    def find(self) -> list[object]:
        """Return the live objects, but for those that `gc.freeze` has hidden."""
        before = _moves_to_oldest()
        if _HAS_GENERATIONS and before == self._state:
            young: list[object] = []
            for number in (0, 1):
                young += _of_classes(gc.get_objects(generation=number), self._classes)
            if _moves_to_oldest() == before:
                old = [obj for ref in self._known.values() if (obj := ref()) is not None]
                return self._remember({id(obj): obj for obj in (*old, *young)}.values())
        objects = self._remember(live_objects(*self._classes))
        self._state = before  # a collection in the meantime makes the next search a full one
        return objects

    def _remember(self, objects: Iterable[object]) -> list[object]:
        survivors = list(objects)
        self._known = {id(obj): weakref.ref(obj) for obj in survivors}
        return survivors


_HAS_GENERATIONS = sys.version_info < (3, 14)
"""True if the garbage collector has the three generations that `LiveObjectFinder` counts on."""


def _moves_to_oldest() -> tuple[int, ...]:
    """Return numbers that change whenever objects may have been moved to the oldest generation."""
    return *(generation["collections"] for generation in gc.get_stats()[1:]), gc.get_freeze_count()


def _of_classes(everything: Iterable[object], classes: tuple[type[T], ...]) -> list[T]:
    is_wanted: dict[type, bool] = {}
    objects: list[T] = []
    for obj in everything:
        kind = type(obj)
        try:
            wanted = is_wanted[kind]
        except KeyError:
            wanted = is_wanted[kind] = issubclass(kind, classes)
        except TypeError:  # a metaclass makes its classes unhashable
            wanted = issubclass(kind, classes)
        if wanted:
            objects.append(obj)  # type: ignore[arg-type]
    return objects
