"""Find the purpose for which code reads a tensor's contents, from the code's source.

Many conditions are checks: `assert` and `if ...: raise` validate tensors, such as arguments of distributions, boxes or
a loss. A rehearsal can't know the contents. But if one outcome of a condition would end the step, or only warn, the
other outcome is assumed. Rules for other branches are in `branch_rules.py`. Optimizers compare numbers to bound their
steps, and `max` may choose among several numbers. A number that is only printed or counted may have any value.
"""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

from lowtide._torch.modules import CALL_CODE
from lowtide.estimator.values.branch_rules import Source, Taken, makes_text
from lowtide.utils.frames import module_name, walk_frames

_VALIDATING = ("torch.distributions.constraints", "torch.distributions.distribution")
"""Modules that validate arguments of distributions."""

_OPTIMIZERS = ("torch.optim", "transformers.optimization")

_SEARCHING = "torch.optim.lbfgs"

_SCORES = "sklearn.metrics"

_CHOOSING = ("max", "min")

_ROUNDING = ("int", "ceil", "floor")

_PASSES = Taken(True, "a check is assumed to pass")

_BETWEEN = ("lowtide.", "torch._tensor", "torch.overrides", "torch.functional")

_Span = tuple[int, int, int, int]
"""First and last line, first and last column."""


class _Check(NamedTuple):
    """A condition, and its assumed value or None if it may affect memory."""

    test: ast.expr
    taken: Taken | None


class _Places(NamedTuple):
    """Expressions in the source of a file, by kind: checks, asserts, texts, divisions, choices."""

    checks: list[_Check]
    asserts: set[_Span]
    """Whole statements: pytest replaces their code."""
    reported: list[_Span]
    """Expressions that become text, or are added to a count."""
    divided: list[_Span]
    """Dividends of divisions whose result is not rounded to an integer."""
    choices: dict[_Span, str]
    """Calls of `max` and `min`."""


def passing() -> Taken | None:
    """Return the value assumed for the part of a condition that is being evaluated.

    Return None outside conditions, and for a condition that may affect memory.
    """
    frame = _find_reading_frame()
    if frame is None:
        return None
    if module_name(frame) in _VALIDATING:
        return _PASSES
    span, places = _find_span(frame), _read_places(frame)
    if span in places.asserts:
        return _PASSES
    for check in places.checks:
        if span is not None and _is_within(span, _span_of(check.test)):
            taken = check.taken
            if taken is None or (taken.outside and _in_module()):
                return None
            answer = _find_part_value(check.test, taken.answer, span)
            return None if answer is None else taken._replace(answer=answer)
    return None


def is_only_reported() -> bool:
    """Return True if the code that reads a tensor's contents only reports or counts the value."""
    return _is_read_in(lambda places: places.reported)


def is_counted() -> bool:
    """Return True if the code that reads a tensor's contents only reports, counts or divides the value."""
    return _is_read_in(lambda places: [*places.reported, *places.divided])


def _is_read_in(select: Callable[[_Places], list[_Span]]) -> bool:
    """Return True if the expression that reads a tensor's contents is inside an expression that `select` returns."""
    frame = _find_reading_frame()
    span = None if frame is None else _find_span(frame)
    return (
        frame is not None and span is not None and any(_is_within(span, place) for place in select(_read_places(frame)))
    )


def is_scoring() -> bool:
    """Return True if scikit-learn's metrics, which rate predictions, read a tensor's contents."""
    return any(module_name(frame).startswith(_SCORES) for frame in walk_frames(_find_reading_frame()))


def in_optimizer() -> bool:
    """Return True if an optimizer reads a tensor's contents."""
    frame = _find_reading_frame()
    return frame is not None and module_name(frame).startswith(_OPTIMIZERS)


def is_searching() -> bool:
    """Return True if LBFGS, which reruns its closure until its line search ends, reads a tensor's contents."""
    frame = _find_reading_frame()
    return frame is not None and module_name(frame) == _SEARCHING


def choosing() -> str:
    """Return "max" or "min" if one of them is being called, else "". In an optimizer, always return ""."""
    frame = _find_reading_frame()
    span = None if frame is None or in_optimizer() else _find_span(frame)
    return "" if frame is None or span is None else _read_places(frame).choices.get(span, "")


def _in_module() -> bool:
    """Return True if a tensor's contents are read inside a module's forward."""
    return any(frame.f_code is CALL_CODE for frame in walk_frames(_find_reading_frame()))


def _find_reading_frame() -> FrameType | None:
    """Return the innermost frame outside this package and outside torch's methods of tensors, or None."""
    return next((frame for frame in walk_frames(sys._getframe(1)) if not module_name(frame).startswith(_BETWEEN)), None)


def _find_span(frame: FrameType) -> _Span | None:
    """Return the source span of the expression that a frame is evaluating, or has just evaluated for a jump.

    Return None if Python does not know the span.
    """
    place = frame.f_lasti // 2
    if "JUMP" in dis.opname[frame.f_code.co_code[frame.f_lasti]]:
        place -= 1  # a jump's own position is that of the whole statement, or arbitrary
    positions = next(itertools.islice(frame.f_code.co_positions(), place, None))
    return None if None in positions else positions  # type: ignore[return-value]


def _read_places(frame: FrameType) -> _Places:
    name = frame.f_code.co_filename
    linecache.checkcache(name)
    return _find_places("".join(linecache.getlines(name, frame.f_globals)))


@functools.lru_cache(maxsize=64)
def _find_places(source: str) -> _Places:
    """Find the checks, reports, divisions and choices in the source of a whole file."""
    places = _Places([], set(), [], [], {})
    try:
        tree = ast.parse(source)
    except SyntaxError:  # for example code typed into a notebook
        return places
    branches = Source(tree)
    whole: list[_Span] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            places.checks.append(_Check(node.test, _PASSES))
            places.asserts.add(_span_of(node))
        elif isinstance(node, ast.If):
            places.checks.append(_Check(node.test, branches.branch(node)))
        elif isinstance(node, ast.IfExp):
            places.checks.append(_Check(node.test, branches.choice(node)))
        if isinstance(node, ast.expr) and makes_text(node):
            places.reported.append(_span_of(node))
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            places.reported.append(_span_of(node.value))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            places.divided.append(_span_of(node.left))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CHOOSING:
            places.choices[_span_of(node)] = node.func.id
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in _ROUNDING:
            whole.append(_span_of(node))
    places.divided[:] = [span for span in places.divided if not any(_is_within(span, place) for place in whole)]
    return places


def _find_part_value(test: ast.expr, passes: bool, span: _Span) -> bool | None:
    """Return the value of the part of a condition at `span` with which the whole condition equals `passes`.

    Return None unless the parts are combined only by `not`, `and` and `or`.
    """
    while True:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, passes = test.operand, not passes
            if not _is_within(span, _span_of(test)):  # the query is the `not` itself
                return passes
        elif isinstance(test, ast.BoolOp):
            parts = [part for part in test.values if _is_within(span, _span_of(part))]
            if not parts:
                return passes
            (test,) = parts
        else:
            return passes if span == _span_of(test) else None


def _span_of(node: ast.expr | ast.stmt) -> _Span:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _is_within(span: _Span, whole: _Span) -> bool:
    (first, last, begin, end), (whole_first, whole_last, whole_begin, whole_end) = span, whole
    return (whole_first, whole_begin) <= (first, begin) and (last, end) <= (whole_last, whole_end)
