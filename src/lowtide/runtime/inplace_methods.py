"""In-place methods and functions of torch, intercepted before they write: `bias.data.clamp_(...)`, `torch.relu_(x)`.

The replacements are attributes of `torch.Tensor`, which inherits these methods, of `torch.UntypedStorage`, and of the
modules that have the functions. A write through a view, through `.data` or to a buffer is such a call, too. Also
intercepted are `tensor.data = other`, and `tensor.numpy()`, whose array shares the tensor's memory. Writes that Python
code makes in another way, such as through `out=`, are not intercepted.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from lowtide._torch.compiled_code import (
    compiled_as,
    is_compiling_anywhere,
    is_compiling_here,
    is_traced,
    not_compiled_alone,
    scripted_as,
)
from lowtide._torch.inplace_functions import STORAGE_METHODS, inplace_functions, intercept_data, list_foreach_functions
from lowtide.runtime.exposed_memory import note_alias, note_array
from lowtide.utils.frames import module_name

watched = False
"""True if a tensor may be read again by a recompute or replay; while False, no write is reported."""

torchs_own: dict[Any, Any] = {}
"""torch's own method or function, by the replacement for it. Function modes are called with the replacement."""

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_NO_WRITERS = frozenset({
    "as_strided_", "detach_", "rename_", "requires_grad_", "share_memory_", "squeeze_", "swapaxes_", "swapdims_", "t_",
    "transpose_", "unsqueeze_",
})  # fmt: skip
"""Methods that change what is known about a tensor, not its contents."""

SHARES_MEMORY: Final = "Tensor.numpy"
"""Name of the method that shares a tensor's memory with a NumPy array, through which other code may write."""

ALIAS: Final = "Tensor.data"
"""Name of the attribute that returns another tensor with the same memory; in-place methods report writes to that."""


class _Here(threading.local):
    reports = False
    """True while this thread reports a write: copies that are made then are writes too, and not reported."""


_here = _Here()

Writes = Callable[[Sequence[Tensor | torch.UntypedStorage], str], bool]
"""Function that is called before a write, with the tensors or storages to write to and the name of the method. It
returns False if no recompute or replay will read any tensor again.
"""


def writers() -> list[str]:
    """Return the names of the tensor methods that write to the tensor, or that share its memory with a NumPy array."""
    names = (
        name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_") and name not in _NO_WRITERS
    )
    operators = (f"__i{name}__" for name in _OPERATORS if hasattr(Tensor, f"__i{name}__"))
    return [*names, *operators, "__setitem__", SHARES_MEMORY.removeprefix("Tensor.")]


def _spares_none(written: Any) -> bool:
    return False


def intercept(writes: Writes, is_spared: Callable[[Any], bool] = _spares_none) -> Callable[[], None]:
    """Call `writes(memory, writer)` before each intercepted write, until the returned function is called.

    A method's write to a tensor is not reported if `is_spared(tensor)` is True. After `writes` has returned False,
    nothing is reported until `watched` is set again.
    """
    with contextlib.ExitStack() as stack:  # if one replacement fails, all earlier ones are undone

        def replace(owner: Any, name: str, make: Callable[..., Callable[..., Any]], full_name: str) -> None:
            own = getattr(owner, name)
            function = compiled_as(make(own, full_name, writes), own)
            stack.callback(_restore, owner, name, vars(owner).get(name), function)
            stack.callback(scripted_as(function, own))
            torchs_own[function] = own
            setattr(owner, name, function)

        method = functools.partial(_make_reporting_method, is_spared=is_spared)
        for name in writers():
            make = _make_reporting_array if f"Tensor.{name}" == SHARES_MEMORY else method
            replace(Tensor, name, make, f"Tensor.{name}")
        for name in STORAGE_METHODS:
            replace(torch.UntypedStorage, name, _make_reporting_method, f"UntypedStorage.{name}")
        replace(torch.UntypedStorage, "resize_", _make_reporting_resize, "UntypedStorage.resize_")
        for name in list_foreach_functions():
            replace(torch, name, _make_reporting_list, f"torch.{name}")
        for owner, name in inplace_functions():
            replace(owner, name, _make_reporting_function, f"torch.{name}")
        replace(torch.utils, "swap_tensors", _make_reporting_swap, "torch.utils.swap_tensors")
        set_data = functools.partial(_report, writer="Tensor.data = ...", writes=writes)
        stack.callback(intercept_data(lambda tensor: set_data([tensor]), functools.partial(_report_alias, writes)))
        return stack.pop_all().close


