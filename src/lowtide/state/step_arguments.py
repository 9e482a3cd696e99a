"""Steps of several arguments, such as `step(x, y)` for the batch `(x, y)`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from lowtide.errors import RehearsalError


def accept_batch(step: Callable[..., Any], batch: Any) -> Callable[[Any], Any]:
    """Return a step whose only argument is `batch`: a tuple or list is unpacked if `step` takes as many arguments.

    Raises RehearsalError if the step can be called neither with the batch nor with its items.
    """
    signature = _signature(step)
    if signature is None or _accepts(signature, 1):
        return step
    if isinstance(batch, tuple | list) and _accepts(signature, len(batch)):
        return functools.partial(_call_unpacked, step)
    n_required = sum(parameter.default is parameter.empty for parameter in signature.parameters.values())
    given = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple | list) else type(batch).__name__
    raise RehearsalError(
        f"step takes {n_required} arguments, and the batch is a {given}. Give a step that takes the batch as its only "
        "argument, or a batch that is a tuple with one element for each argument."
    )


def _call_unpacked(step: Callable[..., Any], batch: Any) -> Any:
    return step(*batch)


def _signature(step: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(step)
    except (TypeError, ValueError):  # no Python function: other checks refuse it
        return None


def _accepts(signature: inspect.Signature, n: int) -> bool:
    try:
        signature.bind(*[None] * n)
    except TypeError:
        return False
    return True
