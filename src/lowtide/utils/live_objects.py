"""Find the objects of some classes among all that the garbage collector knows."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def live_objects(*classes: type[T]) -> list[T]:
    """Return the live objects of `classes` and of their subclasses, except for those that `gc.freeze` has hidden.

    A process that has imported torch and transformers holds a million objects of a few thousand classes, so each class
    is looked at once. No code of an object is run: `isinstance` would run a proxy's.
    """
    return _of_classes(gc.get_objects(), classes)


class LiveObjectFinder:
    """Search for the live objects of some classes, for frequent use: mostly it looks only at the youngest objects.

    Objects that survive a collection of the middle generation are moved to the oldest. Until the garbage collector has
    run, the oldest generation holds only objects that the last full search has seen. `gc.freeze` takes the youngest
    objects away, a marker with them; objects that `gc.unfreeze` gives back are found once a generation was collected.
    Objects are remembered by weak references.
    """

    def __init__(self, *classes: type) -> None:
        self._classes = (*classes, _Marker)
        self._known: dict[int, weakref.ref[object]] = {}
        self._collections: tuple[int, ...] = ()
        self._marker = _Marker()

    def find(self) -> list[object]:
        """Return the live objects, except for those that `gc.freeze` has hidden."""
        before = _collections()
        if _HAS_GENERATIONS and before == self._collections:
            young: list[object] = []
            for number in (0, 1):
                young += _of_classes(gc.get_objects(generation=number), self._classes)
            if _collections() == before and any(obj is self._marker for obj in young):
                old = [obj for ref in self._known.values() if (obj := ref()) is not None]
                return self._remember({id(obj): obj for obj in (*old, *young)}.values())
        objects = self._remember(live_objects(*self._classes))
        self._collections = before  # a collection in the meantime makes the next search a full one
        return objects

    def _remember(self, objects: Iterable[object]) -> list[object]:
        survivors = [obj for obj in objects if type(obj) is not _Marker]
        self._known = {id(obj): weakref.ref(obj) for obj in survivors}
        self._marker = _Marker()
        return survivors


class _Marker:
    """Young object whose move reveals a freeze: `gc.get_freeze_count` would reveal one too, but counts all frozen
    objects.
    """


_HAS_GENERATIONS = sys.version_info < (3, 14)
"""True if the garbage collector has the three generations that `LiveObjectFinder` counts on."""


def _collections() -> tuple[int, ...]:
    """Return numbers that change whenever a collection may have moved objects to the oldest generation."""
    return tuple(generation["collections"] for generation in gc.get_stats()[1:])


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
