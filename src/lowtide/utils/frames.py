"""Frames of running functions."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType


def walk_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield `frame` and the frames of its callers, innermost first. Yield nothing if `frame` is None."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def module_name(frame: FrameType) -> str:
    """Return the name of the module that a frame's function is defined in; "" if it has none."""
    name: str = frame.f_globals.get("__name__", "")
    return name
