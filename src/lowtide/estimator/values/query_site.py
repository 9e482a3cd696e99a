"""Find the line of code that reads the contents of a tensor."""

from __future__ import annotations

import sys

from lowtide._torch.fake_modes import is_own
from lowtide.utils.frames import module_name, walk_frames

_OF_ARRAYS = ("numpy.", "scipy.", "sklearn.")


def where() -> str:
    """Return `file:line` of the innermost running code outside torch, this package and array libraries."""
    for frame in walk_frames(sys._getframe(1)):
        if not is_own(frame) and not module_name(frame).startswith(_OF_ARRAYS):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return "(no line)"


def asked_by_loader() -> bool:
    """Return True if torch's data loaders or samplers, which choose rows, read a tensor's contents."""
    for frame in walk_frames(sys._getframe(1)):
        if module_name(frame).startswith("torch.utils.data"):
            return True
        if not is_own(frame):
            return False
    return False
