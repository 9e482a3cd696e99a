"""Who calls the model: the functions of the program, and what they have at hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from lowtide.memory.frame_locals import local_variables
from lowtide.script.runner import Script
from lowtide.state.reachable_state import Reached

_OTHERS = ("torch.", "lowtide.", "importlib")


def at_hand() -> Iterator[Any]:
    """What is in variables of the functions that called here, from the inside out, but for torch's and this package's.

    As far as the script: who runs it, a test say, may have as many variables as it likes.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != Script.__module__:
        if not frame.f_globals.get("__name__", "").startswith(_OTHERS):
            with local_variables(frame) as variables:
                values = [*variables.values()]
            yield from values
        frame = frame.f_back


def optimizers_at_hand() -> list[Optimizer]:
    """Optimizers that these lead to."""
    return [thing for thing in Reached(*at_hand()).things if isinstance(thing, Optimizer)]
