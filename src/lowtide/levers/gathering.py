"""Whose gradients are being gathered from micro-batches just now: these are parts of one gradient, not yet it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor

_PARAMETERS: set[int] = set()


def is_gathering(parameter: Tensor) -> bool:
    """Whether what arrives in the parameter's gradient is a part of it."""
    return id(parameter) in _PARAMETERS


@contextlib.contextmanager
def gathering(parameters: Iterable[Tensor]) -> Iterator[None]:
    """In this block the gradients of these parameters are gathered."""
    ids = {id(parameter) for parameter in parameters}
    _PARAMETERS.update(ids)
    try:
        yield
    finally:
        _PARAMETERS.difference_update(ids)
