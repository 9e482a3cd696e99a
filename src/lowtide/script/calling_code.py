"""Functions of the program that call the model, and the objects in their variables."""

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
"""Functions up to which variables are looked at: those with a block whose steps are watched."""


@contextlib.contextmanager
def as_far_as() -> Iterator[None]:
    """A block in which `at_hand` ends with the function that has entered it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BLOCKS):
        frame = frame.f_back
    codes = [] if frame is None else [frame.f_code]
    del frame  # it would hold the function's variables
    _outermost.extend(codes)
    try:
        yield
    finally:
        for code in codes:
            _outermost.remove(code)


def at_hand() -> Iterator[Any]:
    """What is in variables of the functions that called here, from the inside out, but for torch's and this package's.

    As far as the script, or the function with the block that is watched: who runs it, a test say, may have as many
    variables as it likes.
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


def optimizers_at_hand() -> list[Optimizer]:
    """Optimizers that these lead to."""
    return [thing for thing in ReachableState(*at_hand()).things if isinstance(thing, Optimizer)]
