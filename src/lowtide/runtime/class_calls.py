"""Interception of calls of module classes that define their own `__call__` and bypass torch's, such as gpytorch's.

`nn.Module.__call__` uses the attribute CALL to run the module, which is where interceptors are installed. A class may
have a `__call__` that runs `self.forward` itself. While a plan is in force, a replacement for it uses the same
attribute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

from torch import nn

from lowtide._torch.modules import CALL, get_original_call
from lowtide._torch.patching import original, replace_function

_ONWARD = {"__call__", "_call_impl", "_wrapped_call_impl"}


def find_call_class(module: nn.Module) -> type | None:
    """Return the class of `module`, or base class, whose `__call__` bypasses torch's; None if calls use torch's."""
    for base in type(module).__mro__:
        if _is_torchs(base):
            return None
        if _bypasses_torch(base):
            return base
    return None


def find_call_classes() -> set[type]:
    """Return the module classes, among those defined so far, whose own `__call__` bypasses torch's."""
    classes: set[type] = set()
    pending: list[type] = [nn.Module]
    while pending:
        kinds: list[type] = pending.pop().__subclasses__()
        pending += kinds
        classes.update(kind for kind in kinds if not _is_torchs(kind) and _bypasses_torch(kind))
    return classes


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _bypasses_torch(kind: type) -> bool:
    call = original(kind, "__call__") if "__call__" in vars(kind) else None
    return isinstance(call, FunctionType) and not _ONWARD & {*call.__code__.co_names}


def intercept_calls(modules: Iterable[nn.Module]) -> list[Callable[[], None]]:
    """Replace each `__call__` that bypasses torch's, in the classes of `modules`, by one that uses the attribute CALL.

    The replacement calls the object in a module's attribute CALL, if there is one, as torch's own `__call__` does.
    Returns functions, each of which undoes this for one class.
    """
    kinds = {kind for module in modules if (kind := find_call_class(module)) is not None}
    replace = functools.partial(functools.partial, _call_front)
    return [replace_function(kind, "__call__", replace, innermost=True) for kind in kinds]


def _call_front(plain: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    front = module.__dict__.get(CALL)
    return plain(module, *args, **kwargs) if front is None else front(*args, **kwargs)


def bypass_fronts(module: nn.Module) -> Callable[..., Any]:
    """Return a function that calls `module` without the interceptors in its attribute CALL."""
    kind = find_call_class(module)
    return get_original_call(module) if kind is None else functools.partial(original(kind, "__call__"), module)
