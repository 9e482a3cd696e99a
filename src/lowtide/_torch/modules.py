"""Private names of torch: modules."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import overrides
from torch.nn.modules import module as _module
from torch.nn.modules._functions import SyncBatchNorm as SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

BatchNorm = _BatchNorm
"""Base class of all batch norms, for any number of dimensions. Read in torch 2.13; present since 0.4."""
Convolution = _ConvNd
"""Base class of all convolutions. Read in torch 2.13; present since 0.1."""

CALL = "_compiled_call_impl"
"""Instance attribute that `Module.__call__` prefers over its own implementation. `Module.compile()` sets it, and
`Module.__getstate__` leaves it out, so copies and pickles of a module do not have it. Read in torch 2.13; present since
2.2.
"""

GLOBAL_FORWARD_HOOKS = (_module._global_forward_pre_hooks, _module._global_forward_hooks)
"""Hooks on the calls of all modules of the process: tables by key, like those of each module. Read in torch 2.13."""


@contextlib.contextmanager
def without_function_mode(kind: type[overrides.TorchFunctionMode]) -> Iterator[None]:
    """Disable the innermost torch function mode inside this `with` block, if it is a `kind`. Relies on internals of
    torch 2.13, present since 2.0.
    """
    if isinstance(overrides._get_current_function_mode(), kind):  # type: ignore[no-untyped-call]
        with overrides._pop_mode_temporarily():
            yield
    else:
        yield


n_parametrization_caches: Callable[[], int] = functools.partial(operator.attrgetter("_cache_enabled"), parametrize)
"""Return the number of open `parametrize.cached()` blocks, in which a module computes a weight once for all of its
calls; without a call of a Python function. Relies on internals of torch 2.13, present since 1.9.
"""


def cached_weights(modules: Iterable[torch.nn.Module]) -> dict[tuple[int, str], torch.Tensor]:
    """Return the weights of `modules` that an open `parametrize.cached()` block has computed, by `id` of their module
    and name. Relies on internals of torch 2.13, present since 1.9.
    """
    owners = {id(module) for module in modules}
    return {key: weight for key, weight in parametrize._cache.items() if key[0] in owners and weight is not None}


def bind_cached_weights(weights: dict[tuple[int, str], torch.Tensor]) -> Callable[[], None]:
    """Let module calls read `weights` as if a `parametrize.cached()` block had computed them; all other weights are
    computed.

    Returns a function that restores the present state. Relies on internals of torch 2.13, present since 1.9.
    """

    def restore(n_open: int, cache: dict[tuple[int, str], torch.Tensor | None]) -> None:
        parametrize._cache_enabled, parametrize._cache = n_open, cache

    undo = functools.partial(restore, parametrize._cache_enabled, parametrize._cache)
    restore(
        1 if weights else 0,
        {key: weight.detach().requires_grad_(weight.requires_grad) for key, weight in weights.items()},
    )
    return undo


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Return True if hooks run when backward enters or leaves the module. Relies on internals of torch 2.13, present
    since 2.0.
    """
    return bool(module._backward_hooks or module._backward_pre_hooks)


CALL_CODE = torch.nn.Module._call_impl.__code__
"""Code of the frame that calls a module's hooks and forward. Read in torch 2.13."""


def get_original_call(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the module's original `_call_impl` (hooks and forward), bypassing `_compiled_call_impl`. Relies on
    internals of torch 2.13.
    """
    call: Callable[..., Any] = module._call_impl
    return call


def apply_to_tensors(module: torch.nn.Module, make: Callable[[torch.Tensor], torch.Tensor], *, recurse: bool) -> None:
    """Replace each parameter and buffer of a module by the result of `make`, as `Module.to` does; with `recurse`, also
    in all modules inside. Relies on internals of torch 2.13, present since 2.0.
    """
    module._apply(make, recurse=recurse)  # type: ignore[no-untyped-call]
