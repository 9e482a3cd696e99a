"""Changes that are not put back: of iterators, files, loaders, data sets, services, and objects too large to copy.

Such objects communicate with something outside, or can't take back an item once it was consumed. They are inspected,
never asked for their next item, and each change is reported by name.
"""

from __future__ import annotations

import io
import itertools
import reprlib
import types
import zlib
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from operator import length_hint
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lowtide.memory.frame_locals import local_variables
from lowtide.state.bindings import kind_of
from lowtide.state.introspection import is_users, origin
from lowtide.units import format_bytes
from lowtide.utils.object_slots import slots_of

SUMMED_BYTES = 2**28
"""Arrays with more bytes are not inspected."""

MOST_SAID = 8

_WORDS = (int, float, complex, str, bytes, type(None), Enum)
_DATA = {"datasets", "multiprocessing", "queue", "_queue", "socket", "subprocess", "concurrent", "asyncio", "sqlite3"}
"""Packages of data and of data transport."""
_WATCHING = ("torch.profiler", "torch.autograd.", "torch.utils.tensorboard", "torch.utils.data")
_OUTSIDE = _DATA | {"_thread", "threading", "_io", "ssl", "_ssl"}
"""Packages of external resources: a library's object with an attribute of one depends on outside state."""


def is_left_alone(thing: Any) -> bool:
    """Return True for iterators, files, loaders, data sets, and library objects that use external resources."""
    kind = type(thing)
    if isinstance(thing, nn.Module):
        return False
    if hasattr(kind, "__next__") or isinstance(thing, io.IOBase | DataLoader | Dataset | Sampler):
        return True
    defined_in = kind.__module__
    if defined_in.partition(".")[0] in _DATA or defined_in.startswith(_WATCHING):
        return True
    attributes = getattr(thing, "__dict__", None)
    if type(attributes) is not dict or is_users(kind):
        return False
    return any(type(content).__module__.partition(".")[0] in _OUTSIDE for content in attributes.values())


def not_put_back(changes: tuple[str, ...]) -> str:
    """Format changes as one line."""
    more = f", and {len(changes) - MOST_SAID} more" if len(changes) > MOST_SAID else ""
    return f"not put back: {', '.join(changes[:MOST_SAID])}{more}"


class Watched:
    """An object that is left alone, and its observable state."""

    __slots__ = ("_before", "thing")

    def __init__(self, thing: Any) -> None:
        self.thing = thing
        self._before = dict(_seen_of(thing))

    def changes(self) -> Iterator[tuple[str, str]]:
        """Yield the changes since then: a name within the object, and a description."""
        now = dict(_seen_of(self.thing))
        for name in {**self._before, **now}:
            before, after = self._before.get(name, _NOTHING), now.get(name, _NOTHING)
            if before is not after and before != after:
                if isinstance(self.thing, Tensor | np.ndarray):
                    yield name, f"was written to ({format_bytes(self.thing.nbytes)})"
                else:
                    yield name, f"went from {_said(before)} to {_said(after)}"


class _Said(str):
    """Text that is printed without quotes."""

    __slots__ = ()


_NOTHING = _Said("nothing")


def _said(content: Any) -> str:
    return str(content) if isinstance(content, _Said) else reprlib.repr(content)


def _seen_of(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the observable numbers, strings and lengths of an object, each with its name within it."""
    if isinstance(thing, Tensor):
        if not thing.is_inference():
            yield "", (thing._version, thing.untyped_storage().data_ptr())
    elif isinstance(thing, np.ndarray):
        if thing.nbytes <= SUMMED_BYTES and not thing.dtype.hasobject:
            yield "", zlib.crc32(np.ascontiguousarray(thing).view(np.uint8).data)
    elif isinstance(thing, types.GeneratorType):
        if origin(thing.gi_code.co_filename) != "user":
            return
        if thing.gi_frame is not None:
            with local_variables(thing.gi_frame) as variables:
                yield from ((f".{name}", content) for name, content in _words(variables))
        else:
            yield "", _Said("its end")
    elif isinstance(thing, io.IOBase):
        with suppress(OSError, ValueError):
            yield "", _Said(f"position {thing.tell()}")
    elif isinstance(thing, itertools.count):
        yield "", _Said(repr(thing))
    else:
        if (kind := kind_of(thing)) is not None:
            yield "", _entries(kind.__len__(thing))
        elif type(thing).__module__ in ("builtins", "collections", "itertools"):
            with suppress(TypeError):
                yield "", _Said(f"{length_hint(thing, 0):,} to come")
        attributes = getattr(thing, "__dict__", None)
        found = dict(attributes) if type(attributes) is dict else {}
        for slot in slots_of(thing):
            with suppress(AttributeError):
                found[slot.__name__] = slot.__get__(thing)
        yield from ((f".{name}", content) for name, content in _words(found))


def _words(table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, content in table.items():
        if isinstance(content, _WORDS):
            yield name, content
        elif (kind := kind_of(content)) is not None:
            yield name, _entries(kind.__len__(content))


def _entries(number: int) -> _Said:
    return _Said("1 entry" if number == 1 else f"{number:,} entries")
