"""Whose code a function is, and what it can find by name. Nothing of it is run."""

from __future__ import annotations

import contextlib
import functools
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

import lowtide

_OURS = (str(Path(torch.__file__).parent), str(Path(lowtide.__file__).parent))
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OPAQUE = {"_thread", "builtins", "contextlib", "importlib", "logging", "numpy", "re", "threading", "weakref"}
_WATCHING = ("lowtide.estimator.", "lowtide.script.")


def is_opaque(kind: type) -> bool:
    """Whether what objects of a class refer to is no part of a step.

    These are the interpreter's, and those of Lowtide's that watch the step, as from an optimizer's hook, and go on.
    """
    return kind.__module__.partition(".")[0] in _OPAQUE or kind.__module__.startswith(_WATCHING)


@functools.lru_cache(maxsize=4096)
def origin(filename: str) -> str:
    """Whose code a file is: "ours" (torch's or Lowtide's), a "library"'s or the "user"'s."""
    if filename.startswith(_OURS):
        return "ours"
    if filename.startswith(_LIBRARIES) or filename.startswith("<frozen"):
        return "library"
    return "user"


def is_users(thing: FunctionType | ModuleType | type) -> bool:
    """Whether a function, module or class is of the user's own code."""
    if isinstance(thing, FunctionType):
        return origin(thing.__code__.co_filename) == "user"
    module = thing if isinstance(thing, ModuleType) else sys.modules.get(thing.__module__)
    file = getattr(module, "__file__", None)
    if file is None:  # not of a file: built in, or made by hand
        return module is not None and module.__spec__ is None
    return origin(file) == "user"


def names_in(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes that code uses, that of the functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def variables(function: FunctionType) -> Iterator[tuple[Any, str, Any]]:
    """The globals that a function names, those of the user's modules that it names, and its cells.

    Of each where it is (a dict or a cell), its name there and its content.
    """
    names = sorted(set(names_in(function.__code__)))
    found: list[tuple[Any, str, Any]]
    found = [(function.__globals__, n, function.__globals__[n]) for n in names if n in function.__globals__]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # empty
            found.append((cell, "", cell.cell_contents))
    seen = {id(function.__globals__)}
    for place, name, content in found:  # grows while it is walked
        if not isinstance(content, ModuleType):
            yield place, name, content
        elif is_users(content) and id(table := vars(content)) not in seen:
            seen.add(id(table))
            found += ((table, inside, table[inside]) for inside in names if inside in table)


class Named:
    """What code that was met names of objects that were met: `trainer.step(x)` leads to `step` of a trainer.

    Each is told once, whichever of the two is met first. `names` are taken to be named by code.
    """

    def __init__(self, *names: str) -> None:
        self._names: dict[str, None] = dict.fromkeys(names)  # in the order in which they were met
        self._tables: list[dict[str, Any]] = []
        self._kinds: set[type] = set()

    def code(self, function: FunctionType) -> list[Any]:
        """The code of a function was met: attributes that it names, of what was met so far."""
        new = sorted(set(names_in(function.__code__)) - self._names.keys())
        self._names.update(dict.fromkeys(new))
        return [_within(table[name]) for table in self._tables for name in new if name in table]

    def thing(self, thing: Any) -> list[Any]:
        """An object, or a class itself, was met: its attributes that were named so far."""
        tables = [] if isinstance(thing, type) or not hasattr(thing, "__dict__") else [vars(thing)]
        kinds = (thing if isinstance(thing, type) else type(thing)).__mro__
        new = [kind for kind in kinds if kind not in self._kinds and is_users(kind)]
        self._kinds.update(new)
        tables += [dict(vars(kind)) for kind in new]
        self._tables += tables
        return [_within(table[name]) for table in tables for name in self._names if name in table]


def _within(attribute: Any) -> Any:
    """The function behind a method or property of a class."""
    if isinstance(attribute, staticmethod | classmethod):
        return attribute.__func__
    return attribute.fget if isinstance(attribute, property) else attribute


def users_functions(start: Any) -> Iterator[FunctionType]:
    """The functions of the user's own code that calling `start` may lead to, as far as they are found by name."""
    named = Named()
    pending: list[Any] = [start]
    seen: dict[int, Any] = {}  # holds them, so that no address is used twice
    while pending:
        thing = pending.pop()
        if id(thing) in seen or isinstance(thing, _LEAVES):
            continue
        seen[id(thing)] = thing
        if isinstance(thing, FunctionType):
            if is_users(thing):
                yield thing
                pending += (content for _, _, content in variables(thing))
                pending += (*named.code(thing), *(thing.__defaults__ or ()))
            pending.append(getattr(thing, "__wrapped__", None))
        elif isinstance(thing, MethodType):
            pending += (thing.__self__, thing.__func__)
        elif isinstance(thing, functools.partial):
            pending += (thing.func, *thing.args, *thing.keywords.values())
        else:
            calls = (vars(kind).get("__call__") for kind in type(thing).__mro__)
            pending += (*named.thing(thing), next(filter(None, calls), None))


_LEAVES = (str, bytes, int, float, complex, type(None), ModuleType, CellType, torch.Tensor, dict, list, tuple, set)
