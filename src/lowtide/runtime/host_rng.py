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
_HAS_NORMAL: Final = 3

_PYTHONS: Final[random.Random] = random.getstate.__self__  # type: ignore[attr-defined]
_PYTHONS_WORDS: Final = struct.Struct("=i624I")
"""Layout of RandomObject: the position in its 624 numbers, and these (Modules/_randommodule.c, 3.2 to 3.14)."""


def _find_pythons_memory() -> ctypes.Array[ctypes.c_char] | None:
    """Return the memory that holds the state of Python's module `random`; None if it does not match `getstate()`."""
    if type(_PYTHONS).__base__.__basicsize__ < object.__basicsize__ + _PYTHONS_WORDS.size:  # type: ignore[union-attr]
        return None
    memory = (ctypes.c_char * _PYTHONS_WORDS.size).from_address(id(_PYTHONS) + object.__basicsize__)
    place, *numbers = _PYTHONS_WORDS.unpack(memory.raw)
    return memory if (*numbers, place) == random.getstate()[1] else None


_PYTHONS_MEMORY: Final = _find_pythons_memory()

_of_python: tuple[tuple[bytes, float | None] | None, tuple[Any, ...]] = None, ()
"""Python's generator at the last read: its memory with the cached normal number, and its state."""
_of_numpy: tuple[bytes | None, Any] = None, None
"""NumPy's generator at the last read: its memory, and its state."""


_latest: tuple[tuple[Any, ...] | None, tuple[Any, ...], Any] = None, (), None
"""The memory of the generators when `states` read them last, and the states that it returned."""


def states() -> tuple[tuple[Any, ...] | None, tuple[Any, ...], Any]:
    """Return `memory()`, which changes when a number is drawn, and the states of Python's and NumPy's generators."""
    global _latest
    now = memory()
    if now is None or now != _latest[0]:
        python, numpy = read_python_state(), read_numpy_state()
        _latest = memory(), python, numpy
    return _latest


def read_python_state() -> tuple[Any, ...]:
    """Return `random.getstate()`; the same object as in the last call if nothing was drawn since."""
    global _of_python
    memory, state = _of_python
    now = None if _PYTHONS_MEMORY is None else (_PYTHONS_MEMORY.raw, _PYTHONS.gauss_next)  # type: ignore[attr-defined]
    if now is None or now != memory:
        read = random.getstate()
        if read != state:
            state = read
        _of_python = now, state
    return state


def read_numpy_state() -> Any:
    """Return the state of NumPy's generator for `np.random.set_state`: the same object as in the last call if nothing
    was drawn since. For a generator other than NumPy's own default, each call returns a new object.

    NumPy caches every second normally distributed number outside the compared memory. So a draw goes unnoticed if code
    calls `np.random.set_state` with a state that contains a cached number, and then draws only this number.
    """
    global _of_numpy
    memory, state = _of_numpy
    now = _read_numpy_memory()
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
    """Set NumPy's generator to `state`, which `read_numpy_state` returned, and remember `state`.

    It is remembered because the generator's memory does not show whether the state caches a normal number.
    """
    global _of_numpy
    np.random.set_state(state)
    _of_numpy = _read_numpy_memory(), state


_numpys: tuple[Any, ctypes.Array[ctypes.c_char] | None] = None, None
"""NumPy's global generator, and its state buffer if it is an MT19937, the default."""


def _read_numpy_memory() -> bytes | None:
    global _numpys
    generator, memory = np.random.get_bit_generator(), _numpys[1]  # type: ignore[attr-defined]
    if generator is not _numpys[0]:
        is_default = type(generator) is np.random.MT19937
        kind = ctypes.c_char * _MT19937_BYTES
        memory = kind.from_address(generator.ctypes.state_address) if is_default else None
        _numpys = generator, memory
    return None if memory is None else memory.raw


def memory() -> tuple[Any, ...] | None:
    """Return an object that compares equal until Python's or NumPy's generator draws a number; None if a draw could go
    unnoticed.
    """
    generator, numpys = _numpys
    if _PYTHONS_MEMORY is None or numpys is None or _of_numpy[1][_HAS_NORMAL]:
        return None
    if np.random.get_bit_generator() is not generator:  # type: ignore[attr-defined]
        return None
    gauss = _PYTHONS.gauss_next  # type: ignore[attr-defined]
    return _PYTHONS_MEMORY.raw, gauss, numpys.raw
