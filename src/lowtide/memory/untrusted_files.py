"""Read untrusted files: their contents are checked while reading, and an error about them fits on one line."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

LARGEST = 2**62
"""Upper limit of numbers in a file: sums of a few are exact in 64 bits."""
LARGEST_TIME = 1e18
"""Upper limit of times in a file, in milliseconds."""
MOST_UNPACKED = 64
"""Limit on the ratio of unpacked to compressed bytes: traces reach up to ten."""
_LONGEST = 300


def in_one_line(text: str) -> str:
    """Return text from a file as an error shows it: on one line, printable and not long."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text[: _LONGEST + 1])
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."


def unpacked(path: Path) -> bytes:
    """Return a file's bytes, unpacked if its name ends in .gz. Raises ValueError above MOST_UNPACKED times its size."""
    data = path.read_bytes()
    if path.suffix != ".gz":
        return data
    most, parts = MOST_UNPACKED * len(data), []
    while data:  # a gzip file may have several members
        unpack = zlib.decompressobj(wbits=31)
        try:
            parts.append(unpack.decompress(data, most + 1))
        except zlib.error as error:
            raise ValueError(str(error)) from error
        most -= len(parts[-1])
        if most < 0:
            raise ValueError(f"it unpacks to more than {MOST_UNPACKED} times its bytes")
        if not unpack.eof:
            raise ValueError("it is cut off")
        data = unpack.unused_data.lstrip(b"\0")
    return b"".join(parts)


def check_numbers(record: Any) -> None:
    """Raise ValueError for a number in a record, or nested in it, that is too large to compute with."""
    pending = [record]
    while pending:
        obj = pending.pop()
        if isinstance(obj, int):
            if not -LARGEST < obj < LARGEST:
                raise ValueError(f"a number of {len(hex(obj)) - 2} hexadecimal digits is in it")
        elif isinstance(obj, float):
            if not -LARGEST_TIME < obj < LARGEST_TIME:
                raise ValueError(f"it has the number {obj}")
        elif isinstance(obj, tuple | list | frozenset):
            pending += obj
        elif isinstance(obj, Mapping):
            pending += obj.values()
        elif is_dataclass(obj):
            pending += (getattr(obj, field.name) for field in fields(obj))
