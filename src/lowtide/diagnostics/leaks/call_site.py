"""Places in the user's code: a file and a line, and the chain of calls that led there."""

from __future__ import annotations

import dis
import sys
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import NamedTuple

from lowtide.state import introspection
from lowtide.utils.frames import walk_frames

DEPTH = 16
"""Largest number of user frames that are compared to tell one place from another."""

origin = lru_cache(maxsize=4096)(introspection.origin)

_STORES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")
_LOADS = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF")


class Place(NamedTuple):
    """A line of a file, printed as `train.py:42`: relative to the current folder if inside it, else by file name."""

    file: str
    line: int

    def __str__(self) -> str:
        path = Path(self.file)
        try:
            shown = path.relative_to(Path.cwd())
        except (ValueError, OSError):
            shown = Path(path.name)
        return f"{shown}:{self.line}"


class Site(NamedTuple):
    """The line of user code that makes a call, and a hash of the calling instruction and its chain of callers."""

    place: Place
    key: int


def find_calling_site() -> Site:
    """Return the innermost running line of user code, or of another package if no user code is running."""
    frame: FrameType | None = sys._getframe(1)
    place: Place | None = None
    fallback: Place | None = None
    key: list[tuple[str, str, int]] = []
    while frame is not None and len(key) < DEPTH:
        code = frame.f_code
        kind = origin(code.co_filename)
        if kind != "ours":
            line = frame.f_lineno
            key.append((code.co_filename, code.co_name, frame.f_lasti))
            if fallback is None:
                fallback = Place(code.co_filename, line)
            if place is None and kind == "user":
                place = Place(code.co_filename, line)
        frame = frame.f_back
    return Site(place or fallback or Place("<unknown>", 0), hash(tuple(key)))


def is_called_by_user() -> bool:
    """Return True if the innermost frame outside torch and Lowtide is user code, not another library."""
    kinds = (origin(frame.f_code.co_filename) for frame in walk_frames(sys._getframe(1)))
    return next((kind for kind in kinds if kind != "ours"), "") == "user"


def find_store_line(code: CodeType, name: str, current_line: int) -> int:
    """Return the line of `code` that most likely assigned variable `name`, while `current_line` runs.

    That is the last assignment at or above `current_line`; else the last one below it, from an earlier iteration of a
    loop; else `current_line` itself, as for arguments.
    """
    lines = _stores(code).get(name, ())
    above = [line for line in lines if line <= current_line]
    return max(above or lines, default=current_line)


def stores(code: CodeType, name: str) -> bool:
    """Return True if `code` assigns variable `name`."""
    return name in _stores(code)


def is_carried(cls: type, attribute: str) -> bool:
    """Return True if objects of class `cls` keep state from call to call in `attribute`.

    The attribute is state if a method reads it before assigning it, or never assigns it but reads its entries.
    """
    functions = (f for base in cls.__mro__ for name, f in vars(base).items() if name != "__init__")
    codes = (f.__code__ for f in functions if isinstance(f, FunctionType) and origin(f.__code__.co_filename) != "ours")
    return any(_reads_first(code, attribute) for code in codes if attribute in code.co_names)


def _reads_first(code: CodeType, attribute: str) -> bool:
    every = list(dis.get_instructions(code))
    used = [(one.opname, after.argval) for one, after in pairwise(every) if one.argval == attribute]
    stores = [name.startswith("STORE") for name, _ in used]
    reads_entries = not any(stores) and any(after not in _FILLING for _, after in used)
    return bool(used) and not stores[0] and (any(stores) or reads_entries)


@lru_cache(maxsize=1024)
def is_carried_variable(code: CodeType, name: str) -> bool:
    """Return True if a loop in `code` reads variable `name` before assigning it, so that iterations share state."""
    every = list(dis.get_instructions(code))
    for jump in every:
        if "JUMP" in jump.opname and isinstance(jump.argval, int) and jump.argval < jump.offset:
            inside = (one for one in every if jump.argval <= one.offset <= jump.offset)
            accesses = [one.opname for one in inside if one.argval == name and one.opname in (*_LOADS, *_STORES)]
            if accesses and accesses[0] in _LOADS and any(a in _STORES for a in accesses):
                return True
    return False


_FILLING = ("append", "extend", "clear", "add", "update", "insert", "setdefault", "pop")
"""Methods of containers that do not count as reading the container's entries."""


@lru_cache(maxsize=256)
def _stores(code: CodeType) -> dict[str, tuple[int, ...]]:
    lines_of: dict[str, set[int]] = {}
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = instruction.positions.lineno or line if instruction.positions else line
        if instruction.opname in _STORES:
            lines_of.setdefault(str(instruction.argval), set()).add(line)
    return {name: tuple(sorted(lines)) for name, lines in lines_of.items()}
