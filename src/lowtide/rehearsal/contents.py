"""What dicts, lists, deques and sets hold, put back as it was.

Past the methods of classes of their own, which may make something when asked, or take no other constructor's arguments.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import is_dataclass
from itertools import chain
from typing import Any

LARGEST = 10_000
"""Entries of a container."""

_KINDS: tuple[Any, ...] = (OrderedDict, dict, list, deque, set)


def kind_of(thing: Any) -> Any:
    """Which of these kinds of containers a thing is; None for none."""
    return next((kind for kind in _KINDS if isinstance(thing, kind)), None)


class Contents:
    """What one container holds now."""

    __slots__ = ("_container", "_kind", "held")

    def __init__(self, container: Any) -> None:
        self._container, self._kind = container, kind_of(container)
        self.held: list[Any] = self._now()
        """In its order; of a dict each key and then what is there."""

    def _now(self) -> list[Any]:
        if issubclass(self._kind, dict):
            return [*chain.from_iterable(self._kind.items(self._container))]
        return [*self._kind.__iter__(self._container)]

    def restore(self) -> None:
        """Have it hold the same objects again, if it does not."""
        now, container, kind = self._now(), self._container, self._kind
        if len(now) == len(self.held) and all(a is b for a, b in zip(now, self.held, strict=True)):
            return
        kind.clear(container)
        if issubclass(kind, dict):
            for key, content in zip(self.held[::2], self.held[1::2], strict=True):
                kind.__setitem__(container, key, content)
        else:
            (kind.update if kind is set else kind.extend)(container, self.held)


def contents_in(batch: Any) -> list[Contents]:
    """Of all containers in a batch, but of those that are data by their size, and of mappings and dataclasses in it."""
    found: list[Contents] = []
    seen: dict[int, Any] = {}
    pending = [batch]
    while pending:
        thing = pending.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if (kind := kind_of(thing)) is not None:
            if kind.__len__(thing) <= LARGEST:
                found.append(Contents(thing))
                pending += found[-1].held
        elif isinstance(thing, tuple):
            pending += thing
        elif isinstance(thing, Mapping) or is_dataclass(thing):
            pending.append(getattr(thing, "__dict__", None))
    return found
