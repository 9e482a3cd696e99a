"""Find functions of the program that call the model, and the objects in their variables."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from torch.optim import Optimizer

from lowtide.memory.frame_locals import local_variables
from lowtide.script.runner import Script
from lowtide.state.reachable_state import ReachableState

_OTHERS = ("torch.", "lowtide.", "importlib")
_BLOCKS = (*_OTHERS, "contextlib")

_outermost: list[CodeType] = []
"""Functions at which the search for variables ends, because the detected steps are in one of their `with` blocks."""


@contextlib.contextmanager
def end_search_here() -> Iterator[None]:
    """End the search of `caller_variables`, within this block, at the function that entered it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BLOCKS):
        frame = frame.f_back
    codes = [] if frame is None else [frame.f_code]
    del frame  # the code object, because the frame would keep the function's variables alive
    _outermost.extend(codes)
    try:
        yield
    finally:
        for code in codes:
            _outermost.remove(code)


def caller_variables() -> Iterator[Any]:
    """Yield the values of variables in calling functions, innermost first, except those of torch and of this package.

    The search ends at the script, or at the function with the detected block: variables of callers beyond it, such as a
    test, are not searched.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != Script.__module__:
        if not frame.f_globals.get("__name__", "").startswith(_OTHERS):
            with local_variables(frame) as variables:
                values = [*variables.values()]
            yield from values
        if frame.f_code in _outermost:
            break
        frame = frame.f_back


def caller_optimizers() -> list[Optimizer]:
    """Return the optimizers reachable from the variables of calling functions."""
    return [thing for thing in ReachableState(*caller_variables()).visited if isinstance(thing, Optimizer)]
