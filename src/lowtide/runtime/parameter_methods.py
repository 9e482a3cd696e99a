"""In-place methods of parameters, intercepted before they write: `bias.clamp_(...)`, `weight[3] = 0`.

The replacements are attributes of `nn.Parameter`, which inherits these methods, so tensors of other classes, such as
activations and optimizer state, have torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lowtide._torch.compiled_code import is_compiling_here, not_compiled_alone

watched = False
"""True if a tensor may be read again by a recompute or replay; while False, no write is reported."""

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_NO_WRITERS = frozenset({
    "as_strided_", "detach_", "rename_", "requires_grad_", "share_memory_", "squeeze_", "swapaxes_", "swapdims_", "t_",
    "transpose_", "unsqueeze_",
})  # fmt: skip
"""Methods that change a tensor's metadata, not its contents."""


def writers() -> list[str]:
    """Return the names of the methods of a tensor that write to it."""
    names = (
        name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_") and name not in _NO_WRITERS
    )
    return [*names, *(f"__i{name}__" for name in _OPERATORS if hasattr(Tensor, f"__i{name}__")), "__setitem__"]


def intercept(writes: Callable[[Tensor, str], bool]) -> Callable[[], None]:
    """Call `writes(parameter, method)` before each in-place method, until the returned function is called.

    After it has returned False, nothing is reported until `watched` is set again.
    """
    methods = {
        name: _reporting(name, getattr(Tensor, name), writes) for name in writers() if name not in vars(nn.Parameter)
    }
    for name, method in methods.items():
        setattr(nn.Parameter, name, method)

    def restore() -> None:
        for name, method in methods.items():
            if vars(nn.Parameter).get(name) is method:
                delattr(nn.Parameter, name)

    return restore


def _reporting(name: str, own: Callable[..., Any], writes: Callable[[Tensor, str], bool]) -> Callable[..., Any]:
    @not_compiled_alone
    @functools.wraps(own)
    def method(parameter: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        global watched
        if watched and not is_compiling_here():
            watched = False  # cleared before the call, because another thread may set it during the call
            if writes(parameter, name):
                watched = True
        return own(parameter, *args, **kwargs)

    return method