def _restore(owner: Any, name: str, before: Any, function: Any) -> None:
    """Undo one replacement by `function`, unless other code has replaced it in the meantime."""
    torchs_own.pop(function, None)
    if vars(owner).get(name) is not function:
        return
    if before is None:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


@not_compiled_alone
def _report(memory: Sequence[Tensor | torch.UntypedStorage], writer: str, writes: Writes) -> None:
    global watched
    if not watched or _here.reports:
        return
    if not (is_traced() or (is_compiling_anywhere() and is_compiling_here())):
        _here.reports = True
        try:
            if not writes(memory, writer):
                watched = False
                watched = writes((), writer)  # another thread may have set it meanwhile
        finally:
            _here.reports = False


def _make_reporting_method(
    own: Callable[..., Any], name: str, writes: Writes, is_spared: Callable[[Any], bool] = _spares_none
) -> Callable[..., Any]:
    @functools.wraps(own)
    def method(written: Any, /, *args: Any, **kwargs: Any) -> Any:
        if watched and not is_spared(written):
            _report((written,), name, writes)
        return own(written, *args, **kwargs)

    return method


def _make_reporting_resize(own: Callable[..., Any], name: str, writes: Writes) -> Callable[..., Any]:
    """Return a replacement of `resize_` that reports resizes, except those by which FSDP2 frees gathered parameters,
    because FSDP2 gathers them again for backward.
    """

    @functools.wraps(own)
    def method(written: torch.UntypedStorage, /, *args: Any, **kwargs: Any) -> Any:
        if watched and not module_name(sys._getframe(1)).startswith("torch.distributed.fsdp."):
            _report((written,), name, writes)
        return own(written, *args, **kwargs)

    return method


def _make_reporting_array(own: Callable[..., Any], name: str, writes: Writes) -> Callable[..., Any]:
    method = _make_reporting_method(own, name, writes)

    @functools.wraps(own)
    def numpy(tensor: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        note_array()
        return method(tensor, *args, **kwargs)

    return numpy


@not_compiled_alone
def _report_alias(writes: Writes, tensor: Tensor, data: Tensor) -> None:
    if tensor.grad_fn is None and not is_compiling_here():
        note_alias(data)
        _report([tensor], ALIAS, writes)


def _make_reporting_list(own: Callable[..., Any], name: str, writes: Writes) -> Callable[..., Any]:
    @functools.wraps(own)
    def function(tensors: Sequence[Tensor], /, *args: Any, **kwargs: Any) -> Any:
        if watched:
            _report(tensors, name, writes)
        return own(tensors, *args, **kwargs)

    return function


def _make_reporting_function(own: Callable[..., Any], name: str, writes: Writes) -> Callable[..., Any]:
    @functools.wraps(own)
    def function(*args: Any, **kwargs: Any) -> Any:
        if watched:
            written = args[0] if args else kwargs.get("input", kwargs.get("self"))
            _report((written,) if isinstance(written, Tensor) else (), name, writes)
        return own(*args, **kwargs)

    return function


def _make_reporting_swap(own: Callable[..., Any], name: str, writes: Writes) -> Callable[..., Any]:
    @functools.wraps(own)
    def function(t1: Tensor, t2: Tensor) -> None:
        if watched:
            _report((t1, t2), name, writes)
        own(t1, t2)

    return function
