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
    is checked once. No code of an object is run: `isinstance` would run a proxy's.
    """
    return _select_instances(gc.get_objects(), classes)


class LiveObjectFinder:
    """Finder of the live objects of some classes, for frequent use: most searches look only at the youngest objects.

    Objects that survive a collection of the middle generation move to the end of the oldest generation, which only a
    full collection reorders. Until a full collection, all objects of the oldest generation in front of a marker (an
    object that an earlier search made) are known. `gc.freeze` hides the markers. `gc.unfreeze` puts frozen objects,
    `_ANCHOR` among them, behind all others; they are found once a generation has been collected. Known objects are held
    by weak references.
    """

    def __init__(self, *classes: type) -> None:
        self._classes = (*classes, _Marker)
        self._known: dict[int, weakref.ref[object]] = {}
        """Objects that the last search found, by id."""
        self._collections: tuple[int, ...] = ()
        """Numbers of collections at the last search."""
        self._marker = _Marker()
        """Object made by the last search, so that it is younger than all known ones."""
        self._boundary: _Marker | None = None
        """Marker in the oldest generation, in front of which all objects are known."""

    def find(self) -> list[object]:
        """Return the live objects, except for those that `gc.freeze` has hidden."""
        before = _collections()
        unseen = self._unseen(before) if _HAS_GENERATIONS else None
        if unseen is not None and _collections() == before:
            young: list[object] = _select_instances(unseen, self._classes)
            if any(obj is self._marker for obj in young):
                old = [obj for ref in self._known.values() if (obj := ref()) is not None]
                return self._remember((*old, *young), before)
        return self._remember(live_objects(*self._classes), before)

    def _unseen(self, collections: tuple[int, ...]) -> list[object] | None:
        """Return all objects that may be new since the last search; None if these can't be told from known objects."""
        if collections[-1:] != self._collections[-1:]:
            return None
        unseen: list[object] = gc.get_objects(generation=0) + gc.get_objects(generation=1)
        if collections != self._collections:
            old = gc.get_objects(generation=2)
            first = next((index for index, obj in enumerate(old[:_FIRST]) if obj is _ANCHOR), None)
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
    """Object made by a search; if the next search can't find it, `gc.freeze` was called.

    `gc.get_freeze_count` would reveal the call too, but counts all frozen objects.
    """


_ANCHOR = object.__repr__
_FIRST = 16
"""Number of objects at the beginning of the oldest generation that are searched for the anchor, an object as old as the
interpreter. After `gc.unfreeze` the anchor lies further back.
"""

_HAS_GENERATIONS = sys.version_info < (3, 14)
"""True if the garbage collector has the three generations that `LiveObjectFinder` counts on."""


def _collections() -> tuple[int, ...]:
    """Return numbers that change whenever a collection may have moved objects to the oldest generation."""
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
