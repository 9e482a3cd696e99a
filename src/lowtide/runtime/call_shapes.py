"""Shapes of a call's arguments, and comparisons of them by size."""

from __future__ import annotations

import math
import re
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from lowtide.runtime.call_arguments import collect_call_tensors

if TYPE_CHECKING:
    from torch import Tensor

_SHAPE = attrgetter("shape")
_IS_NESTED = attrgetter("is_nested")

Shapes = tuple[tuple[int, ...], ...]
"""Shapes of all tensors passed to a call, in order."""


def list_shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    """Return the shapes of the tensors in a call's arguments, except 0-dimensional and nested ones."""
    return list_tensor_shapes(collect_call_tensors(args, kwargs))


def list_tensor_shapes(tensors: list[Tensor]) -> Shapes:
    """Return the shapes of tensors, except 0-dimensional tensors (such as a token count) and nested ones."""
    if any(map(_IS_NESTED, tensors)):  # sizes of a nested tensor are no integers, or can't be read
        tensors = [tensor for tensor in tensors if not tensor.is_nested]
    return tuple(filter(None, map(_SHAPE, tensors)))


def parse_shapes(words: str) -> Shapes:
    """Parse the shapes in a text such as `[8, 1024] int64, [8] float32`, which `batch_tensors.put_in_words` writes."""
    return tuple(tuple(int(size) for size in re.findall(r"\d+", shape)) for shape in re.findall(r"\[(.+?)\]", words))


def within(one: Shapes, other: Shapes) -> bool:
    """Return True if no shape in `one` is larger in any dimension than its counterpart in `other`.

    Returns False if the numbers of tensors, or of their dimensions, differ.
    """
    return have_one_form(one, other) and all(
        m <= n for a, b in zip(one, other, strict=True) for m, n in zip(a, b, strict=True)
    )


def no_larger(one: Shapes, other: Shapes) -> bool:
    """Return True if no shape in `one` is larger in any dimension than its counterpart in `other`.

    Calls with different numbers of tensors or dimensions, as with an optional mask, are compared by total elements.
    """
    if have_one_form(one, other):
        return within(one, other)
    return elements(one) <= elements(other)


def have_one_form(one: Shapes, other: Shapes) -> bool:
    """Return True if both calls have equally many tensors, with equally many dimensions each."""
    return [len(shape) for shape in one] == [len(shape) for shape in other]


def count_elements_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of elements of all tensors in a call's arguments, except 0-dimensional and nested ones."""
    return elements(list_shapes(args, kwargs))


def elements(shapes: Shapes) -> int:
    """Return the total number of elements of tensors with these shapes."""
    return sum(map(math.prod, shapes))
