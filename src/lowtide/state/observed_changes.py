"""Changes that are not restored: of iterators, files, loaders, data sets, services, and objects too large to copy.

Such objects communicate with something outside, or can't take back an item once it was consumed. They are inspected,
never asked for their next item, and each change is reported by name.
"""

from __future__ import annotations

import contextvars
import functools
import io
import itertools
import reprlib
import types
import zlib
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from operator import length_hint
from typing import Any, Final

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lowtide._torch.tensors import find_parts
from lowtide.memory.frame_locals import local_variables
from lowtide.state.bindings import kind_of
from lowtide.state.introspection import is_user_code, origin
from lowtide.units import format_bytes
from lowtide.utils.object_slots import list_slots

SUMMED_BYTES = 2**28
"""Largest size in bytes of arrays whose contents are compared."""

MOST_SHOWN = 8

CACHE: Final = type(functools.lru_cache(int))
"""Class of the functions that `functools.lru_cache` returns."""

_WORDS = (int, float, complex, str, bytes, type(None), Enum)
_FILE: Final[type[Any]] = io.IOBase.__mro__[1]  # no ABC, which would hash the class of each object
_DATA = {"datasets", "multiprocessing", "queue", "_queue", "socket", "subprocess", "concurrent", "asyncio", "sqlite3"}
"""Packages of data and of data transport."""
_OBSERVERS = ("torch.profiler", "torch.autograd.", "torch.utils.tensorboard", "torch.utils.data")
_OUTSIDE = _DATA | {"_thread", "threading", "_io", "ssl", "_ssl"}
"""Packages of external resources: a library's object with an attribute of one depends on outside state."""


def is_excluded(obj: Any) -> bool:
    """Return True if `obj` is an iterator, file, loader, data set, or library object that uses external resources."""
    kind = type(obj)
    if isinstance(obj, nn.Module):
        return False
    if hasattr(kind, "__next__") or isinstance(obj, (_FILE, DataLoader, Dataset, Sampler)):
        return True
    defined_in = kind.__module__
    if defined_in.partition(".")[0] in _DATA or defined_in.startswith(_OBSERVERS):
        return True
    attributes = getattr(obj, "__dict__", None)
    if type(attributes) is not dict or is_user_code(kind):
        return False
    return any(type(content).__module__.partition(".")[0] in _OUTSIDE for content in attributes.values())


def describe_unrestored(changes: tuple[str, ...]) -> str:
    """Format descriptions of changes that were not restored as one line."""
    more = f", and {len(changes) - MOST_SHOWN} more" if len(changes) > MOST_SHOWN else ""
    return f"not put back: {', '.join(changes[:MOST_SHOWN])}{more}"


class WatchedObject:
    """An object that is not restored, and its observable state at construction."""

    __slots__ = ("_before", "obj")

    def __init__(self, obj: Any) -> None:
        self.obj = obj
        self._before = dict(_read_observable_state(obj))

    def changes(self) -> Iterator[tuple[str, str]]:
        """Yield the changes since construction: a name within the object, and a description."""
        now = dict(_read_observable_state(self.obj))
        for name in {**self._before, **now}:
            before, after = self._before.get(name, _NOTHING), now.get(name, _NOTHING)
            if before is not after and before != after:
                if isinstance(self.obj, Tensor | np.ndarray):
                    parts = find_parts(self.obj) if isinstance(self.obj, Tensor) else (self.obj,)
                    yield name, f"was written to ({format_bytes(sum(part.nbytes for part in parts))})"
                else:
                    yield name, f"went from {_quote(before)} to {_quote(after)}"


class _Unquoted(str):
    """Text that is printed without quotes."""

    __slots__ = ()


_NOTHING = _Unquoted("nothing")


def _quote(content: Any) -> str:
    return str(content) if isinstance(content, _Unquoted) else reprlib.repr(content)


def _read_observable_state(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the observable numbers, strings and lengths of an object, each with its name within it."""
    if isinstance(obj, Tensor):
        if not obj.is_inference():
            yield "", (obj._version, *(part.untyped_storage().data_ptr() for part in find_parts(obj)))
    elif isinstance(obj, np.ndarray):
        if obj.nbytes <= SUMMED_BYTES and not obj.dtype.hasobject:
            yield "", zlib.crc32(np.ascontiguousarray(obj).view(np.uint8).data)
    elif isinstance(obj, types.GeneratorType):
        if origin(obj.gi_code.co_filename) != "user":
            return
        if obj.gi_frame is not None:
            with local_variables(obj.gi_frame) as variables:
                yield from ((f".{name}", content) for name, content in _read_observable_contents(variables))
        else:
            yield "", _Unquoted("its end")
    elif isinstance(obj, _FILE):
        with suppress(OSError, ValueError):
            yield "", _Unquoted(f"position {obj.tell()}")
    elif isinstance(obj, itertools.count):
        yield "", _Unquoted(repr(obj))
    elif isinstance(obj, contextvars.ContextVar):
        yield from ((f".{obj.name}", content) for _, content in _read_observable_contents({"": obj.get(None)}))
    elif isinstance(obj, CACHE):
        n = obj.cache_info().misses
        yield "", _Unquoted("1 computed result" if n == 1 else f"{n:,} computed results")
    elif isinstance(obj, np.random.SeedSequence):
        yield ".n_children_spawned", obj.n_children_spawned
    else:
        if (kind := kind_of(obj)) is not None:
            yield "", _format_entry_count(kind.__len__(obj))
        elif type(obj).__module__ in ("builtins", "collections", "itertools"):
            with suppress(TypeError):
                yield "", _Unquoted(f"{length_hint(obj, 0):,} to come")
        attributes = getattr(obj, "__dict__", None)
        contents = dict(attributes) if type(attributes) is dict else {}
        for slot in list_slots(obj):
            with suppress(AttributeError):
                contents[slot.__name__] = slot.__get__(obj)
        yield from ((f".{name}", content) for name, content in _read_observable_contents(contents))


def _read_observable_contents(table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, content in table.items():
        if isinstance(content, _WORDS):
            yield name, content
        elif (kind := kind_of(content)) is not None:
            yield name, _format_entry_count(kind.__len__(content))


def _format_entry_count(number: int) -> _Unquoted:
    return _Unquoted("1 entry" if number == 1 else f"{number:,} entries")
