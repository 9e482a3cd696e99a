"""Parameters whose gradients are being summed over micro-batches: each arriving gradient is one term of the sum."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

Gathered = Sequence[tuple[Tensor, Tensor]]
"""Parameters and their gradients of the whole batch."""

_PARAMETERS: set[int] = set()
_LISTENERS: list[Callable[[Gathered], None]] = []


def is_gathering(parameter: Tensor) -> bool:
    """Return True if a gradient that arrives for the parameter is only one micro-batch's part of the whole gradient."""
    return id(parameter) in _PARAMETERS


@contextlib.contextmanager
def gathering(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Mark gradients that arrive for `parameters` in this `with` block as parts of a sum over micro-batches."""
    ids = {id(parameter) for parameter in parameters}
    _PARAMETERS.update(ids)
    try:
        yield
    finally:
        _PARAMETERS.difference_update(ids)


def publish(gathered: Gathered) -> None:
    """Pass `gathered`, parameters with their gradients of the whole batch, to all listeners of `subscribe`."""
    for listener in tuple(_LISTENERS):
        listener(gathered)


def subscribe(listener: Callable[[Gathered], None]) -> Callable[[], None]:
    """Register `listener`, which is called with the gradients of a whole batch once its micro-batches are summed.

    The call comes before backward adds the gradients to the parameters' `.grad`. Returns a function that ends the
    subscription.
    """
    _LISTENERS.append(listener)
    return lambda: _LISTENERS.remove(listener)
