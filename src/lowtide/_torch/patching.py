"""Functions of torch that something of this package stands in for: several at once, and taken away in any order.

And hooks of torch's that are for the whole process, told of what is of one thread (`this_thread_only`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowtide._torch.backward import in_backward
from lowtide._torch.compiled_code import not_compiled_alone

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Gives what stands in for a function, which it calls."""

_standing: dict[tuple[Any, str], tuple[Callable[..., Any], list[Make]]] = {}
"""By where a function is: what is there instead of it, and who stands in, the last one outermost."""


_inherited: set[tuple[Any, str]] = set()
"""Those of classes that inherit the function, and have it no longer when nothing stands in for it."""


def stand_in(owner: Any, name: str, make: Make, *, innermost: bool = False) -> Callable[[], None]:
    """Have `make(function)` stand in for the function `owner.name` until what this gives is called.

    The last one is the outermost, and calls those before it, unless it is to be the `innermost`.

    `make` is called at each call, but for those in code that is just being compiled. Whoever replaced the function
    since, and did not know of this, keeps their place.
    """
    if (owner, name) not in _standing:
        _standing[owner, name] = _installed(owner, name)
    instead, makes = _standing[owner, name]
    own: Make = functools.partial(make)  # another one at each call
    makes.insert(0 if innermost else len(makes), own)

    def remove() -> None:
        makes[:] = [other for other in makes if other is not own]
        if not makes and vars(owner)[name] is instead:
            if (owner, name) in _inherited:
                delattr(owner, name)
                _inherited.remove((owner, name))
            else:
                setattr(owner, name, vars(instead)["__wrapped__"])
            del _standing[owner, name]

    return remove


def _installed(owner: Any, name: str) -> tuple[Callable[..., Any], list[Make]]:
    if name not in vars(owner):
        _inherited.add((owner, name))
    original = vars(owner).get(name, getattr(owner, name))
    makes: list[Make] = []

    @not_compiled_alone
    @functools.wraps(original)
    def instead(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        function = original
        for make in makes:
            function = make(function)
        return function(*args, **kwargs)

    setattr(owner, name, instead)
    return instead, makes


def original(owner: Any, name: str) -> Any:
    """Return the function `owner.name` that others stand in for, if any do."""
    found = vars(owner)[name]
    instead, _ = _standing.get((owner, name), (None, None))
    return vars(instead)["__wrapped__"] if found is instead else found


def wrap_module_calls(
    begins: Callable[[nn.Module], object], ends: Callable[[nn.Module, Any], object]
) -> Callable[[], None]:
    """Have these told of each call of a module, `ends` with what it gave or None, until what this gives is called.

    A hook for all modules would be compiled with those that were compiled where they stand (`Module.compile`).
    """
    return stand_in(nn.Module, "__call__", lambda call: functools.partial(_told, begins, ends, call))


def this_thread_only(
    told: Callable[..., object], is_ours: Callable[[Tensor], bool] = lambda _: False
) -> Callable[..., None]:
    """An optimizer's hook for all, which in other threads is not called: they train something else.

    But inside of a backward pass, as a GPU's nodes run in a thread of the GPU, and of an optimizer that has a
    parameter of ours: a step may hand its update to another thread.
    """
    mine = threading.get_ident()

    def asked(optimizer: Optimizer, *args: Any) -> None:
        here = threading.get_ident() == mine or in_backward()
        if here or any(is_ours(p) for group in optimizer.param_groups for p in group["params"]):
            told(optimizer, *args)

    return asked


@not_compiled_alone
def _told(
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


TOLD_CODE = _told.__code__
"""Of the frame from which `begins` and `ends` are called: what the module was given is in `args` and `kwargs`."""
