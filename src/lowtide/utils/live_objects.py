"""Find the objects of some classes among all that the garbage collector knows."""

from __future__ import annotations

import gc
from typing import TypeVar

T = TypeVar("T")


def live_objects(*classes: type[T]) -> list[T]:
    """Return the live objects of `classes` and of their subclasses, but for those that `gc.freeze` has hidden.

    A process that has imported torch and transformers holds a million objects of a few thousand classes, so each class
    is looked at once. No code of an object is run: `isinstance` would run a proxy's.
    """
    is_wanted: dict[int, bool] = {}  # by id, for a metaclass may make its classes unhashable
    objects = []
    for obj in gc.get_objects():
        key = id(type(obj))
        wanted = is_wanted.get(key)
        if wanted is None:
            wanted = is_wanted[key] = issubclass(type(obj), classes)
        if wanted:
            objects.append(obj)
    return objects
