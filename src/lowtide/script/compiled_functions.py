"""Detect calls of compiled functions (torch.compile) that run the trained model: compiled code calls no modules.

While steps are detected, `torch.compile` returns functions that pass their calls to the detector. A function that was
compiled earlier is not seen.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from lowtide._torch.compiled_code import is_compiling_here
from lowtide._torch.patching import replace_function
from lowtide.state.introspection import find_user_functions, variables


class _Detector(Protocol):
    def calls_compiled(
        self, function: Callable[..., Any], of: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call `function`, which torch.compile returned for `of`, with `args` and `kwargs`, and return its result."""


def watch_compiled_functions(detector: _Detector) -> Callable[[], None]:
    """Patch torch.compile so that compiled functions are called through `detector`; return a function to undo this."""
    reference: weakref.ref[_Detector] | None = weakref.ref(detector)

    def compiles(plain: Callable[..., Any], model: Any = None, **settings: Any) -> Any:
        made = plain(model, **settings)
        if model is None or isinstance(model, nn.Module) or not callable(model):
            return made  # the decorator form calls torch.compile a second time, with the function

        @functools.wraps(made)
        def watched(*args: Any, **kwargs: Any) -> Any:
            watching = None if is_compiling_here() or reference is None else reference()
            return made(*args, **kwargs) if watching is None else watching.calls_compiled(made, model, args, kwargs)

        return watched

    unwatch = replace_function(torch, "compile", functools.partial(functools.partial, compiles))

    def stop() -> None:
        nonlocal reference
        reference = None
        unwatch()

    return stop


def find_trained_modules(function: Callable[..., Any], args: Any, kwargs: Any) -> list[nn.Module]:
    """Return the outermost modules that a call of `function` may train: arguments, or variables that it reads."""
    given = [*args, *kwargs.values(), getattr(function, "__self__", None)]
    named = [content for user_function in find_user_functions(function) for _, _, content in variables(user_function)]
    modules = {id(obj): obj for obj in (*given, *named) if isinstance(obj, nn.Module) and obj.training}
    trained = [module for module in modules.values() if any(p.requires_grad for p in module.parameters())]
    inside = {id(below) for module in trained for below in module.modules() if below is not module}
    return [module for module in trained if id(module) not in inside]
