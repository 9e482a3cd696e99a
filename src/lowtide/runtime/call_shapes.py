"""Shapes of a call's arguments, and comparisons of them by size."""

from __future__ import annotations

import math
import re
from operator import attrgetter
from typing import Any

from lowtide.runtime.call_arguments import tensors_in_call

_SHAPE = attrgetter("shape")
_IS_NESTED = attrgetter("is_nested")

Shapes = tuple[tuple[int, ...], ...]
"""Shapes of all tensors passed to a call, in order."""


def shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    """Return the shapes of a call's tensors, without 0-dimensional ones, such as a token count, and nested ones."""
    tensors = tensors_in_call(args, kwargs)
    if any(map(_IS_NESTED, tensors)):  # its sizes are no numbers, or cannot be read
        tensors = [tensor for tensor in tensors if not tensor.is_nested]
    return tuple(filter(None, map(_SHAPE, tensors)))


def shapes_in(words: str) -> Shapes:
    """Return the shapes in `[8, 1024] int64, [8] float32`, as `fingerprint.in_words` writes them."""
    return tuple(tuple(int(size) for size in re.findall(r"\d+", shape)) for shape in re.findall(r"\[(.+?)\]", words))


def within(one: Shapes, other: Shapes) -> bool:
    """Return True if no tensor is larger than its counterpart in any dimension; False for a call of another form."""
    return have_one_form(one, other) and all(
        m <= n for a, b in zip(one, other, strict=True) for m, n in zip(a, b, strict=True)
    )


def no_larger(one: Shapes, other: Shapes) -> bool:
    """Return True if `one` is `within` `other`; calls of different forms are compared by their total elements.

    Forms differ, for example, by an optional mask.
    """
    if have_one_form(one, other):
        return within(one, other)
    return elements(one) <= elements(other)


def have_one_form(one: Shapes, other: Shapes) -> bool:
    """Return True if both calls have equally many tensors, with equally many dimensions each."""
    return [len(shape) for shape in one] == [len(shape) for shape in other]


def elements_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return `elements` of the shapes of a call's tensors."""
    return elements(shapes_of(args, kwargs))


def elements(shapes: Shapes) -> int:
    """Return the total number of elements."""
    return sum(map(math.prod, shapes))
