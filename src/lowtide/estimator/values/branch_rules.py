"""Rules that choose a branch from the source alone, if a rehearsal can't know the condition.

1. One branch raises, exits the program or only reports: the condition is a check, and is assumed to pass.
2. One branch leaves the loop, the function or this iteration: training is assumed to continue, as with
   `if loss != loss: break`, `if loss > 1e4: continue`, `if accuracy > 0.9: break`. This rule does not apply inside a
   module's forward, where the skipped code may need memory.
3. Both branches only report, count, record numbers, and save or copy a state, such as the best model so far: the branch
   that keeps more memory is taken. A recorded number must not be read outside comparisons and texts, because `n = 64`
   may be a size that affects memory.
4. A conditional expression in reported text calls no function in either branch: either branch may be taken.

Any other condition may affect memory. It raises an error that names its line.
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
        """Return the value assumed for the unknown condition of an `if` statement; None if it may affect memory."""
        if _raises_or_exits(node.body):
            return Taken(False, _CHECK)
        if _raises_or_exits(node.orelse):
            return Taken(True, _CHECK)
        for statements, answer in ((node.body, False), (node.orelse, True)):
            if _leaves_loop(statements):
                return Taken(answer, _GOES_ON, outside=True)
        if all(map(_reports, node.body)):
            return Taken(False, _CHECK)
        ways = node.body, node.orelse
        if not all(_is_harmless(statement) for statements in ways for statement in statements) or self._assigns_a_size(
            node
        ):
            return None
        keeps = [any(map(_saves_or_copies, statements)) for statements in ways]
        return Taken(keeps[0] or not keeps[1], _MORE if any(keeps) else _SAME)

    def choice(self, node: ast.IfExp) -> Taken | None:
        """Return the value assumed for the condition of `a if condition else b`; None if it may affect memory."""
        if not (_calls_only(node.body, _NUMBERS) and _calls_only(node.orelse, _NUMBERS)):
            return None
        place: ast.AST = node
        while isinstance(place, ast.expr | ast.keyword):
            if makes_text(place):
                return Taken(True, _ONLY_REPORTED)
            place = self._parents[place]
        return None

    def _assigns_a_size(self, branch: ast.If) -> bool:
        """Return True if a name that this `if` statement assigns may be a size or affect one."""
        scope: ast.AST = branch
        while not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module):
            scope = self._parents[scope]
        for node in ast.walk(branch):
            for target in _list_targets(node):
                assert isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
                if node.value is None or _copies(node.value):
                    continue
                is_number = isinstance(node, ast.AugAssign) or isinstance(node.value, ast.Constant)
                readers = self._tree if _is_global(scope, target) else scope
                if target in self._deciding(readers, is_number):
                    return True
        return False

    def _deciding(self, scope: ast.AST, returned: bool) -> set[str]:
        """Return the names that may affect memory: names that are read outside harmless conditions and texts, and names
        whose values are assigned to such names.

        With `returned`, names that are only returned count, too.
        """
        if (scope, returned) in self._read:
            return self._read[scope, returned]
        names: set[str] = set()
        flows: dict[str, set[str]] = defaultdict(set)
        for node in ast.walk(scope):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                name, into = _make_key(node), self._find_read_targets(node, returned)
                if into is None:
                    names.add(name)
                else:
                    flows[name] |= into
        while more := {name for name, into in flows.items() if into & names} - names:
            names |= more
        self._read[scope, returned] = names
        return names

    def _find_read_targets(self, node: ast.AST, returned: bool) -> set[str] | None:
        """Return the names to which the value of `node` is assigned; an empty set if it is only reported or compared.

        Return None if the value may affect memory.
        """
        parent, compared = self._parents[node], False
        while isinstance(parent, _PASSING) or (
            isinstance(parent, ast.Call) and _find_function_name(parent) in _NUMBERS
        ):
            if isinstance(parent, ast.IfExp) and node is parent.test and self.choice(parent) is None:
                return None
            if isinstance(parent, ast.Call) and node is parent.func and not isinstance(node, ast.Attribute):
                return set()  # the function's name
            compared |= isinstance(parent, ast.Compare)
            node, parent = parent, self._parents[parent]
        if isinstance(parent, ast.JoinedStr | ast.FormattedValue):
            return set()
        if isinstance(parent, ast.Call) and node is not parent.func:
            return set() if _find_function_name(parent) in REPORTING | _SAVING else None
        if isinstance(parent, ast.If) and node is parent.test:
            ways = parent.body, parent.orelse
            is_free = any(_raises_or_exits(statements) or _leaves_loop(statements) for statements in ways) or all(
                _is_harmless(statement) for statements in ways for statement in statements
            )
            return set() if is_free else None
        if isinstance(parent, ast.Assign | ast.AnnAssign | ast.AugAssign) and node is parent.value:
            return set(_list_targets(parent)) or None
        if isinstance(parent, ast.Return):
            return set() if compared or not returned else None
        return set() if isinstance(parent, ast.Expr) else None


def makes_text(node: ast.AST) -> bool:
    """Return True for a text that contains values, or a call of a function that reports values."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Call) and _find_function_name(node) in {*REPORTING, "format"}
    )


