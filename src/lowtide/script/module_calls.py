"""Interception of all module calls in the process, including classes whose own `__call__` bypasses torch's."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from lowtide._torch.patching import replace_function
from lowtide.runtime.class_calls import find_call_class, find_call_classes


def intercept_all_calls(call: Callable[..., Any]) -> Callable[[], None]:
    """Replace each module call by `call(plain, module, *args, **kwargs)`; return a function that undoes this.

    `plain` is the `__call__` of the module's class. Classes that are defined later are patched at their first instance.
    """
    stack = contextlib.ExitStack()
    make = functools.partial(functools.partial, call)
    own_calls: set[type] = set()

    def patch(kind: type) -> None:
        if kind not in own_calls:
            own_calls.add(kind)
            stack.callback(replace_function(kind, "__call__", make))

    def construct(plain: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if (kind := find_call_class(module)) is not None:
            patch(kind)
        return plain(module, *args, **kwargs)

    stack.callback(replace_function(nn.Module, "__call__", make))
    stack.callback(replace_function(nn.Module, "__init__", functools.partial(functools.partial, construct)))
    for kind in find_call_classes():
        patch(kind)
    return stack.close
