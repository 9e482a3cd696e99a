"""States of the random number generators of Python code: those of `random` and of NumPy.

States are compared by identity: two calls return the same object if nothing was drawn between them. Python and NumPy
build their states of 624 numbers one by one, which takes longer than the calls of most modules; comparing their memory
is immediate.
"""

from __future__ import annotations

import ctypes
import random
import struct
from typing import Any, Final

import numpy as np

_MT19937_BYTES = 625 * 4
"""Bytes of mt19937_state: 624 numbers and the position in them (numpy/random/src/mt19937/mt19937.h, since 1.17)."""
_NORMAL = slice(3, 5)
"""Fields of a state for a cached second normal number. A draw that returns that number does not change the compared
memory.
"""

_PYTHONS: Final[random.Random] = random.getstate.__self__  # type: ignore[attr-defined]
_PYTHONS_WORDS: Final = struct.Struct("=i624I")
"""Layout of RandomObject: the position in its 624 numbers, and these (Modules/_randommodule.c, 3.2 to 3.14)."""


def _pythons_memory() -> bytes:
    return ctypes.string_at(id(_PYTHONS) + object.__basicsize__, _PYTHONS_WORDS.size)


def _is_layout_known() -> bool:
    """Return True if the memory of Python's generator matches its state."""
    if type(_PYTHONS).__base__.__basicsize__ < object.__basicsize__ + _PYTHONS_WORDS.size:  # type: ignore[union-attr]
        return False
    place, *numbers = _PYTHONS_WORDS.unpack(_pythons_memory())
    return bool((*numbers, place) == random.getstate()[1])


_IS_LAYOUT_KNOWN: Final = _is_layout_known()

_of_python: tuple[tuple[bytes, float | None] | None, tuple[Any, ...]] = None, ()
"""The memory when the state was last read, with the cached normal number, and the state."""
_of_numpy: tuple[bytes | None, Any] = None, None
"""The memory when the state was last read, and the state."""


def python_state() -> tuple[Any, ...]:
    """Return `random.getstate()`, the same object if nothing was drawn."""
    global _of_python
    memory, state = _of_python
    now = (_pythons_memory(), _PYTHONS.gauss_next) if _IS_LAYOUT_KNOWN else None  # type: ignore[attr-defined]
    if now is None or now != memory:
        read = random.getstate()
        if read != state:
            state = read
        _of_python = now, state
    return state


def numpy_state() -> Any:
    """Return a state for `np.random.set_state`; for generators other than NumPy's own default a new object each time.

    The memory does not show if a second normal number is cached. Code that calls `np.random.set_state` with a state
    that caches one, and has drawn only that one since, goes unnoticed.
    """
    global _of_numpy
    memory, state = _of_numpy
    now = _memory()
    if now is None:
        return np.random.get_state(legacy=False)
    if now == memory and not any(state[_NORMAL]):
        return state
    read: Any = np.random.get_state()
    if now != memory or read[_NORMAL] != state[_NORMAL]:
        state = read
    _of_numpy = now, state
    return state


def set_numpy_state(state: Any) -> None:
    """Set a state returned by `numpy_state`; its memory is the same with or without a cached normal number."""
    global _of_numpy
    np.random.set_state(state)
    _of_numpy = _memory(), state


def _memory() -> bytes | None:
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    is_default = type(generator) is np.random.MT19937
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES) if is_default else None
