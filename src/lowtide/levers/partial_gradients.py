"""Whose gradients are being gathered from micro-batches just now: these are parts of one gradient, not yet it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

Gathered = Sequence[tuple[Tensor, Tensor]]
"""Parameters and their whole gradients."""

_PARAMETERS: set[int] = set()
_LISTENERS: list[Callable[[Gathered], None]] = []


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


def publish(gathered: Gathered) -> None:
    """Backward is about to hand out these gradients: tell whoever listens."""
    for listener in tuple(_LISTENERS):
        listener(gathered)


def subscribe(listener: Callable[[Gathered], None]) -> Callable[[], None]:
    """Tell `listener` of gathered gradients before they are handed out; until what is returned is called, once."""
    _LISTENERS.append(listener)
    return lambda: _LISTENERS.remove(listener)
