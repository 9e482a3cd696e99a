"""The origin of a function's code, and the objects that the code can reach by name. No code is run."""

from __future__ import annotations

import contextlib
import functools
import sys
import sysconfig
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

import lowtide

_OURS = (str(Path(torch.__file__).parent), str(Path(lowtide.__file__).parent))
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OPAQUE = {"_thread", "builtins", "contextlib", "importlib", "logging", "numpy", "re", "threading"}
_OBSERVERS = ("lowtide.estimator.", "lowtide.script.")


def is_opaque(kind: type) -> bool:
    """Return True if the search for a step's objects must not look inside instances of the class `kind`.

    Such classes belong to the interpreter, or to the part of Lowtide that observes the step, for example from an
    optimizer's hook.
    """
    if issubclass(kind, threading.local):
        return False
    return kind.__module__.partition(".")[0] in _OPAQUE or kind.__module__.startswith(_OBSERVERS)


@functools.lru_cache(maxsize=4096)
def origin(filename: str) -> str:
    """Return the origin of a file's code: "ours" (torch or Lowtide), "library" or "user"."""
    if filename.startswith(_OURS):
        return "ours"
    if filename.startswith(_LIBRARIES) or filename.startswith("<frozen"):
        return "library"
    return "user"


def find_defining_file(kind: type) -> str:
    """Return the path of the module that defines a class; empty if there is none."""
    return str(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


def is_user_code(obj: FunctionType | ModuleType | type) -> bool:
    """Return True if a function, module or class is the user's own code."""
    if isinstance(obj, FunctionType):
        return origin(obj.__code__.co_filename) == "user"
    module = obj if isinstance(obj, ModuleType) else sys.modules.get(obj.__module__)
    file = getattr(module, "__file__", None)
    if file is None:  # without a file: built in, or created at run time
        return module is not None and module.__spec__ is None
    return origin(file) == "user"


def find_names(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes that `code` uses, including the code of inner functions."""
    yield from code.co_names
    if "globals" in code.co_names:  # `globals()["COUNT"]`
        yield from (constant for constant in code.co_consts if isinstance(constant, str))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from find_names(constant)


def variables(function: FunctionType) -> Iterator[tuple[Any, str, Any]]:
    """Yield the variables that a function refers to: its globals, globals of the user's modules that it names, and
    cells.

    Each is a tuple of the variable's place (a dict or a cell), its name in the place, and its content.
    """
    names = sorted(set(find_names(function.__code__)))
    bindings: list[tuple[Any, str, Any]]
    bindings = [(function.__globals__, n, function.__globals__[n]) for n in names if n in function.__globals__]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # the cell is empty
            bindings.append((cell, "", cell.cell_contents))
    seen = {id(function.__globals__)}
    for place, name, content in bindings:  # grows during the loop
        if not isinstance(content, ModuleType):
            yield place, name, content
        elif is_user_code(content) and id(table := vars(content)) not in seen:
            seen.add(id(table))
            bindings += ((table, inside, table[inside]) for inside in names if inside in table)


class NamedAttributes:
    """Attributes of visited objects that visited code names: `trainer.step(x)` leads to `step` of a trainer.

    Each attribute is returned once, whether its code or its object is visited first. `names` count as named by code.
    """

    def __init__(self, *names: str) -> None:
        self._names: dict[str, None] = dict.fromkeys(names)  # ordered by visit
        self._tables: list[dict[str, Any]] = []
        self._kinds: dict[int, type] = {}  # by id: a metaclass may make its classes unhashable

    def add_code(self, function: FunctionType) -> list[Any]:
        """Record a function's code; return the attributes of visited objects that the code names."""
        new = sorted(set(find_names(function.__code__)) - self._names.keys())
        self._names.update(dict.fromkeys(new))
        return [_find_underlying_function(table[name]) for table in self._tables for name in new if name in table]

    def add_object(self, obj: Any) -> list[Any]:
        """Record an object or a class; return those of its attributes whose names visited code uses."""
        tables = [] if isinstance(obj, type) or not hasattr(obj, "__dict__") else [vars(obj)]
        kinds = (obj if isinstance(obj, type) else type(obj)).__mro__
        new = [kind for kind in kinds if id(kind) not in self._kinds and is_user_code(kind)]
        self._kinds.update((id(kind), kind) for kind in new)
        tables += [dict(vars(kind)) for kind in new]
        self._tables += tables
        return [_find_underlying_function(table[name]) for table in tables for name in self._names if name in table]

    def forget(self, tables: Collection[int]) -> None:
        """Drop the attribute tables with these ids."""
        self._tables = [table for table in self._tables if id(table) not in tables]


def _find_underlying_function(attribute: Any) -> Any:
    """Return the function behind a static method, class method or property; any other attribute unchanged."""
    if isinstance(attribute, staticmethod | classmethod):
        return attribute.__func__
    return attribute.fget if isinstance(attribute, property) else attribute


def find_user_functions(start: Any) -> Iterator[FunctionType]:
    """Yield the user's own functions that a call of `start` may run, found by the names that their code uses."""
    named = NamedAttributes()
    pending: list[Any] = [start]
    visited: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
    while pending:
        obj = pending.pop()
        if id(obj) in visited or isinstance(obj, _LEAVES):
            continue
        visited[id(obj)] = obj
        if isinstance(obj, FunctionType):
            if is_user_code(obj):
                yield obj
                pending += (content for _, _, content in variables(obj))
                pending += (*named.add_code(obj), *(obj.__defaults__ or ()))
            pending.append(getattr(obj, "__wrapped__", None))
        elif isinstance(obj, MethodType):
            pending += (obj.__self__, obj.__func__)
        elif isinstance(obj, functools.partial):
            pending += (obj.func, *obj.args, *obj.keywords.values())
        else:
            calls = (vars(kind).get("__call__") for kind in type(obj).__mro__)
            pending += (*named.add_object(obj), next(filter(None, calls), None))


_LEAVES = (str, bytes, int, float, complex, type(None), ModuleType, CellType, torch.Tensor, dict, list, tuple, set)
