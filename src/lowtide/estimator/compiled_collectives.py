"""Collectives in compiled code: the compiler moves and merges them, so their memory is not estimated."""

from __future__ import annotations

import inspect
import sys
from types import CodeType
from typing import Any
from weakref import WeakSet

from torch import nn

from lowtide._torch.compiled_code import is_compiled
from lowtide.errors import RehearsalError
from lowtide.utils.frames import walk_frames

_modules: WeakSet[nn.Module] = WeakSet()
_codes: set[CodeType] = set()


def remember_compiled(compiled: Any) -> None:
    """Remember a module or function that a script compiles and that the estimate runs uncompiled."""
    if isinstance(compiled, nn.Module):
        _modules.add(compiled)
    elif (code := getattr(inspect.unwrap(compiled), "__code__", None)) is not None:
        _codes.add(code)


def refuse_in_compiled_code(name: str) -> None:
    """Raise RehearsalError if compiled code has called the collective `name`, which is running now."""
    for frame in walk_frames(sys._getframe(2)):
        module = frame.f_locals.get("self") if frame.f_code.co_name == "_call_impl" else None
        is_module = isinstance(module, nn.Module) and (module in _modules or is_compiled(module))
        if is_module or frame.f_code in _codes:
            raise RehearsalError(
                f"a collective ({name}) runs in compiled code, {_name(module, frame.f_code)}: the compiler moves and "
                "merges collectives, which is not estimated.\n  "
                "Estimate without torch.compile, or compile only parts without collectives."
            )


def _name(module: object, code: CodeType) -> str:
    return code.co_name if module is None else type(module).__name__
