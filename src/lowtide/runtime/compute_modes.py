"""Settings of the process that decide which kernels a module call runs: autocast, and the kernels of attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lowtide._torch.modes import ATTENTION_KERNELS
from lowtide.runtime.saved_values import native

_FLASH, _EFFICIENT, _MATH, _CUDNN = (enabled for enabled, _ in ATTENTION_KERNELS.values())


def _read_modes_in_python(kinds: tuple[str, ...]) -> list[Any]:
    """Return the kernels that attention may use, and autocast's cache, flag and dtype for the `kinds` of devices."""
    modes = [(_FLASH(), _EFFICIENT(), _MATH(), _CUDNN()), torch.is_autocast_cache_enabled()]
    for kind in kinds:
        modes += torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return modes


compute_modes: Callable[[tuple[str, ...]], list[Any]] = _read_modes_in_python if native is None else native.modes


def restore_modes(modes: list[Any], kinds: tuple[str, ...], undo: list[Callable[[], object]]) -> None:
    """Restore settings that `compute_modes(kinds)` returned; add to `undo` functions that undo each change."""
    kernels, cache, *autocast = modes
    for (enabled, switch), then in zip(ATTENTION_KERNELS.values(), kernels, strict=True):
        if enabled() != then:
            undo.append(partial(switch, not then))
            switch(then)
    for kind, on, dtype in zip(kinds, autocast[::2], autocast[1::2], strict=True):
        block = torch.autocast(kind, enabled=on, dtype=dtype, cache_enabled=cache)
        block.__enter__()  # type: ignore[no-untyped-call]
        undo.append(partial(block.__exit__, None, None, None))
