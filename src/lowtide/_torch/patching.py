"""Replacements for functions of torch: several at once, removable in any order.

Also limits torch's process-wide optimizer hooks to one thread (`this_thread_only`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lowtide._torch.backward import in_backward
from lowtide._torch.compiled_code import called_between_graphs, is_compiling_here, not_compiled_alone
from lowtide._torch.optim import list_parameters

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Function that returns a replacement for its argument, which the replacement calls."""

_replacements: dict[tuple[Any, str], tuple[Callable[..., Any], list[Make]]] = {}
"""For each replaced function, by owner and name: the function installed in its place, and the list of replacements that
it calls, the last one outermost.
"""


_inherited: set[tuple[Any, str]] = set()
"""Owner and name of replaced functions that the owner, a class, inherited; restoring deletes the class's attribute."""


def replace_function(owner: Any, name: str, make: Make, *, innermost: bool = False) -> Callable[[], None]:
    """Replace the function `owner.name` by `make(function)` until the returned function is called.

    The last replacement is the outermost and calls earlier ones; with `innermost`, all others call it.

    `make` is called at each call, except in code that is being compiled. If other code has replaced the function in the
    meantime, its replacement stays.
    """
    if (owner, name) not in _replacements:
        _replacements[owner, name] = _install(owner, name)
    replacement, makes = _replacements[owner, name]
    own: Make = functools.partial(make)  # a distinct object for each call of `replace_function`
    makes.insert(0 if innermost else len(makes), own)

    def remove() -> None:
        makes[:] = [other for other in makes if other is not own]
        if not makes and vars(owner)[name] is replacement:
            if (owner, name) in _inherited:
                delattr(owner, name)
                _inherited.remove((owner, name))
            else:
                setattr(owner, name, vars(replacement)["__wrapped__"])
            del _replacements[owner, name]

    return remove


def _install(owner: Any, name: str) -> tuple[Callable[..., Any], list[Make]]:
    if name not in vars(owner):
        _inherited.add((owner, name))
    original = vars(owner).get(name, getattr(owner, name))
    makes: list[Make] = []

    @not_compiled_alone
    def replaced(*args: Any, **kwargs: Any) -> Any:
        function = original
        for make in makes:
            function = make(function)
        return function(*args, **kwargs)

    @not_compiled_alone
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        # Refers to functions alone: dynamo gives up at other objects here where compiled code makes a module.
        if is_compiling_here():
            return original(*args, **kwargs)
        return replaced(*args, **kwargs)

    setattr(owner, name, replacement)
    return replacement, makes


def original(owner: Any, name: str) -> Any:
    """Return the function `owner.name` without its replacements."""
    function = vars(owner)[name]
    replacement, _ = _replacements.get((owner, name), (None, None))
    return vars(replacement)["__wrapped__"] if function is replacement else function


def wrap_module_calls(
    begins: Callable[[nn.Module], object], ends: Callable[[nn.Module, Any], object]
) -> Callable[[], None]:
    """Call `begins(module)` before each module call and `ends(module, output)` after it, until the returned function is
    called.

    `output` is None if the call has raised an exception. A global module hook would be compiled along with modules that
    `Module.compile` has compiled.
    """
    return replace_function(nn.Module, "__call__", lambda call: functools.partial(_call_observed, begins, ends, call))


def this_thread_only(
    hook: Callable[..., object], is_ours: Callable[[Tensor], bool] = lambda _: False
) -> Callable[..., None]:
    """Return a global optimizer hook that calls `hook` only for steps in this thread, because other threads train other
    models.

    Two kinds of steps in other threads count as well: those inside a backward pass, because a GPU's nodes run in a
    thread of the GPU, and those of an optimizer with a parameter for which `is_ours` is True, because a step may hand
    its update to another thread.
    """
    thread = threading.get_ident()

    @called_between_graphs
    def run_hook(optimizer: Optimizer, *args: Any) -> None:
        is_counted = threading.get_ident() == thread or in_backward()
        if is_counted or any(is_ours(p) for p in list_parameters(optimizer)):
            hook(optimizer, *args)

    return run_hook


@not_compiled_alone
def _call_observed(
    begins: Callable[[nn.Module], object],
    ends: Callable[[nn.Module, Any], object],
    call: Callable[..., Any],
    module: nn.Module,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    begins(module)
    output = None
    try:
        output = call(module, *args, **kwargs)
    finally:
        ends(module, output)
    return output


OBSERVED_CALL_CODE = _call_observed.__code__
"""Code object of the frame that calls `begins` and `ends`; its locals `args` and `kwargs` are the module's
arguments.
"""
