"""Read the attributes of objects whose classes define `__slots__`."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any


def list_slots(obj: Any) -> list[types.MemberDescriptorType]:
    """Return the descriptors of all `__slots__` of an object's classes, except `__dict__` and `__weakref__`."""
    kinds = (vars(kind) for kind in type(obj).__mro__ if "__slots__" in vars(kind))
    return [slot for table in kinds for slot in table.values() if isinstance(slot, types.MemberDescriptorType)]


def read_slots(obj: Any) -> Iterator[Any]:
    """Yield the values of the attributes that an object stores in `__slots__`."""
    for slot in list_slots(obj):
        with contextlib.suppress(AttributeError):  # an empty slot
            yield slot.__get__(obj)
