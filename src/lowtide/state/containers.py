"""Restore the containers in a batch to their contents: `batch.pop("labels")` is common in steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any

from lowtide.state.bindings import Bindings, bind_contents, kind_of

LARGEST = 10_000
"""Largest number of entries of a container in a batch that is restored; larger ones are data."""


def make_container_restorer(batch: Any) -> Callable[[], None]:
    """Return a function that restores the present contents of all containers in a batch.

    Containers so large that they must be data are excluded. Mappings and dataclasses in a batch are searched too.
    """
    bindings: list[Bindings] = []
    visited: dict[int, Any] = {}
    pending = [batch]
    while pending:
        obj = pending.pop()
        if id(obj) in visited:
            continue
        visited[id(obj)] = obj
        if (kind := kind_of(obj)) is not None:
            if kind.__len__(obj) <= LARGEST:
                bindings.append(bind_contents(obj))
                pending += bindings[-1].held
        elif isinstance(obj, tuple):
            pending += obj
        elif isinstance(obj, Mapping) or is_dataclass(obj):
            pending.append(getattr(obj, "__dict__", None))

    def restore_all() -> None:
        for places in bindings:
            places.restore()

    return restore_all
