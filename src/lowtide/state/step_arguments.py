"""Steps of several arguments, such as `step(x, y)` for the batch `(x, y)`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from lowtide.errors import RehearsalError


def of_one_argument(step: Callable[..., Any], batch: Any) -> Callable[[Any], Any]:
    """Return a step that takes `batch` as it is: a tuple or list is unpacked if `step` takes as many arguments.

    Raises RehearsalError if the step can be called neither with the batch nor with its items.
    """
    takes = _signature(step)
    if takes is None or _takes(takes, 1):
        return step
    if isinstance(batch, tuple | list) and _takes(takes, len(batch)):
        return functools.partial(_unpacked, step)
    n_wanted = sum(each.default is each.empty for each in takes.parameters.values())
    found = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple | list) else type(batch).__name__
    raise RehearsalError(
        f"step takes {n_wanted} arguments, and the batch is a {found}: give a step of one argument, the batch, or a "
        "tuple of as many things as the step takes."
    )


def _unpacked(step: Callable[..., Any], batch: Any) -> Any:
    return step(*batch)


def _signature(step: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(step)
    except (TypeError, ValueError):  # not written in Python, or no function: refused elsewhere
        return None


def _takes(signature: inspect.Signature, n: int) -> bool:
    try:
        signature.bind(*[None] * n)
    except TypeError:
        return False
    return True
