"""Linked lists: chains of objects of one class, in which each object refers to the next one by an attribute."""

from __future__ import annotations

import gc
from typing import Any

LEAST_LINKS = 3
"""Smallest number of linked objects that count as a list."""


class LinkedObjects:
    """Finder of linked lists among all live objects. It keeps objects alive, so use it once and drop it."""

    def __init__(self) -> None:
        self._before: dict[type, dict[int, Any]] = {}  # class -> id of an object -> the object that refers to it

    def find_head(self, obj: Any) -> tuple[Any, int] | None:
        """Return the first object and the length of the linked list that contains `obj`; None if it is in no list."""
        kind = type(obj)
        if kind not in self._before:
            self._before[kind] = _map_links(kind)
        before = self._before[kind]
        visited = {id(obj)}
        while (following := before.get(id(obj))) is not None and id(following) not in visited:
            obj = following
            visited.add(id(obj))
        behind = {id(link): n for n, link in before.items()}
        number, chain = id(obj), {id(obj)}
        while (number := behind.get(number, 0)) and number not in chain:
            chain.add(number)
        return (obj, len(chain)) if len(chain) >= LEAST_LINKS else None


def _map_links(kind: type) -> dict[int, Any]:
    """Map the id of each object of class `kind` to the object of the same class whose attribute refers to it."""
    links: dict[int, Any] = {}
    for obj in gc.get_objects():
        if type(obj) is kind:
            for value in _list_referents(obj):
                if type(value) is kind and value is not obj:
                    links.setdefault(id(value), obj)
    return links


def _list_referents(obj: Any) -> list[Any]:
    """Return the objects that `obj` refers to, and the values of its dicts.

    `obj.__dict__` is not read, because that would create a missing dict.
    """
    referents = gc.get_referents(obj)
    return [*referents, *(value for r in referents if type(r) is dict for value in r.values())]
