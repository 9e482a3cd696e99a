"""What the code that asks for contents wants them for, looked up in its source.

A condition may be part of a check: `assert` and `if ...: raise` ask of tensors whether all is well. Arguments of
distributions are looked through, boxes have to be boxes, a loss is not to explode. A rehearsal can't know; but where
the other answer would end the step, or only warn, this one is that of every step worth rehearsing. Optimizers compare
numbers to bound their steps, and of numbers the largest may be kept. And what is only printed or counted may be any.
"""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import linecache
import sys
from types import FrameType
from typing import NamedTuple

_TELLING = frozenset({"print", "warn", "warning", "warning_once", "info", "debug", "error"})
"""Functions, and methods of loggers, that change nothing."""

_CONSTRAINTS = "torch.distributions.constraints"
"""Its code looks whether arguments of distributions are what they have to be."""

_OPTIMIZERS = ("torch.optim", "transformers.optimization")

_SCORES = "sklearn.metrics"

_CHOOSING = ("max", "min")

_BETWEEN = ("lowtide.", "torch._tensor", "torch.overrides", "torch.functional")

_Span = tuple[int, int, int, int]
"""First and last line, first and last column."""


class _Check(NamedTuple):
    """The condition of a statement that ends the step, or tells something; and what it is if the check passes."""

    test: ast.expr
    passes: bool


class _Found(NamedTuple):
    """What is looked for in a source."""

    checks: list[_Check]
    telling: list[_Span]
    """What is made into text, or added to a count."""
    choices: dict[_Span, str]
    """Where `max` and `min` are called."""


def passing() -> bool | None:
    """What the condition that is being asked for has to be so that a check passes; None if it is part of none."""
    frame = _asking()
    if frame is None:
        return None
    if frame.f_globals.get("__name__") == _CONSTRAINTS:
        return True
    span = _span(frame)
    for check in _found(frame).checks:
        if span is not None and _is_within(span, _of(check.test)):
            return _asked(check, span)
    return None


def is_telling() -> bool:
    """Whether what is asked for is only told or counted."""
    frame = _asking()
    span = None if frame is None else _span(frame)
    if frame is None or span is None:
        return False
    return any(_is_within(span, place) for place in _found(frame).telling)


def is_scoring() -> bool:
    """Whether scikit-learn asks, to say how good predictions are."""
    frame = _asking()
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(_SCORES):
        frame = frame.f_back
    return frame is not None


def in_optimizer() -> bool:
    """Whether an optimizer asks."""
    frame = _asking()
    return frame is not None and frame.f_globals.get("__name__", "").startswith(_OPTIMIZERS)


def choosing() -> str:
    """Which of `max` and `min` is called just now, if any; an optimizer's are comparisons as any other."""
    frame = _asking()
    span = None if frame is None or in_optimizer() else _span(frame)
    return "" if frame is None or span is None else _found(frame).choices.get(span, "")


def _asking() -> FrameType | None:
    """The innermost code outside of this package, and of what torch does before it asks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    return frame


def _span(frame: FrameType) -> _Span | None:
    """Where in the source that is which a frame runs just now, or what it made just before it jumps or not."""
    place = frame.f_lasti // 2
    if "JUMP" in dis.opname[frame.f_code.co_code[frame.f_lasti]]:
        place -= 1  # the jump itself has the place of the whole statement, or any
    found = next(itertools.islice(frame.f_code.co_positions(), place, None))
    return None if None in found else found  # type: ignore[return-value]


def _found(frame: FrameType) -> _Found:
    name = frame.f_code.co_filename
    linecache.checkcache(name)
    return _searched("".join(linecache.getlines(name, frame.f_globals)))


@functools.lru_cache(maxsize=64)
def _searched(source: str) -> _Found:
    """What there is in a whole file."""
    found = _Found([], [], {})
    try:
        tree = ast.parse(source)
    except SyntaxError:  # what was typed into a notebook, say
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.checks.append(_Check(node.test, passes=True))
        elif isinstance(node, ast.If) and _only_ends_or_tells(node.body):
            found.checks.append(_Check(node.test, passes=False))
        elif isinstance(node, ast.If) and node.orelse and isinstance(node.orelse[-1], ast.Raise):
            found.checks.append(_Check(node.test, passes=True))
        elif isinstance(node, ast.expr) and _makes_text(node):
            found.telling.append(_of(node))
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            found.telling.append(_of(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CHOOSING:
            found.choices[_of(node)] = node.func.id
    return found


def _only_ends_or_tells(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Raise) or all(map(_tells, body))


def _makes_text(node: ast.expr) -> bool:
    """Whether it is a text with values in it, or the call of a function that tells them."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and _name(node) in {*_TELLING, "format"})


def _tells(statement: ast.stmt) -> bool:
    expression = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(expression, ast.Call) and _name(expression) in _TELLING


def _name(call: ast.Call) -> str:
    """Of the function that is called, without where it is from."""
    found = getattr(call.func, "attr", "") or getattr(call.func, "id", "")
    assert isinstance(found, str)
    return found


def _asked(check: _Check, span: _Span) -> bool | None:
    """What the part of a condition at `span` has to be. None where more than `not`, `and` and `or` is made of it."""
    test, passes = check.test, check.passes
    while True:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, passes = test.operand, not passes
            if not _is_within(span, _of(test)):  # asked by the `not` itself
                return passes
        elif isinstance(test, ast.BoolOp):
            parts = [part for part in test.values if _is_within(span, _of(part))]
            if not parts:
                return passes
            (test,) = parts
        else:
            return passes if span == _of(test) else None


def _of(node: ast.expr) -> _Span:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _is_within(span: _Span, whole: _Span) -> bool:
    (first, last, begin, end), (whole_first, whole_last, whole_begin, whole_end) = span, whole
    return (whole_first, whole_begin) <= (first, begin) and (last, end) <= (whole_last, whole_end)
