"""Rules for choosing a branch whose condition a rehearsal can't know, from the source alone.

1. One branch raises, exits the program or only reports: the condition is a check, and is assumed to pass.
2. One branch leaves the loop, the function or this iteration: training is assumed to go on, as with
   `if loss != loss: break`, `if loss > 1e4: continue`, `if accuracy > 0.9: break`. Not inside a module's forward,
   where the skipped code has memory of its own.
3. Both branches only report, count, record numbers, and save or copy a state, such as the best model so far: the branch
   that keeps more is taken. A recorded number must not be read outside comparisons and texts: `n = 64` may be a size,
   and decide about memory.
4. A conditional expression within reported text, neither branch of which calls a function: either branch is only
   reported.

Any other condition may decide about memory, and is refused with its line.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

REPORTING = frozenset(
    {
        *("print", "warn", "warning", "warning_once", "info", "debug", "error"),
        *("add_scalar", "set_postfix", "set_postfix_str", "set_description"),
    }
)
"""Functions, and methods of loggers and progress bars, that only report."""

_SAVING = frozenset({"save"})
_COPYING = frozenset({"deepcopy", "copy", "clone", "state_dict", "detach", "cpu", "items", "parameters", "dict"})
_NUMBERS = frozenset({"item", "float", "int", "bool", "abs", "round", "min", "max", "str", "format", "len"})
_ENDING = frozenset({"exit", "quit", "_exit", "abort"})

_CHECK = "a check is assumed to pass"
_GOES_ON = "training is assumed to continue"
_SAME = "either way needs the same memory"
_MORE = "the way that saves or copies something is taken, as the one that needs more memory"
_ONLY_REPORTED = "both ways only print or count"


class Taken(NamedTuple):
    """The value assumed for a condition, and the reason."""

    answer: bool
    why: str
    outside: bool = False
    """True if the assumption holds only outside a module's forward."""


class Source:
    """The syntax tree of a file, or of the available part of one."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self._read: dict[tuple[ast.AST, bool], set[str]] = {}

    def branch(self, node: ast.If) -> Taken | None:
        """Return the value assumed for the unknown condition of an `if` statement; None if it decides about memory."""
        if _ends(node.body):
            return Taken(False, _CHECK)
        if _ends(node.orelse):
            return Taken(True, _CHECK)
        for way, answer in ((node.body, False), (node.orelse, True)):
            if _leaves(way):
                return Taken(answer, _GOES_ON, outside=True)
        if all(map(_tells, node.body)):
            return Taken(False, _CHECK)
        ways = node.body, node.orelse
        if not all(_is_harmless(statement) for way in ways for statement in way) or self._assigns_a_size(node):
            return None
        keeps = [any(map(_keeps, way)) for way in ways]
        return Taken(keeps[0] or not keeps[1], _MORE if any(keeps) else _SAME)

    def choice(self, node: ast.IfExp) -> Taken | None:
        """Return the value assumed for the condition of `a if condition else b`; None if it may decide about memory."""
        if not (_calls_only(node.body, _NUMBERS) and _calls_only(node.orelse, _NUMBERS)):
            return None
        place: ast.AST = node
        while isinstance(place, ast.expr | ast.keyword):
            if makes_text(place):
                return Taken(True, _ONLY_REPORTED)
            place = self._parents[place]
        return None

    def _assigns_a_size(self, branch: ast.If) -> bool:
        """Return True if a name that this branch assigns may be a size, or decide about one."""
        scope: ast.AST = branch
        while not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module):
            scope = self._parents[scope]
        for node in ast.walk(branch):
            for target in _targets(node):
                assert isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
                if node.value is None or _copies(node.value):
                    continue
                is_number = isinstance(node, ast.AugAssign) or isinstance(node.value, ast.Constant)
                readers = self._tree if _is_global(scope, target) else scope
                if target in self._deciding(readers, is_number):
                    return True
        return False

    def _deciding(self, scope: ast.AST, returned: bool) -> set[str]:
        """Return the names that may decide about memory: names read outside harmless conditions and texts, and names
        whose values flow into these.

        With `returned`, names that are only returned count too.
        """
        if (scope, returned) in self._read:
            return self._read[scope, returned]
        names: set[str] = set()
        flows: dict[str, set[str]] = defaultdict(set)
        for node in ast.walk(scope):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                name, into = _key(node), self._find_read_targets(node, returned)
                if into is None:
                    names.add(name)
                else:
                    flows[name] |= into
        while more := {name for name, into in flows.items() if into & names} - names:
            names |= more
        self._read[scope, returned] = names
        return names

    def _find_read_targets(self, node: ast.AST, returned: bool) -> set[str] | None:
        """Return the names that the value of `node` is assigned to; none if it is only reported, compared or saved.

        Return None if the value may decide about memory.
        """
        parent, compared = self._parents[node], False
        while isinstance(parent, _PASSING) or (isinstance(parent, ast.Call) and _name(parent) in _NUMBERS):
            if isinstance(parent, ast.IfExp) and node is parent.test and self.choice(parent) is None:
                return None
            if isinstance(parent, ast.Call) and node is parent.func and not isinstance(node, ast.Attribute):
                return set()  # the function's name
            compared |= isinstance(parent, ast.Compare)
            node, parent = parent, self._parents[parent]
        if isinstance(parent, ast.JoinedStr | ast.FormattedValue):
            return set()
        if isinstance(parent, ast.Call) and node is not parent.func:
            return set() if _name(parent) in REPORTING | _SAVING else None
        if isinstance(parent, ast.If) and node is parent.test:
            ways = parent.body, parent.orelse
            is_free = any(_ends(way) or _leaves(way) for way in ways) or all(
                _is_harmless(statement) for way in ways for statement in way
            )
            return set() if is_free else None
        if isinstance(parent, ast.Assign | ast.AnnAssign | ast.AugAssign) and node is parent.value:
            return set(_targets(parent)) or None
        if isinstance(parent, ast.Return):
            return set() if compared or not returned else None
        return set() if isinstance(parent, ast.Expr) else None


def makes_text(node: ast.AST) -> bool:
    """Return True for a text that embeds values, or a call of a function that reports them."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and _name(node) in {*REPORTING, "format"})


