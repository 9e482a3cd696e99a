"""Private names of torch: modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import overrides
from torch.nn.modules import module as _module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

if TYPE_CHECKING:
    pass


BatchNorm = _BatchNorm
"""What all batch norms are, whatever their number of dimensions. 2.13, since 0.4."""
Convolution = _ConvNd
"""What all convolutions are. 2.13, since 0.1."""

CALL = "_compiled_call_impl"
"""Instance attribute that `Module.__call__` prefers over its own implementation. `Module.compile()` sets it, and
`Module.__getstate__` leaves it out, so copies and pickles of a module do not have it. 2.13, since 2.2."""

GLOBAL_FORWARD_HOOKS = (_module._global_forward_pre_hooks, _module._global_forward_hooks)
"""Hooks on the calls of all modules of the process: tables by key, as each module has its own. 2.13."""


@contextlib.contextmanager
def without_function_mode(kind: type[overrides.TorchFunctionMode]) -> Iterator[None]:
    """The innermost mode of torch functions is out of force in this block, if it is one of `kind`. 2.13, since 2.0."""
    if isinstance(overrides._get_current_function_mode(), kind):  # type: ignore[no-untyped-call]
        with overrides._pop_mode_temporarily():
            yield
    else:
        yield


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks run when backward comes to the module or leaves it. 2.13, since 2.0."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


CALL_CODE = torch.nn.Module._call_impl.__code__
"""What a frame runs in which a module is called: its hooks and its forward. 2.13."""


def own_call(module: torch.nn.Module) -> Callable[..., Any]:
    """What calls `module` past whatever stands in CALL: its hooks and its forward. 2.13."""
    found: Callable[..., Any] = module._call_impl
    return found
