"""Private names of torch: modes, hooks and flags that are active in this thread."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import graph
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def without_subclasses() -> Any:
    """Disable `__torch_function__` of tensor subclasses inside this `with` block. Relies on internals of torch 2.13,
    present since 2.0.
    """
    return torch._C.DisableTorchFunctionSubclass()


def get_accelerator_type() -> str:
    """Return the device type of this machine's accelerator, "cpu" if it has none. Relies on internals of torch 2.13."""
    return str(torch._C._get_accelerator().type)


ATTENTION_KERNELS: dict[str, tuple[Callable[[], bool], Callable[[bool], None]]] = {
    "flash": (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    "efficient": (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    "math": (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    "cudnn": (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
}
"""For each kernel of attention, the function that returns True if it is allowed, and the one that allows or forbids it.
They apply to the CPU too. Read in torch 2.13; present since 2.5.
"""


def attention_allowed(kernel: str) -> bool:
    """Return True if the `kernel` of attention, a key of `ATTENTION_KERNELS`, is allowed."""
    return ATTENTION_KERNELS[kernel][0]()


any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Return True if autocast is on for any device in this thread. Relies on internals of torch 2.13."""


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Switch the recording of gradients on or off in this thread. Relies on internals of torch 2.13, present since 1.0."""

saved_tensor_hooks: Callable[[], tuple[Any, Any] | None] = functools.partial(
    torch._C._autograd._top_saved_tensors_default_hooks, True
)
"""Return the innermost pair of saved-tensor hooks, pack and unpack, in force in this thread. Relies on internals of
torch 2.13.
"""


push_saved_tensor_hooks = torch._C._autograd._push_saved_tensors_default_hooks
"""Put a pair of saved-tensor hooks, pack and unpack, in force in this thread. Relies on internals of torch 2.13,
present since 1.10.
"""
pop_saved_tensor_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
"""Remove this thread's innermost pair of saved-tensor hooks. Relies on internals of torch 2.13, present since 1.10."""


@contextlib.contextmanager
def saved_tensor_hooks_off(unpack: Callable[[Any], torch.Tensor]) -> Iterator[None]:
    """Disable the innermost saved-tensor hooks inside this `with` block, if `unpack` is theirs. Relies on internals of
    torch 2.13.
    """
    hooks = saved_tensor_hooks()
    if hooks is None or hooks[1] is not unpack:
        yield
        return
    pop_saved_tensor_hooks()
    try:
        yield
    finally:
        push_saved_tensor_hooks(*hooks)


class _OffInTransforms(threading.local):
    """Replacement for `graph.disable_saved_tensors_hooks`, which transforms of torch.func enter.

    Where torch would raise an error because saved-tensor hooks are active, it removes chosen hooks of the thread
    instead, for as long as the transform runs.
    """

    _lock, _n_blocks, _torchs = threading.Lock(), 0, staticmethod(graph.disable_saved_tensors_hooks)

    def __init__(self) -> None:
        self._hooks: list[tuple[Any, Callable[[], contextlib.AbstractContextManager[None]]]] = []

    def begin(
        self, unpack: Callable[[Any], torch.Tensor], inside: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        """Begin a block of `off_in_transforms` with these arguments."""
        kind = type(self)
        self._hooks.append((unpack, inside))
        with kind._lock:  # threads may come and go in any order
            kind._n_blocks += 1
            graph.disable_saved_tensors_hooks = self._disabled

    def end(self) -> None:
        """End the block that began last in this thread."""
        kind = type(self)
        self._hooks.pop()
        with kind._lock:
            kind._n_blocks -= 1
            if not kind._n_blocks:
                graph.disable_saved_tensors_hooks = kind._torchs

    @contextlib.contextmanager
    def _disabled(self, error_message: str) -> Iterator[None]:
        removed: list[tuple[Any, Any]] = []
        with contextlib.ExitStack() as stack:
            for unpack, inside in reversed(self._hooks):
                top = saved_tensor_hooks()
                if top is not None:  # None: the hooks are paused
                    if top[1] is not unpack:
                        break  # hooks of other code: as without a plan
                    pop_saved_tensor_hooks()
                    removed.append(top)
                stack.enter_context(inside())
            try:
                with self._torchs(error_message):
                    yield
            finally:
                for hooks in reversed(removed):
                    push_saved_tensor_hooks(*hooks)


_off_in_transforms = _OffInTransforms()


@contextlib.contextmanager
def off_in_transforms(
    unpack: Callable[[Any], torch.Tensor], inside: Callable[[], contextlib.AbstractContextManager[None]]
) -> Iterator[None]:
    """Disable the saved-tensor hooks with this `unpack` in transforms of torch.func that run inside this `with` block.

    The context that `inside` returns is entered in each such transform. Relies on internals of torch 2.13, present
    since 2.0: transforms call `graph.disable_saved_tensors_hooks`.
    """
    _off_in_transforms.begin(unpack, inside)
    try:
        yield
    finally:
        _off_in_transforms.end()


begin_off_in_transforms, end_off_in_transforms = _off_in_transforms.begin, _off_in_transforms.end
"""Begin and end a block of `off_in_transforms`."""