_PASSING = (
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp),
    *(ast.Dict, ast.List, ast.Tuple, ast.keyword),
)
"""Nodes that values pass through on the way to where they are read."""


def _ends(way: list[ast.stmt]) -> bool:
    """Return True if a branch ends in an error, or exits the program."""
    return bool(way) and (isinstance(way[-1], ast.Raise) or _called(way[-1]) in _ENDING)


def _leaves(way: list[ast.stmt]) -> bool:
    """Return True if a branch leaves the loop, or does nothing but leave the function or this iteration."""
    if not way:
        return False
    *before, last = way
    if isinstance(last, ast.Break):
        return True
    is_none = isinstance(last, ast.Return) and (
        last.value is None or (isinstance(last.value, ast.Constant) and last.value.value is None)
    )
    return (is_none or isinstance(last, ast.Continue)) and all(
        _is_harmless(statement) or _called(statement) == "zero_grad" for statement in before
    )


def _is_harmless(statement: ast.stmt) -> bool:
    """Return True if a statement allocates memory only to save or copy values, and assigns only plain values."""
    if isinstance(statement, ast.If):
        return all(map(_is_harmless, [*statement.body, *statement.orelse]))
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        value = statement.value
        is_plain = value is None or _calls_only(value, _NUMBERS) or _copies(value)
        return is_plain and bool(_targets(statement))
    is_constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    is_nothing = is_constant or isinstance(statement, ast.Pass | ast.Break | ast.Continue)
    return is_nothing or _tells(statement) or _called(statement) in _SAVING


def _keeps(statement: ast.stmt) -> bool:
    """Return True if a statement saves or copies a value."""
    if isinstance(statement, ast.If):
        return any(map(_keeps, [*statement.body, *statement.orelse]))
    value = getattr(statement, "value", None)
    return _called(statement) in _SAVING or (isinstance(value, ast.expr) and _copies(value))


def _copies(value: ast.expr) -> bool:
    calls = [node for node in ast.walk(value) if isinstance(node, ast.Call)]
    return bool(calls) and _calls_only(value, _COPYING) and any(_name(call) in _COPYING - _NUMBERS for call in calls)


def _calls_only(value: ast.expr, names: frozenset[str]) -> bool:
    return all(_name(node) in names for node in ast.walk(value) if isinstance(node, ast.Call))


def _tells(statement: ast.stmt) -> bool:
    return _called(statement) in REPORTING


def _called(statement: ast.stmt) -> str:
    """Return the name of the called function if the statement is only a call; empty otherwise."""
    expression = statement.value if isinstance(statement, ast.Expr) else None
    return _name(expression) if isinstance(expression, ast.Call) else ""


def _name(call: ast.Call) -> str:
    """Return the called function's name, without its module or object."""
    name = getattr(call.func, "attr", "") or getattr(call.func, "id", "")
    assert isinstance(name, str)
    return name


def _targets(node: ast.AST) -> list[str]:
    """Return the names that a statement assigns to; none if any target is not a name."""
    if isinstance(node, ast.Assign):
        targets = [inside for target in node.targets for inside in _unpacked(target)]
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    else:
        return []
    return [_key(target) for target in targets] if all(map(_key, targets)) else []


def _unpacked(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for inside in target.elts:
            yield from _unpacked(inside)
    else:
        yield target


def _key(target: ast.expr) -> str:
    """Return the key of a target: `best`, `.best` for an attribute of any object, for an entry its container's key."""
    if isinstance(target, ast.Subscript):
        return _key(target.value)
    if isinstance(target, ast.Attribute):
        return f".{target.attr}"
    return target.id if isinstance(target, ast.Name) else ""


def _is_global(scope: ast.AST, name: str) -> bool:
    """Return True if other functions can read the name."""
    declared = (node.names for node in ast.walk(scope) if isinstance(node, ast.Global | ast.Nonlocal))
    return name.startswith(".") or any(name in names for names in declared)
