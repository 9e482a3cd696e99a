"""Find the instances of some classes among all objects that the garbage collector tracks."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def live_objects(*classes: type[T]) -> list[T]:
    """Return the live instances of `classes` and of their subclasses, except those that `gc.freeze` has hidden.

    A process that has imported torch and transformers holds a million objects of a few thousand classes, so each class
    is checked once, by `issubclass`. `isinstance` would run a proxy object's code, because it reads `__class__`.
    """
    return _select_instances(gc.get_objects(), classes)


class LiveObjectFinder:
    """Repeated search for the live instances of some classes, which mostly looks only at objects that are new.

    The garbage collector appends survivors of generation 1 to the end of generation 2, and reorders generation 2 only
    in a full collection. So each search creates a marker object. Once a marker is in generation 2, all objects in front
    of the marker have been searched, until the next full collection. Instances that were found are remembered by weak
    references.

    `gc.freeze` hides the markers, so the next search looks at all objects. `gc.unfreeze` moves the frozen objects,
    `_ANCHOR` among them, to the end of generation 2. The first search after the next collection then looks at all
    objects.
    """

    def __init__(self, *classes: type) -> None:
        self._classes = (*classes, _Marker)
        self._known: dict[int, weakref.ref[object]] = {}
        """Objects that the last search found, by id."""
        self._collections: tuple[int, ...] = ()
        """Numbers of collections of generations 1 and 2 at the last search."""
        self._marker = _Marker()
        """Object created by the last search, so that it is younger than all objects that were found."""
        self._boundary: _Marker | None = None
        """Marker in generation 2; all objects in front of the marker have been searched."""

    def find(self) -> list[object]:
        """Return the live instances of the finder's classes, except those that `gc.freeze` has hidden."""
        before = _count_collections()
        unseen = self._list_new_objects(before) if _HAS_GENERATIONS else None
        if unseen is not None and _count_collections() == before:
            young: list[object] = _select_instances(unseen, self._classes)
            if any(obj is self._marker for obj in young):
                old = [obj for ref in self._known.values() if (obj := ref()) is not None]
                return self._remember((*old, *young), before)
        return self._remember(live_objects(*self._classes), before)

    def _list_new_objects(self, collections: tuple[int, ...]) -> list[object] | None:
        """Return all objects that may be new since the last search, or None if the generations don't tell.

        `collections` are the current results of `_count_collections`.
        """
        if collections[-1:] != self._collections[-1:]:
            return None
        unseen: list[object] = gc.get_objects(generation=0) + gc.get_objects(generation=1)
        if collections != self._collections:
            old = gc.get_objects(generation=2)
            first = next((index for index, obj in enumerate(old[:_ANCHOR_SEARCH_LIMIT]) if obj is _ANCHOR), None)
            last = next((index for index in range(len(old) - 1, -1, -1) if old[index] is self._boundary), None)
            if first is None or last is None:
                return None
            unseen += old[:first] + old[last:]
        return unseen

    def _remember(self, objects: Iterable[object], collections: tuple[int, ...]) -> list[object]:
        survivors = {id(obj): obj for obj in objects}
        if id(self._marker) not in survivors:  # hidden by `gc.freeze`
            self._boundary = None
        elif collections != self._collections:  # the marker is in the oldest generation now
            self._boundary = self._marker
        self._marker = _Marker()
        self._collections = collections  # a collection during this search makes the next one look further
        survivors = {number: obj for number, obj in survivors.items() if type(obj) is not _Marker}
        self._known = {number: weakref.ref(obj) for number, obj in survivors.items()}
        return list(survivors.values())


class _Marker:
    """Object that a search creates. If the next search does not find the object, `gc.freeze` was called.

    `gc.get_freeze_count` would reveal that call too, but takes longer: it counts all frozen objects.
    """


_ANCHOR = object.__repr__
_ANCHOR_SEARCH_LIMIT = 16
"""Number of objects at the beginning of generation 2 that are searched for `_ANCHOR`, an object as old as the
interpreter. After `gc.unfreeze`, `_ANCHOR` lies further back.
"""

_HAS_GENERATIONS = sys.version_info < (3, 14)
"""True if the garbage collector has the three generations that `LiveObjectFinder` relies on."""


def _count_collections() -> tuple[int, ...]:
    """Return the numbers of collections of generations 1 and 2, the only ones that move objects to generation 2."""
    return tuple(generation["collections"] for generation in gc.get_stats()[1:])


def _select_instances(everything: Iterable[object], classes: tuple[type[T], ...]) -> list[T]:
    is_wanted: dict[type, bool] = {}
    objects: list[T] = []
    for obj in everything:
        kind = type(obj)
        try:
            wanted = is_wanted[kind]
        except KeyError:
            wanted = is_wanted[kind] = issubclass(kind, classes)
        except TypeError:  # a metaclass makes its classes unhashable; `issubclass` of abstract classes hashes them, too
            wanted = any(base is cls for base in kind.__mro__ for cls in classes)
        if wanted:
            objects.append(obj)  # type: ignore[arg-type]
    return objects
