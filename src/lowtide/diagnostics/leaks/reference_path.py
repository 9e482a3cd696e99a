"""Paths of references from an object to the tensors that it keeps alive, written as code."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

ENTRIES = re.compile(r"\[\d+ entr(?:y|ies)\]")
"""Step of a path through a container whose entries have no names."""
_ENTRY = re.compile(r"\[(?:\d+ entr(?:y|ies)|'.*')\]")
"""Step of a path through any container that is no tuple."""

CONTAINERS = (list, deque, set, frozenset, dict)

CACHED = "cache "
"""Step of a path from a function to the cache of its results."""

CYCLED = "itertools.cycle "
"""Step of a path from an `itertools.cycle` to the list of what it returns again."""


@dataclass(slots=True)
class ReferencePath:
    """Path of references from `obj` to tensors, which are given by number. `path` is written as code, from the outside
    in.
    """

    obj: Any
    tensors: set[int]
    path: tuple[str, ...] = ()
    entries: int | None = None
    """Total number of entries of the containers inside `obj`; None without any."""
    container: type | None = None
    attribute: str = ""
    """The part of the path from the outermost attribute of an object of a user's class on, such as
    `Reviews.cache[8 entries]`.
    """

    @property
    def all_entries(self) -> int | None:
        """Total number of entries on the path, including those of `obj` itself."""
        is_queue = isinstance(self.obj, deque) and self.obj.maxlen is not None  # bounded
        if is_queue or not isinstance(self.obj, list | deque | set | dict):
            return self.entries
        return len(self.obj) + (self.entries or 0)

    @property
    def gathers(self) -> bool:
        """Return True if the tensors are entries, without names, of the object."""
        return is_container(self.container) and bool(self.path) and self.path[0].startswith("[")

    @property
    def text(self) -> str:
        """The path as code."""
        return "".join(self.path)

    def shown(self, name: str, kind: str) -> tuple[str, str, str]:
        """Return three texts for a variable that holds tensors by this path: its description, the name of the part that
        holds them, and a key that is equal for all entries of one dict.
        """
        path = self.path
        if self.gathers:
            assert self.container is not None
            shown = f"{self.container.__name__} '{name}' {self.text}"
        else:
            shown = f"{kind} '{name}'" + (f" -> {self.text}" if path else "")
        if any(_ENTRY.fullmatch(step) for step in path[:-1]) and not ENTRIES.fullmatch(path[-1]):
            # the tensors are parts of entries
            steps = ("[..]" if _ENTRY.fullmatch(step) else step for step in path[:-1])
            full_name = "".join((name, *steps, path[-1]))
            return shown, full_name, full_name
        attributes = tuple(takewhile(lambda step: step.startswith("."), path))
        keys = tuple(takewhile(lambda step: step.startswith((".", "['")), path))
        leads_to_list = len(attributes) < len(keys) < len(path) and ENTRIES.fullmatch(path[len(keys)])
        grouped = "".join((name, *attributes))
        return shown, "".join((name, *keys)) if leads_to_list else grouped, grouped

    def owner(self, name: str) -> str:
        """Return the object that has the last attribute of the path, as code; empty if there is none, or it has no
        name.
        """
        if not self.path or not self.path[-1].startswith(".") or any(ENTRIES.fullmatch(step) for step in self.path):
            return ""
        return "".join((name, *self.path[:-1]))


def first_path(obj: Any, number: int) -> ReferencePath:
    """Return the path that begins at `obj`: a tensor, or a NumPy array over its memory or with it as an element."""
    if getattr(getattr(obj, "dtype", None), "hasobject", False):
        n = sum(element is not None for element in obj.flat)
        return ReferencePath(obj, {number}, (f"[{n} entr{'y' if n == 1 else 'ies'}]",), n, type(obj))
    return ReferencePath(obj, {number})


def is_container(kind: type | None) -> bool:
    return kind in CONTAINERS or (kind is not None and kind.__name__ == "ndarray")


def labels_in(container: Any) -> dict[int, str] | None:
    """Map ids of objects to their names in a tuple or dict; None if `container` is neither."""
    if isinstance(container, tuple):
        names = getattr(type(container), "_fields", ())
        return {id(obj): f".{names[n]}" if n < len(names) else f"[{n}]" for n, obj in enumerate(container)}
    if isinstance(container, dict):
        return {id(obj): f"[{key!r}]" for key, obj in list(dict.items(container)) if isinstance(key, str)}
    return {} if isinstance(container, CONTAINERS) else None


def attribute_name(step: str) -> str:
    """Return the name in `['name']` or `.name`."""
    return step.removeprefix(".").removeprefix("['").removesuffix("']")
