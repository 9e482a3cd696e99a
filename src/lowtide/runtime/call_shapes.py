"""The shapes of what a call is given, and which call is no larger than which."""

from __future__ import annotations

import math
import re
from typing import Any

from lowtide.runtime.call_arguments import tensors_in_call

Shapes = tuple[tuple[int, ...], ...]
"""Of all tensors that a call is given, in order."""


def shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    """What a call is given; numbers in tensors without dimensions, such as a count of tokens, are no sizes."""
    return tuple(tuple(tensor.shape) for tensor in tensors_in_call(args, kwargs) if tensor.dim())


def shapes_in(words: str) -> Shapes:
    """The shapes in `[8, 1024] int64, [8] float32`, as `identity.in_words` writes them."""
    return tuple(tuple(int(size) for size in re.findall(r"\d+", shape)) for shape in re.findall(r"\[(.+?)\]", words))


def within(one: Shapes, other: Shapes) -> bool:
    """Whether each tensor is in no dimension larger than the other's; False for a call of another form."""
    return have_one_form(one, other) and all(
        m <= n for a, b in zip(one, other, strict=True) for m, n in zip(a, b, strict=True)
    )


def no_larger(one: Shapes, other: Shapes) -> bool:
    """The same, but a call of another form, as without an optional mask, counts by the elements that it has in all."""
    if have_one_form(one, other):
        return within(one, other)
    return elements(one) <= elements(other)


def have_one_form(one: Shapes, other: Shapes) -> bool:
    """Whether the calls have as many tensors of as many dimensions."""
    return [len(shape) for shape in one] == [len(shape) for shape in other]


def elements(shapes: Shapes) -> int:
    """How many elements the tensors have in all."""
    return sum(map(math.prod, shapes))
