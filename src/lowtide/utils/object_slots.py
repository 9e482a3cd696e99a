"""Read the slots of objects."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any


def slots_of(obj: Any) -> list[types.MemberDescriptorType]:
    """Return the slot descriptors of an object, those of dataclasses included; built-in attributes do not count."""
    kinds = (vars(kind) for kind in type(obj).__mro__ if "__slots__" in vars(kind))
    return [slot for table in kinds for slot in table.values() if isinstance(slot, types.MemberDescriptorType)]


def in_slots(obj: Any) -> Iterator[Any]:
    """Yield the values in an object's slots."""
    for slot in slots_of(obj):
        with contextlib.suppress(AttributeError):  # an empty slot
            yield slot.__get__(obj)