_PASSING = (
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp),
    *(ast.Dict, ast.List, ast.Tuple, ast.keyword),
)
"""AST nodes that pass a value on to the expression around them."""


def _raises_or_exits(statements: list[ast.stmt]) -> bool:
    """Return True if a branch ends in an error, or exits the program."""
    return bool(statements) and (isinstance(statements[-1], ast.Raise) or _find_called_name(statements[-1]) in _ENDING)


def _leaves_loop(statements: list[ast.stmt]) -> bool:
    """Return True if a branch leaves the loop, or does nothing but leave the function or this iteration."""
    if not statements:
        return False
    *before, last = statements
    if isinstance(last, ast.Break):
        return True
    is_none = isinstance(last, ast.Return) and (
        last.value is None or (isinstance(last.value, ast.Constant) and last.value.value is None)
    )
    return (is_none or isinstance(last, ast.Continue)) and all(
        _is_harmless(statement) or _find_called_name(statement) == "zero_grad" for statement in before
    )


def _is_harmless(statement: ast.stmt) -> bool:
    """Return True if a statement assigns only plain values, and allocates memory only to save or copy values."""
    if isinstance(statement, ast.If):
        return all(map(_is_harmless, [*statement.body, *statement.orelse]))
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        value = statement.value
        is_plain = value is None or _calls_only(value, _NUMBERS) or _copies(value)
        return is_plain and bool(_list_targets(statement))
    is_constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    is_nothing = is_constant or isinstance(statement, ast.Pass | ast.Break | ast.Continue)
    return is_nothing or _reports(statement) or _find_called_name(statement) in _SAVING


def _saves_or_copies(statement: ast.stmt) -> bool:
    """Return True if a statement saves or copies a value."""
    if isinstance(statement, ast.If):
        return any(map(_saves_or_copies, [*statement.body, *statement.orelse]))
    value = getattr(statement, "value", None)
    return _find_called_name(statement) in _SAVING or (isinstance(value, ast.expr) and _copies(value))


def _copies(value: ast.expr) -> bool:
    calls = [node for node in ast.walk(value) if isinstance(node, ast.Call)]
    return (
        bool(calls)
        and _calls_only(value, _COPYING)
        and any(_find_function_name(call) in _COPYING - _NUMBERS for call in calls)
    )


def _calls_only(value: ast.expr, names: frozenset[str]) -> bool:
    return all(_find_function_name(node) in names for node in ast.walk(value) if isinstance(node, ast.Call))


def _reports(statement: ast.stmt) -> bool:
    return _find_called_name(statement) in REPORTING


def _find_called_name(statement: ast.stmt) -> str:
    """Return the name of the called function if the statement is a single call; "" otherwise."""
    expression = statement.value if isinstance(statement, ast.Expr) else None
    return _find_function_name(expression) if isinstance(expression, ast.Call) else ""


def _find_function_name(call: ast.Call) -> str:
    """Return the called function's name, without its module or object."""
    name = getattr(call.func, "attr", "") or getattr(call.func, "id", "")
    assert isinstance(name, str)
    return name


def _list_targets(node: ast.AST) -> list[str]:
    """Return the names to which a statement assigns; an empty list if a target is not a name."""
    if isinstance(node, ast.Assign):
        targets = [inside for target in node.targets for inside in _unpack(target)]
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    else:
        return []
    return [_make_key(target) for target in targets] if all(map(_make_key, targets)) else []


def _unpack(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for inside in target.elts:
            yield from _unpack(inside)
    else:
        yield target


def _make_key(target: ast.expr) -> str:
    """Return the key of an assignment's target: `best`, `.best` for an attribute, the container's key for an entry."""
    if isinstance(target, ast.Subscript):
        return _make_key(target.value)
    if isinstance(target, ast.Attribute):
        return f".{target.attr}"
    return target.id if isinstance(target, ast.Name) else ""


def _is_global(scope: ast.AST, name: str) -> bool:
    """Return True if other functions can read the name."""
    declared = (node.names for node in ast.walk(scope) if isinstance(node, ast.Global | ast.Nonlocal))
    return name.startswith(".") or any(name in names for names in declared)
