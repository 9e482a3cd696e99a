"""Hooks of modules: their functions, and the lines that registered them."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from lowtide.diagnostics.leaks.call_site import Place
from lowtide.state.introspection import origin

_TABLES = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


@dataclass(frozen=True, slots=True)
class Hook:
    """A user's function that a module runs as a hook."""

    kind: str
    place: Place
    is_registration: bool
    """True if `place` is the registering line; False if it is the first line of the function."""

    def __str__(self) -> str:
        return f"{self.kind} {'registered' if self.is_registration else 'defined'} at {self.place}"


class RegisteredHooks:
    """Hooks registered on the given modules. Holds no reference to the hook functions."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.by_function: dict[int, Hook] = {}
        self._by_global: dict[tuple[int, str], Hook] = {}
        self._by_table: dict[tuple[int, str], Hook] = {}
        for module in modules:
            for table, kind in _TABLES.items():
                for function in list(module.__dict__.get(table, {}).values()):
                    hook = self._add_hook(function, kind)
                    if hook is not None:
                        self._by_table[id(module), table] = hook

    def find_in_table(self, module: nn.Module, table: str) -> Hook | None:
        """Return a hook in `table`, a dict of `module` such as `_forward_hooks`; None if there is none."""
        return self._by_table.get((id(module), table))

    def find_by_global(self, namespace: dict[str, Any], name: str) -> Hook | None:
        """Return a hook that uses the global variable `name` of the Python module with this `__dict__`, or None."""
        return self._by_global.get((id(namespace), name))

    def _add_hook(self, function: Any, kind: str) -> Hook | None:
        if isinstance(function, MethodType):
            function = function.__func__
        function = function if isinstance(function, FunctionType) else type(function).__dict__.get("__call__")
        if not isinstance(function, FunctionType) or origin(function.__code__.co_filename) != "user":
            return None
        code = function.__code__
        line = _find_registration_line(code.co_filename, function.__qualname__, code.co_firstlineno)
        hook = Hook(kind, Place(code.co_filename, line or code.co_firstlineno), line is not None)
        self.by_function[id(function)] = hook
        for name in code.co_names:
            if name in function.__globals__:
                self._by_global[id(function.__globals__), name] = hook
        return hook


@lru_cache(maxsize=256)
def _find_registration_line(file: str, qualified: str, defined: int) -> int | None:
    """Return the line of `file` that registers a hook; None if there is none.

    The line passes the hook, or the function that creates it, by a name in `qualified` (the hook's qualified name), or
    as a lambda at line `defined`.
    """
    names = set(qualified.split(".")) - {"<locals>"}
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if not (node.func.attr.startswith("register_") and node.func.attr.endswith("_hook")):
            continue
        for argument in node.args:
            inside = argument.func if isinstance(argument, ast.Call) else argument
            if isinstance(inside, ast.Name | ast.Attribute):
                if (inside.id if isinstance(inside, ast.Name) else inside.attr) in names:
                    return node.lineno
            elif isinstance(inside, ast.Lambda) and inside.lineno == defined:
                return node.lineno
    return None
