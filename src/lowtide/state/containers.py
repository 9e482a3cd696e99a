"""Restore the containers in a batch to their contents: `batch.pop("labels")` is common in steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any

from lowtide.state.bindings import Places, contents_of, kind_of

LARGEST = 10_000
"""Containers in a batch with more entries are data and left alone."""


def handing_back(batch: Any) -> Callable[[], None]:
    """Return a function that restores the present contents of all containers in a batch.

    Containers that are data by their size are excluded. Of other objects in a batch, mappings and dataclasses are
    searched.
    """
    found: list[Places] = []
    seen: dict[int, Any] = {}
    pending = [batch]
    while pending:
        thing = pending.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if (kind := kind_of(thing)) is not None:
            if kind.__len__(thing) <= LARGEST:
                found.append(contents_of(thing))
                pending += found[-1].held
        elif isinstance(thing, tuple):
            pending += thing
        elif isinstance(thing, Mapping) or is_dataclass(thing):
            pending.append(getattr(thing, "__dict__", None))

    def hand_back() -> None:
        for places in found:
            places.restore()

    return hand_back
