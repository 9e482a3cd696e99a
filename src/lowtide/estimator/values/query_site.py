"""Find the line of the step that made a query."""

from __future__ import annotations

import sys
from types import FrameType

from lowtide._torch.fake_modes import is_own

_OF_ARRAYS = ("numpy.", "scipy.", "sklearn.")


def where() -> str:
    """Return `file:line` of the innermost Python code outside torch, this package and array libraries."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_own(frame) and not frame.f_globals.get("__name__", "").startswith(_OF_ARRAYS):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "(no line)"


def asked_by_loader() -> bool:
    """Return True if torch's data loaders and samplers ask, to choose rows."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.utils.data"):
            return True
        if not is_own(frame):
            return False
        frame = frame.f_back
    return False
