"""Search in source code for the line that computes the value of a variable, or the entries of a container."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from lowtide.diagnostics.leaks.call_site import Place

_ADDING = ("append", "appendleft", "extend", "add", "update", "insert", "setdefault", "put", "put_nowait", "push")
"""Methods that put their arguments into a container."""

_SAME_MEMORY = ("detach", "view", "reshape", "squeeze", "unsqueeze", "flatten", "numpy", "requires_grad_")
"""Methods of a tensor whose result shares its memory."""

_MOST_NAMES = 5


@lru_cache(maxsize=256)
def find_value_place(file: str, name: str, step: str, *, is_container: bool) -> Place | None:
    """Return the line of `file` that computes the value stored under `name`; None if there is none.

    Args:
        file: Path of the source.
        name: Name of the variable or attribute.
        step: If the value is part of a container's entries, the part as code: `[1]` or `['logits']`; else empty.
        is_container: True to find the value of an entry of `name`, False to find the value of `name` itself.
    """
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    for scope in ast.walk(tree):
        if isinstance(scope, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for statement, value in _find_stores(scope, name, is_container=is_container):
                line = _find_line(_select_part(value, step), scope, name, _MOST_NAMES)
                return Place(file, line or statement.lineno)
    return None


def _walk_scope(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the AST nodes of a function or module, except those inside its inner functions."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _walk_scope(child)


def _find_stores(scope: ast.AST, name: str, *, is_container: bool) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr]]:
    """Yield the calls and assignments that store a value under `name`, each with the stored expression.

    With `is_container`, an assignment that replaces the container does not count.
    """
    for node in _walk_scope(scope):
        if isinstance(node, ast.Call) and node.args:
            is_method = isinstance(node.func, ast.Attribute) and node.func.attr in _ADDING
            into = node.func.value if is_method else node.args[0]  # type: ignore[attr-defined]
            if (is_method or _find_last_name(node.func) == "heappush") and _find_last_name(into) == name:
                yield node, node.args[-1]
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            adds = isinstance(node, ast.AugAssign) or name in map(_find_last_name, _find_names(node.value))
            for target in targets:
                is_entry = isinstance(target, ast.Subscript)
                if _find_last_name(target) == name and (
                    is_entry or adds or not (is_container or _is_empty(node.value))
                ):
                    yield node, node.value


def _find_names(value: ast.expr) -> Iterator[ast.expr]:
    return (node for node in ast.walk(value) if isinstance(node, ast.Name | ast.Attribute))


def _is_empty(value: ast.expr) -> bool:
    """Return True if an expression contains no names: a constant, or a container of constants."""
    return not any(isinstance(node, ast.Name | ast.Attribute) for node in ast.walk(value))


def _find_last_name(node: ast.expr) -> str:
    """Return the last name in an expression: `kept` for `log.kept[n]["loss"]`."""
    while isinstance(node, ast.Subscript) or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        node = node.value if isinstance(node, ast.Subscript) else node.func.value  # type: ignore[attr-defined]
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _select_part(value: ast.expr, step: str) -> ast.expr:
    """Return the part of a tuple or dict expression at `step`, such as `[1]`; the whole value if there is none."""
    key = step.removeprefix("[").removesuffix("]")
    if isinstance(value, ast.Tuple) and key.isdigit() and int(key) < len(value.elts):
        return value.elts[int(key)]
    if isinstance(value, ast.Dict):
        entries = zip(value.keys, value.values, strict=True)
        return next((v for k, v in entries if isinstance(k, ast.Constant) and repr(k.value) == key), value)
    return value


def _find_line(value: ast.expr, scope: ast.AST, name: str, depth: int) -> int | None:
    """Return the line that computes `value`, following up to `depth` assignments of variables backwards.

    Return None if no assignment is found, as for an argument of the function.
    """
    while True:
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _SAME_MEMORY:
            value = value.func.value
        elif isinstance(value, ast.Attribute) and value.attr == "data":
            value = value.value
        elif isinstance(value, ast.Tuple | ast.List) and (names := [e for e in value.elts if isinstance(e, ast.Name)]):
            value = names[0]
        else:
            break
    if not isinstance(value, ast.Name) or value.id == name or not depth:
        return value.lineno if not isinstance(value, ast.Name) else None
    assignments = [node for node in _walk_scope(scope) if value.id in _list_assigned_names(node)]
    above = [node for node in assignments if node.lineno <= value.lineno]  # type: ignore[attr-defined]
    latest = max(above or assignments, key=lambda node: node.lineno, default=None)  # type: ignore[attr-defined]
    if latest is None:
        return None
    line: int = latest.lineno  # type: ignore[attr-defined]
    if isinstance(latest, ast.Assign) and isinstance(latest.targets[0], ast.Name):
        return _find_line(latest.value, scope, value.id, depth - 1) or line
    return line


def _list_assigned_names(node: ast.AST) -> set[str]:
    """Return the names that a statement assigns."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.AsyncFor):
        targets = [node.target]
    else:
        return set()
    names = (name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}
