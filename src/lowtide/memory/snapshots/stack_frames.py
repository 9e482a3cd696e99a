"""Extract from a recorded stack the operator that requested memory, and the line of the user's program."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

# the operator without its overload: div_Tensor
_OPERATOR = re.compile(r"^at::_ops::(\w+?)(?:_[A-Z]\w*)?::(?:call|redispatch)\b")
_NOT_THE_USERS = re.compile(r"(?:site|dist)-packages[/\\](?:torch|torchvision|einops)[/\\]")

Frames = Sequence[Mapping[str, Any]]


def operator(frames: Frames) -> str:
    """Return the innermost operator, "aten::mm"; the innermost Python function if C++ was not recorded; or ""."""
    for frame in frames:
        match = _OPERATOR.match(str(frame.get("name", "")))
        if match:
            return f"aten::{match[1]}"
    python = next(_python(frames), None)
    return str(python.get("name", "")) if python else ""


def place(frames: Frames) -> str:
    """Return the innermost line outside torch and einops, "model.py:42 forward"; else any Python line; or ""."""
    python = list(_python(frames))
    own = [frame for frame in python if not _NOT_THE_USERS.search(str(frame["filename"]))]
    if not python:
        return ""
    frame = (own or python)[0]
    return f"{PurePath(str(frame['filename'])).name}:{frame.get('line', 0)} {frame.get('name', '')}".rstrip()


def _python(frames: Frames) -> Iterator[Mapping[str, Any]]:
    return (frame for frame in frames if str(frame.get("filename", "")).endswith(".py"))
