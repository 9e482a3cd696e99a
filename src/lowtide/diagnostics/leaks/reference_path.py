"""Paths of references from an object to the tensors that it keeps alive, written as code."""

from __future__ import annotations

import gc
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

ENTRIES = re.compile(r"\[\d+ entr(?:y|ies)\]")
"""Step of a path through a container whose entries have no names."""
_ENTRY = re.compile(r"\[(?:\d+ entr(?:y|ies)|'.*')\]")
"""Step of a path through any container that is no tuple."""

_INDEX = re.compile(r"\[\d+\]")
"""Step of a path through a tuple."""

CONTAINERS = (list, deque, set, frozenset, dict)

CACHED = "cache "
"""Step of a path from a function to the cache of its results."""

TEED = "itertools.tee "
"""Step of a path from an `itertools.tee` to the items that it keeps until all its iterators have returned them."""

CYCLED = "itertools.cycle "
"""Step of a path from an `itertools.cycle` to the list of the items that it repeats."""


@dataclass(slots=True)
class ReferencePath:
    """Path of references from `obj` to tensors, given by their numbers. `path` holds its steps as code: `.cache`."""

    obj: Any
    tensors: set[int]
    path: tuple[str, ...] = ()
    containers: dict[int, int] = field(default_factory=dict)
    """Ids of unbounded containers inside `obj` -> numbers of their entries. All containers with named entries, such as
    dicts with string keys, count as one, which has the entries of the largest.
    """
    container: type | None = None
    attribute: str = ""
    """The end of the path, from the outermost attribute of a user's class on: `Reviews.cache[8 entries]`."""
    outermost: type | None = None
    """Class of the last container so far whose entries have no names."""
    innermost: type | None = None
    """Class of the first container on the way outwards from the tensors, namespaces and tuples excluded."""
    file: str = ""
    """Source file of the class in `attribute`."""

    @property
    def all_containers(self) -> dict[int, int]:
        """Like `containers`, including `obj` itself: ids of unbounded containers -> numbers of their entries."""
        is_queue = isinstance(self.obj, deque) and self.obj.maxlen is not None  # bounded
        is_counted = is_array_of_objects(self.obj) or is_block_of_tee(self.obj)
        if is_queue or not (isinstance(self.obj, list | deque | set | dict) or is_counted):
            return self.containers
        has_names = isinstance(self.obj, dict) and bool(self.path) and self.path[0].startswith("['")
        return merged(self.containers, {_NAMED if has_names else id(self.obj): n_entries(self.obj)})

    def including_its_object(self) -> ReferencePath:
        """Return a copy of the path whose `containers` include `obj` itself."""
        kind = next((kind for kind in CONTAINERS if isinstance(self.obj, kind)), None)
        return replace(self, containers=self.all_containers, innermost=self.innermost or kind)

    @property
    def is_keyed(self) -> bool:
        """True if the tensors are in an ordinary dict, or in the cache of a function.

        False for namespaces, and if more than one container on the path has entries without names.
        """
        n_unnamed = sum(bool(ENTRIES.fullmatch(step)) for step in self.path)
        kind = self.outermost if n_unnamed else self.innermost
        return n_unnamed <= 1 and (kind is dict or CACHED in self.path)

    @property
    def gathers(self) -> bool:
        """True if the path begins with an entry (`[8 entries]`) and leads through a container with unnamed entries."""
        return is_container(self.container) and bool(self.path) and self.path[0].startswith("[")

    @property
    def text(self) -> str:
        """The path, written as code: `.cache[8 entries]`."""
        return "".join(self.path)

    def shown(self, name: str, kind: str) -> tuple[str, str, str]:
        """Return three texts about the path, which begins at the variable `name`: description, name and key.

        The description states `kind` (as in "local variable"), the variable and the path. The name is that of the part
        that holds the tensors. The key is the same for all entries of one dict, all elements of tuples, and attributes
        whose names differ only in numbers.
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
            entry = "".join((name, *steps))
            # The same tensor may be several parts of tuples: the next state of one transition, the state of another.
            grouped = f"{entry}[..]" if _INDEX.fullmatch(path[-1]) else entry + path[-1]
            return shown, entry + path[-1], grouped
        attributes = tuple(takewhile(lambda step: step.startswith("."), path))
        keys = tuple(takewhile(lambda step: step.startswith((".", "['")), path))
        leads_to_list = len(attributes) < len(keys) < len(path) and ENTRIES.fullmatch(path[len(keys)])
        grouped = "".join((name, *attributes))
        return shown, "".join((name, *keys)) if leads_to_list else grouped, without_numbers(grouped)

    def find_outermost_container(self, name: str) -> str:
        """Return the code of the outermost container on the path whose entries have no names; "" if there is none.

        The path begins at the variable `name`.
        """
        before = tuple(takewhile(lambda step: not ENTRIES.fullmatch(step), self.path))
        return "".join((name, *before)) if len(before) < len(self.path) else ""

    def owner(self, name: str) -> str:
        """Return the code of the object whose attribute is the last step of the path, as in `model.cache`.

        Return "" if the path does not end at an attribute, or leads through entries without names. It begins at the
        variable `name`.
        """
        if not self.path or not self.path[-1].startswith(".") or any(ENTRIES.fullmatch(step) for step in self.path):
            return ""
        return "".join((name, *self.path[:-1]))


_NAMED = 0
"""Key in `ReferencePath.containers` for all containers with named entries. No object has this id."""


def merged(containers: Mapping[int, int], others: Mapping[int, int]) -> dict[int, int]:
    """Join two maps from ids of containers to numbers of entries, with the larger number for each container."""
    return {**containers, **{number: max(n, containers.get(number, 0)) for number, n in others.items()}}


def is_array_of_objects(obj: Any) -> bool:
    """Return True if `obj` is a NumPy array that refers to Python objects."""
    return type(obj).__name__ == "ndarray" and bool(getattr(getattr(obj, "dtype", None), "hasobject", False))


def is_block_of_tee(obj: Any) -> bool:
    """Return True if `obj` is a block of the internal queue of an `itertools.tee`."""
    return type(obj).__name__ == "_tee_dataobject"


def n_entries(container: Any) -> int:
    """Count the entries of a container, except None in an array of objects."""
    if is_array_of_objects(container):
        return sum(element is not None for element in container.flat)
    if is_block_of_tee(container):
        referents = gc.get_referents(container)  # the source, the next part of the queue, and the entries
        return len(referents) - 1 - any(map(is_block_of_tee, referents))
    return len(container)


def is_container(kind: type | None) -> bool:
    return kind in CONTAINERS or (kind is not None and kind.__name__ == "ndarray")


def map_labels(container: Any) -> dict[int, str] | None:
    """Map ids of a container's entries to their names as code: `.field`, `[0]` or `['key']`.

    Return an empty map if the entries have no names, and None if `container` is not a container.
    """
    if isinstance(container, tuple):
        names = getattr(type(container), "_fields", ())
        return {id(obj): f".{names[n]}" if n < len(names) else f"[{n}]" for n, obj in enumerate(container)}
    if isinstance(container, dict):
        return {id(obj): f"[{key!r}]" for key, obj in list(dict.items(container)) if isinstance(key, str)}
    is_container = isinstance(container, CONTAINERS) or is_array_of_objects(container) or is_block_of_tee(container)
    return {} if is_container else None


def without_numbers(path: str) -> str:
    """Return the path with `*` in place of the numbers in its attributes' names."""
    name, dot, attributes = path.partition(".")
    return name + dot + re.sub(r"\d+", "*", attributes)


def attribute_name(step: str) -> str:
    """Return the name in a step of a path, `['name']` or `.name`."""
    return step.removeprefix(".").removeprefix("['").removesuffix("']")
