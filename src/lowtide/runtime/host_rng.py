"""The states of the random numbers that Python code draws: those of `random` and of NumPy.

A state is told apart by identity: two calls give the same object if nothing was drawn between them. NumPy builds its
state of 624 numbers one by one, which takes longer than the calls of most modules; its memory tells the same at once.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np

_MT19937_BYTES = 625 * 4
"""Of mt19937_state: 624 numbers and the place in them (numpy/random/src/mt19937/mt19937.h, since 1.17)."""
_NORMAL = slice(3, 5)
"""Where a state says whether one more normal number was drawn, and waits: it is given without the memory changing."""

_of_python: tuple[Any, ...] = ()
_of_numpy: tuple[bytes | None, Any] = None, None
"""What the memory was when the state was read last, and the state."""


def python_state() -> tuple[Any, ...]:
    """`random.getstate()`."""
    global _of_python
    state = random.getstate()
    if state != _of_python:
        _of_python = state
    return _of_python


def numpy_state() -> Any:
    """What `np.random.set_state` takes; of another generator than NumPy's own default a new one each time.

    Its memory does not say whether a second normal number waits. Who sets back by `np.random.set_state` to where one
    does, and has drawn nothing but that one since, is not noticed.
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
    """Set one that `numpy_state` gave: a normal number waits or not, with the same memory."""
    global _of_numpy
    np.random.set_state(state)
    _of_numpy = _memory(), state


def _memory() -> bytes | None:
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    is_default = type(generator) is np.random.MT19937
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES) if is_default else None
