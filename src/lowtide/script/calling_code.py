"""Find functions of the program that call the model, and the objects in their variables."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from lowtide.memory.frame_locals import local_variables
from lowtide.script.runner import Script
from lowtide.state.reachable_state import ReachableState
from lowtide.utils.frames import module_name, walk_frames

_OTHERS = ("torch.", "lowtide.", "importlib")
_BLOCKS = (*_OTHERS, "contextlib")
_FOR_CALLER = "lowtide.levers.accumulation."
"""Package whose functions hold pieces of the caller's batch in variables."""

_outermost: list[CodeType] = []
"""Functions at which the search for variables ends, because the detected steps are in one of their `with` blocks."""


@contextlib.contextmanager
def end_search_here() -> Iterator[None]:
    """Within this block, end the search of `find_caller_variables` at the function that entered the block."""
    codes = (frame.f_code for frame in walk_frames(sys._getframe(1)) if not module_name(frame).startswith(_BLOCKS))
    code = next(codes)
    del codes  # the generator keeps frames, and so their variables, alive
    _outermost.append(code)
    try:
        yield
    finally:
        _outermost.remove(code)


def find_caller_variables() -> Iterator[Any]:
    """Yield the values of variables in calling functions, innermost first; functions of torch and Lowtide are skipped.

    Variables of Lowtide's `accumulate` are included, because they hold the pieces of the caller's batch. The search
    ends at the script, or at the function with the `with` block in which steps are detected. Callers of that function,
    such as a test, are not searched.
    """
    for frame in walk_frames(sys._getframe(1)):
        if module_name(frame) == Script.__module__:
            break
        name = module_name(frame)
        if name.startswith(_FOR_CALLER) or not name.startswith(_OTHERS):
            with local_variables(frame) as variables:
                values = [*variables.values()]
            yield from values
        if frame.f_code in _outermost:
            break


def find_caller_optimizers() -> list[Optimizer]:
    """Return the optimizers reachable from the variables of calling functions."""
    return [obj for obj in ReachableState(*find_caller_variables()).visited if isinstance(obj, Optimizer)]


def is_registered_now(module: nn.Module) -> bool:
    """Return True if torch is just registering the parametrization `module`, and calls the module only to check its
    result.
    """
    if not isinstance(module, ParametrizationList):
        return False
    return any(frame.f_code is ParametrizationList.__init__.__code__ for frame in walk_frames(sys._getframe(1)))
