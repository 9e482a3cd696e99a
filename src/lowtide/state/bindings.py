"""Restorable bindings of Python objects: container entries, slots, variables, class attributes.

Numbers and strings are immutable: a place that refers to the same objects again holds the same numbers, so only
references are copied. All access bypasses methods of user-defined classes, because these may create something when
called.
"""

from __future__ import annotations

import contextvars
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import is_dataclass
from enum import Enum
from itertools import chain, islice, zip_longest
from operator import is_
from typing import Any

import torch

from lowtide._torch.autograd_graph import producer
from lowtide.utils.object_slots import list_slots

LARGEST = 1000
"""Largest number of entries of a container that are searched for a graph."""

_KINDS: tuple[Any, ...] = (OrderedDict, dict, list, deque, set)
_COUNTS = (int, str, bytes, type(None), Enum)
"""Types of contents that are equal in each run of the same step; floats are excluded, because times are floats."""


def kind_of(obj: Any) -> Any:
    """Return the container type in `_KINDS` of an object; None if the object is no container."""
    return next((kind for kind in _KINDS if isinstance(obj, kind)), None)


class Missing:
    """Marker for a variable or attribute that has no value."""


def has_graph(content: Any) -> bool:
    """Return True if `content` is a tensor with a graph, or a collection or dataclass that contains such a tensor."""
    if isinstance(content, torch.Tensor):
        return producer(content) is not None
    if isinstance(content, dict):
        inside: Iterable[Any] = dict.values(content)
    elif isinstance(content, list | tuple):
        inside = content
    elif is_dataclass(content) and not isinstance(content, type):
        inside = getattr(content, "__dict__", {}).values()
    else:
        return False
    return any(isinstance(x, torch.Tensor) and producer(x) is not None for x in islice(iter(inside), LARGEST))


class WeakContent:
    """A weak reference to recorded content that has an autograd graph, so that a step can free the previous step's
    graph.
    """

    __slots__ = ("_keys", "_kind", "_known", "_reference")

    def __init__(self, content: Any) -> None:
        self._reference: Callable[[], Any] = lambda: None
        self._known, self._kind, self._keys = id(content), kind_of(content), 0
        try:
            self._reference = weakref.ref(content)
        except TypeError:
            self._keys = len(content)

    def content(self, now: Any) -> Any:
        """Return the recorded content if it is still alive; otherwise `now`, the present content of the place.

        Lists and dicts allow no weak references. If the place still holds the same list or dict, entries that were
        appended to it are removed.
        """
        if (content := self._reference()) is not None:
            return content
        if id(now) == self._known and self._kind in (list, dict, OrderedDict) and isinstance(now, self._kind):
            for key in list(islice(now, self._keys, None)) if self._kind is not list else ():
                self._kind.__delitem__(now, key)
            if self._kind is list:
                list.__delitem__(now, slice(self._keys, None))
        return now


def _weakened(content: Any) -> Any:
    return content if type(content) in ATOMS or not has_graph(content) else WeakContent(content)


ATOMS = (str, int, float, bool, types.NoneType, types.FunctionType, bytes, complex)


class Bindings:
    """Base class for the places in one object that refer to other objects, such as dict entries or attributes.

    The contents of the places are recorded at construction.
    """

    __slots__ = ("container", "held")

    container: Any
    """The object whose places these are."""

    def __init__(self, *, weakly: bool) -> None:
        now = self.current()
        self.held: list[Any] = list(map(_weakened, now)) if weakly and len(now) <= LARGEST else now
        """Contents in order; for named places each name, followed by its content."""

    def current(self) -> list[Any]:
        """Return the present contents of the places. For places with names, each content comes after its name."""
        raise NotImplementedError

    def store(self, contents: list[Any]) -> None:
        """Store `contents` in the places. `Missing` clears a place."""
        raise NotImplementedError

    def restore(self) -> None:
        """Put the recorded contents back into their places."""
        if (now := self.current()) and len(now) == len(self.held) and all(map(is_, now, self.held)):
            return
        contents = self._contents(now)
        if len(now) != len(contents) or not all(map(is_, now, contents)):
            self.store(contents)

    def _contents(self, now: list[Any]) -> list[Any]:
        """Return the recorded contents, with weak references resolved; `now` are the present contents."""
        pairs = zip_longest(self.held, now[: len(self.held)], fillvalue=Missing)
        return [held.content(current) if type(held) is WeakContent else held for held, current in pairs]

    def counts(self) -> Iterator[tuple[str, Any]]:
        """Yield (name or index, present value) of each whole number or string that has changed.

        If entries were added or removed, ("", present number of entries) is yielded first.
        """
        now = self.current()
        if len(now) != len(self.held):
            yield "", len(now)
        for place, (content, before) in enumerate(zip(now, self.held, strict=False)):
            if content is not before and isinstance(content, _COUNTS):
                yield str(place), content

    def find_name(self, obj: Any) -> str | None:
        """Return the name of the place that holds `obj`, or None."""
        return next((f"[{place}]" for place, content in enumerate(self.held) if content is obj), None)


