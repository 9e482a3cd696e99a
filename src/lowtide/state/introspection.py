"""Origin of a function's code, and the objects that its code can reach by name. No code is run."""

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
    """Return True if objects referenced by instances of a class are not part of a step.

    Such classes are the interpreter's, and Lowtide's own that observe the step, for example from an optimizer's hook.
    """
    return kind.__module__.partition(".")[0] in _OPAQUE or kind.__module__.startswith(_WATCHING)


@functools.lru_cache(maxsize=4096)
def origin(filename: str) -> str:
    """Return the origin of a file's code: "ours" (torch or Lowtide), "library" or "user"."""
    if filename.startswith(_OURS):
        return "ours"
    if filename.startswith(_LIBRARIES) or filename.startswith("<frozen"):
        return "library"
    return "user"


def is_users(thing: FunctionType | ModuleType | type) -> bool:
    """Return True if a function, module or class is the user's own code."""
    if isinstance(thing, FunctionType):
        return origin(thing.__code__.co_filename) == "user"
    module = thing if isinstance(thing, ModuleType) else sys.modules.get(thing.__module__)
    file = getattr(module, "__file__", None)
    if file is None:  # without a file: built in, or created at run time
        return module is not None and module.__spec__ is None
    return origin(file) == "user"


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes that code uses, including the code of inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def variables(function: FunctionType) -> Iterator[tuple[Any, str, Any]]:
    """Yield the globals that a function names, the globals that it names in the user's modules, and its cells.

    Each is a tuple: its place (a dict or a cell), its name there and its content.
    """
    names = sorted(set(names_in(function.__code__)))
    found: list[tuple[Any, str, Any]]
    found = [(function.__globals__, n, function.__globals__[n]) for n in names if n in function.__globals__]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # empty
            found.append((cell, "", cell.cell_contents))
    seen = {id(function.__globals__)}
    for place, name, content in found:  # grows during the loop
        if not isinstance(content, ModuleType):
            yield place, name, content
        elif is_users(content) and id(table := vars(content)) not in seen:
            seen.add(id(table))
            found += ((table, inside, table[inside]) for inside in names if inside in table)


class Named:
    """Attributes of visited objects that visited code names: `trainer.step(x)` leads to `step` of a trainer.

    Each attribute is returned once, whether its code or its object is visited first. `names` count as named by code.
    """

    def __init__(self, *names: str) -> None:
        self._names: dict[str, None] = dict.fromkeys(names)  # in the order of visits
        self._tables: list[dict[str, Any]] = []
        self._kinds: set[type] = set()

    def code(self, function: FunctionType) -> list[Any]:
        """Record the code of a function; return the attributes that it names of objects visited so far."""
        new = sorted(set(names_in(function.__code__)) - self._names.keys())
        self._names.update(dict.fromkeys(new))
        return [_within(table[name]) for table in self._tables for name in new if name in table]

    def thing(self, thing: Any) -> list[Any]:
        """Record an object, or a class itself; return its attributes that were named so far."""
        tables = [] if isinstance(thing, type) or not hasattr(thing, "__dict__") else [vars(thing)]
        kinds = (thing if isinstance(thing, type) else type(thing)).__mro__
        new = [kind for kind in kinds if kind not in self._kinds and is_users(kind)]
        self._kinds.update(new)
        tables += [dict(vars(kind)) for kind in new]
        self._tables += tables
        return [_within(table[name]) for table in tables for name in self._names if name in table]


def _within(attribute: Any) -> Any:
    """Return the function behind a method or property of a class."""
    if isinstance(attribute, staticmethod | classmethod):
        return attribute.__func__
    return attribute.fget if isinstance(attribute, property) else attribute


def users_functions(start: Any) -> Iterator[FunctionType]:
    """Yield the functions of the user's own code that calling `start` may reach, as far as names lead to them."""
    named = Named()
    pending: list[Any] = [start]
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
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
