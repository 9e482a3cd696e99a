"""In-place methods of tensors, and `torch._foreach_*_`, intercepted before they write: `bias.data.clamp_(...)`.

The replacements are attributes of `torch.Tensor`, which inherits these methods, and of `torch`. A write through a view,
through `.data` or to a buffer is a call of such a method, too. Writes that Python does not call by such a name, as with
`out=`, are not intercepted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide._torch.compiled_code import is_compiling_here, not_compiled_alone

watched = False
"""True if a tensor may be read again by a recompute or replay; while False, no write is reported."""

torchs_own: dict[Any, Any] = {}
"""By replacement, the method or function of torch in whose place it is. Modes are called with the replacement, after it
has reported.
"""

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_NO_WRITERS = frozenset({
    "as_strided_", "detach_", "rename_", "requires_grad_", "share_memory_", "squeeze_", "swapaxes_", "swapdims_", "t_",
    "transpose_", "unsqueeze_",
})  # fmt: skip
"""Methods that change what is known about a tensor, not its contents."""


def writers() -> list[str]:
    """Return the names of the methods of a tensor that write to it."""
    names = (
        name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_") and name not in _NO_WRITERS
    )
    return [*names, *(f"__i{name}__" for name in _OPERATORS if hasattr(Tensor, f"__i{name}__")), "__setitem__"]


def list_writers() -> list[str]:
    """Return the names of torch's functions that write to each tensor of a list."""
    return [name for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_")]


def intercept(writes: Callable[[Sequence[Tensor], str], bool]) -> Callable[[], None]:
    """Call `writes(tensors, method)` before each write by such a method, until the returned function is called.

    After it has returned False, nothing is reported until `watched` is set again.
    """
    places = [
        *((Tensor, name, _reporting) for name in writers()),
        *((torch, n, _reporting_list) for n in list_writers()),
    ]
    replaced: list[tuple[Any, str, Any, Any]] = []
    for owner, name, make in places:
        own = getattr(owner, name)
        method = make(name, own, writes)
        replaced.append((owner, name, vars(owner).get(name), method))
        torchs_own[method] = own
        setattr(owner, name, method)

    def restore() -> None:
        for owner, name, before, method in replaced:
            torchs_own.pop(method, None)
            if vars(owner).get(name) is not method:
                continue
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    return restore


def _reporting(
    name: str, own: Callable[..., Any], writes: Callable[[Sequence[Tensor], str], bool]
) -> Callable[..., Any]:
    @not_compiled_alone
    @functools.wraps(own)
    def method(tensor: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        global watched
        if watched and not is_compiling_here():
            watched = False  # first, as another thread may set it meanwhile
            if writes((tensor,), f"Tensor.{name}"):
                watched = True
        return own(tensor, *args, **kwargs)

    return method


def _reporting_list(
    name: str, own: Callable[..., Any], writes: Callable[[Sequence[Tensor], str], bool]
) -> Callable[..., Any]:
    @not_compiled_alone
    @functools.wraps(own)
    def function(tensors: Sequence[Tensor], /, *args: Any, **kwargs: Any) -> Any:
        global watched
        if watched and not is_compiling_here():
            watched = False
            if writes(tensors, f"torch.{name}"):
                watched = True
        return own(tensors, *args, **kwargs)

    return function