class NamedBindings(Bindings):
    """Places with names, such as the entries of a dict."""

    __slots__ = ()

    def _contents(self, now: list[Any]) -> list[Any]:
        current = dict(zip(now[::2], now[1::2], strict=True))
        contents = []
        for name, held in zip(self.held[::2], self.held[1::2], strict=True):
            content = held.content(current.get(name, Missing)) if type(held) is WeakContent else held
            contents += [] if content is Missing else [name, content]
        return contents

    def counts(self) -> Iterator[tuple[str, Any]]:
        before = dict(zip(self.held[::2], self.held[1::2], strict=True))
        for number, (name, content) in enumerate(self._pairs(self.current())):
            if before.get(name, Missing) is not content and isinstance(content, _COUNTS):
                # other names may be made anew in each run of the step, as weak references are
                yield repr(name) if isinstance(name, _COUNTS) else f"{type(name).__name__} {number}", content

    def find_name(self, obj: Any) -> str | None:
        return next((self._describe(name) for name, content in self._pairs(self.held) if content is obj), None)

    def _pairs(self, contents: list[Any]) -> Iterator[tuple[Any, Any]]:
        return zip(contents[::2], contents[1::2], strict=True)

    def _describe(self, name: Any) -> str:
        return f"[{name!r}]"


class Entries(NamedBindings):
    """Entries of a dict, except those named in `excluded`. `owner` is the class name if the dict holds attributes."""

    __slots__ = ("_excluded", "_kind", "_owner")

    def __init__(self, table: Any, *, weakly: bool = False, owner: str = "", excluded: Collection[str] = ()) -> None:
        self.container, self._kind, self._owner, self._excluded = table, kind_of(table), owner, excluded
        super().__init__(weakly=weakly)

    def current(self) -> list[Any]:
        entries = self._kind.items(self.container)
        if self._excluded:
            entries = [(name, content) for name, content in entries if name not in self._excluded]
        return [*chain.from_iterable(entries)]

    def store(self, contents: list[Any]) -> None:
        table, kind = self.container, self._kind
        wanted = dict(zip(contents[::2], contents[1::2], strict=True))
        for name in [name for name in kind.keys(table) if name not in wanted and name not in self._excluded]:
            kind.__delitem__(table, name)
        for name, content in wanted.items():
            if not kind.__contains__(table, name) or kind.__getitem__(table, name) is not content:
                kind.__setitem__(table, name, content)
        if [name for name in kind.keys(table) if name in wanted] != [*wanted]:
            for name, content in wanted.items():  # restored entries come last in a dict: restore the order, too
                kind.__delitem__(table, name)
                kind.__setitem__(table, name, content)

    def _describe(self, name: Any) -> str:
        return f"{self._owner}.{name}" if self._owner else f"[{name!r}]"


class Items(Bindings):
    """Items of a list, a deque or a set."""

    __slots__ = ("_kind",)

    def __init__(self, items: Any, *, weakly: bool = False) -> None:
        self.container, self._kind = items, kind_of(items)
        super().__init__(weakly=weakly)

    def current(self) -> list[Any]:
        return [*self._kind.__iter__(self.container)]

    def store(self, contents: list[Any]) -> None:
        contents = [content for content in contents if content is not Missing]
        if self._kind is list:
            list.__setitem__(self.container, slice(None), contents)
            return
        self._kind.clear(self.container)
        (set.update if self._kind is set else deque.extend)(self.container, contents)

    def restore(self) -> None:
        if self._kind is not set or {*map(id, self.current())} != {*map(id, self.held)}:
            super().restore()


