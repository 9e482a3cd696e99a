"""Read the local variables of a running function without leaving a trace in it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_LOCALS_ARE_COPIED = sys.version_info < (3, 13)


@contextmanager
def local_variables(frame: FrameType) -> Iterator[dict[str, Any]]:
    """Provide the local variables of a function's frame, without leaving it a copy that would keep their values alive.

    Up to Python 3.12 `f_locals` is a dict that stays with the frame, and is rebuilt at each access.
    """
    variables = frame.f_locals if _LOCALS_ARE_COPIED else dict(frame.f_locals)
    try:
        yield variables
    finally:
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            variables.clear()
