"""What dicts, lists, deques and sets hold, put back as it was.

Past the methods of classes of their own, which may make something when asked, or take no other constructor's arguments.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from itertools import chain
from typing import Any

LARGEST = 10_000
"""Containers in a batch with more entries are data: they are left alone."""

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


def handing_back(batch: Any) -> Callable[[], None]:
    """What this gives has all containers in a batch hold what they hold now: `batch.pop("labels")` is common in steps.

    But for those that are data by their size. Of objects in it mappings and dataclasses are looked into.
    """
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

    def hand_back() -> None:
        for contents in found:
            contents.restore()

    return hand_back