def bind_contents(container: Any) -> Entries | Items:
    """Record the items of a dict or of another container, so that they can be restored."""
    kind = Entries if issubclass(kind_of(container), dict) else Items
    return kind(container)


class Slots(Bindings):
    """The `__slots__` of an object, even of a frozen dataclass, and their contents."""

    __slots__ = ("_slots",)

    def __init__(self, obj: Any, *, weakly: bool = False) -> None:
        self.container, self._slots = obj, list_slots(obj)
        super().__init__(weakly=weakly)

    def current(self) -> list[Any]:
        return [_in_slot(slot, self.container) for slot in self._slots]

    def store(self, contents: list[Any]) -> None:
        for slot, current, content in zip(self._slots, self.current(), contents, strict=True):
            if content is Missing and current is not Missing:
                slot.__delete__(self.container)
            elif content is not current:
                slot.__set__(self.container, content)

    def find_name(self, obj: Any) -> str | None:
        names = (slot.__name__ for slot, content in zip(self._slots, self.held, strict=True) if content is obj)
        return next((f"{type(self.container).__name__}.{name}" for name in names), None)


def _in_slot(slot: types.MemberDescriptorType, obj: Any) -> Any:
    try:
        return slot.__get__(obj)
    except AttributeError:
        return Missing


class Variables(Bindings):
    """Selected variables of a module or a class, each bound or unbound."""

    __slots__ = ("_names",)

    def __init__(self, table: dict[str, Any], names: Iterable[str], *, weakly: bool = False) -> None:
        self.container, self._names = table, tuple(names)
        super().__init__(weakly=weakly)

    def current(self) -> list[Any]:
        return [self.container.get(name, Missing) for name in self._names]

    def store(self, contents: list[Any]) -> None:
        for name, content in zip(self._names, contents, strict=True):
            if content is Missing:
                self.container.pop(name, None)
            else:
                self.container[name] = content

    def find_name(self, obj: Any) -> str | None:
        return next((name for name, content in zip(self._names, self.held, strict=True) if content is obj), None)


class Cell(Bindings):
    """Closure cell: a variable of a function that an inner function also uses."""

    __slots__ = ("_name",)

    def __init__(self, cell: types.CellType, name: str, *, weakly: bool = False) -> None:
        self.container, self._name = cell, name
        super().__init__(weakly=weakly)

    def current(self) -> list[Any]:
        try:
            return [self.container.cell_contents]
        except ValueError:
            return [Missing]

    def store(self, contents: list[Any]) -> None:
        if contents[0] is Missing:
            del self.container.cell_contents
        else:
            self.container.cell_contents = contents[0]

    def find_name(self, obj: Any) -> str | None:
        return self._name if self.held[0] is obj else None


class ContextValue(Bindings):
    """The value of a context variable. If the variable had none, a later value stays, because it can't be removed."""

    __slots__ = ()

    def __init__(self, variable: contextvars.ContextVar[Any], *, weakly: bool = False) -> None:
        self.container = variable
        super().__init__(weakly=weakly)

    def current(self) -> list[Any]:
        try:
            return [self.container.get()]
        except LookupError:
            return [Missing]

    def store(self, contents: list[Any]) -> None:
        if contents[0] is not Missing:
            self.container.set(contents[0])

    def find_name(self, obj: Any) -> str | None:
        return self.container.name if self.held[0] is obj else None


class ClassAttributes(NamedBindings):
    """Attributes of a class."""

    __slots__ = ()

    def __init__(self, kind: type, *, weakly: bool = False) -> None:
        self.container = kind
        super().__init__(weakly=weakly)

    def current(self) -> list[Any]:
        return [*chain.from_iterable(vars(self.container).items())]

    def store(self, contents: list[Any]) -> None:
        wanted, now = dict(self._pairs(contents)), dict(vars(self.container))
        for name in now.keys() - wanted.keys():
            type.__delattr__(self.container, name)
        for name, content in wanted.items():
            if now.get(name, Missing) is not content:
                type.__setattr__(self.container, name, content)

    def _describe(self, name: Any) -> str:
        return f"{self.container.__name__}.{name}"
