"""Private names of torch: fake tensors."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import torch
from torch import overrides
from torch._subclasses import fake_tensor as _fake_tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils import _device, _python_dispatch

from lowtide._torch.backward import ENGINE
from lowtide._torch.fake_dispatch import QuickFakeTensorMode
from lowtide._torch.patching import replace_function
from lowtide.utils.frames import module_name

_cleared_errors: list[BaseException] = []


DATA_DEPENDENT = (_fake_tensor.DynamicOutputShapeException, _fake_tensor.DataDependentOutputException)
"""Exceptions of fake operators whose result's shape, or value, depends on contents. Read in torch 2.13; present since
2.0.
"""

NO_FAKE_KERNEL = _fake_tensor.UnsupportedOperatorException
"""Exception of operators without a kernel for fake tensors, where `run_on_zeros` is not allowed. Read in torch 2.13."""


OWN_OPERATORS = frozenset({"aten", "prim", "prims", "profiler"})
"""Namespaces of torch's own operators. Read in torch 2.13."""

SENDING_OPERATORS = frozenset({"_c10d_functional", "_c10d_functional_autograd"})
"""Namespaces of collectives that a compiler can trace. Read in torch 2.13."""

WRAPPING_OPERATOR = "_c10d_functional::_wrap_tensor_autograd"
"""Operator that wraps a collective's result without a copy; its fake kernel would allocate one. Read in torch 2.13."""

SHARDING_OPERATORS = SENDING_OPERATORS | {"c10d", "fsdp"}
"""Namespaces of operators that send between processes, or copy what is sent. Read in torch 2.13."""


def fake_mode(run_on_zeros: bool = True, nested: Exception | None = None) -> _fake_tensor.FakeTensorMode:
    """Return a mode under which operators return fake tensors.

    With `run_on_zeros`, operators without a kernel for fake tensors run on real zeros, on the fake tensors' device.
    `nested` is an exception to raise when a nested tensor would be made. Relies on internals of torch 2.13, present
    since 1.13.
    """
    mode = QuickFakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=run_on_zeros)

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        assert nested is not None
        raise nested

    if nested is not None:
        mode.create_symbolic_nested_int = refuse  # type: ignore[method-assign]
    return mode


def end_fakes(mode: _fake_tensor.FakeTensorMode) -> None:
    """Make every later operator that mixes fake tensors of `mode` with real tensors raise. Relies on internals of torch
    2.13, present since 2.0.
    """
    mode.allow_non_fake_inputs = False


@contextlib.contextmanager
def running_on_zeros(mode: _fake_tensor.FakeTensorMode) -> Iterator[None]:
    """Allow `mode` to run operators that have no kernel for fake tensors on zeros inside this `with` block. Relies on
    internals of torch 2.13, present since 2.0.
    """
    before, mode.allow_fallback_kernels = mode.allow_fallback_kernels, True
    try:
        yield
    finally:
        mode.allow_fallback_kernels = before


def is_fake(tensor: Any) -> bool:
    """Return True if the tensor is fake, or a distributed tensor whose local part is fake. Relies on internals of torch
    2.13.
    """
    return isinstance(tensor, FakeTensor) or (
        type(tensor) not in _WITH_STORAGE
        and isinstance(tensor, torch.Tensor)
        and isinstance(getattr(tensor, "_local_tensor", None), FakeTensor)
    )


def is_strided(tensor: torch.Tensor) -> bool:
    """Return True if the tensor has the strided layout and a storage of its own: no wrapper of other tensors. Relies on
    internals of torch 2.13.
    """
    return tensor.layout is torch.strided and type(tensor) in _WITH_STORAGE


_WITH_STORAGE = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor})


class on_real_tensors:
    """Context manager under which operators and functions bypass all modes. Relies on internals of torch 2.13, present
    since 1.13.

    Function modes are bypassed as well, because in a backward pass they are active while an operator is dispatched.
    """

    __slots__ = ("_guards",)

    def __enter__(self) -> None:
        self._guards = torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch()
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *_: object) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)


def uncompiled(obj: Any) -> Any:
    """Return the original function if `obj` is a result of `torch.compile`; otherwise `obj`. Relies on internals of
    torch 2.13.
    """
    return vars(obj).get("_torchdynamo_orig_callable", obj) if isinstance(obj, FunctionType) else obj


def bytes_of(tensor: torch.Tensor) -> Any:
    """Return a CPU tensor's whole storage as a NumPy array of bytes that shares its memory.

    `Tensor.numpy` is not used: it makes the storage impossible to resize, as if the storage belonged to an array.
    """
    storage = tensor.untyped_storage()
    return np.ctypeslib.as_array((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr()))


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Disable all current dispatch modes inside this `with` block. Relies on internals of torch 2.13, present since
    2.0.
    """
    return _python_dispatch._disable_current_modes()


def on_default_device(function: Any, kwargs: dict[str, Any]) -> bool:
    """Return True if a call of `function` with `kwargs` creates a tensor on the device set by `with torch.device(...)`.
    Relies on internals of torch 2.13.
    """
    return (
        _device.CURRENT_DEVICE is not None
        and kwargs.get("device") is None
        and function in _device._device_constructors()
    )


def default_device() -> torch.device | None:
    """Return the device set by `with torch.device(...)` or `set_default_device`, or None. Relies on internals of torch
    2.13.
    """
    return _device.CURRENT_DEVICE


def is_own(frame: FrameType) -> bool:
    """Return True if the frame runs code of torch or of this package."""
    name = module_name(frame)
    return name.startswith(("torch.", "lowtide.")) or name == "torch"


@contextlib.contextmanager
def fake_devices_shown(true: torch.device, shown: torch.device, inside: Callable[[], bool]) -> Iterator[None]:
    """Make fake tensors on the device `true` report `shown` as their device inside this `with` block.

    Code of torch and of this package still reads `true`. So does other code while `inside()` returns True, which it
    does inside operators: fake kernels of other packages make tensors on the device that they read. In torch 2.13
    `device` is a Python property of fake tensors, which torch itself reads all the time.
    """
    meta, device_property = torch.device("meta"), vars(FakeTensor)["device"]

    def device(self: FakeTensor) -> torch.device:
        if self.fake_mode.in_kernel_invocation:
            return meta
        own = self.fake_device
        return own if own != true or is_own(sys._getframe(1)) or inside() else shown

    with patch.object(FakeTensor, "device", property(device, device_property.fset)):
        yield


@contextlib.contextmanager
def function_modes_in_backward() -> Iterator[None]:
    """Keep the current function modes active in this thread's backward passes, inside this `with` block.

    Python code in a backward pass may run a forward again, as checkpointing does. In torch 2.13 function modes handle
    `tensor.backward`, and a mode is disabled while it handles a function.
    """
    modes = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    thread = threading.get_ident()

    def run_under_modes(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return run(*args, **kwargs)
        on = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        off = [mode for mode in modes if not any(mode is other for other in on)]
        _cleared_errors.clear()
        try:
            for mode in off:  # pushed, not entered: a device mode would save itself as the previous one
                overrides._push_mode(mode)  # type: ignore[no-untyped-call]
            done = run(*args, **kwargs)
        except SystemError:
            if _cleared_errors:
                raise _cleared_errors.pop() from None
            raise
        finally:
            for _ in off:
                overrides._pop_mode()  # type: ignore[no-untyped-call]
        if _cleared_errors:  # an interrupt that arrived at that moment
            raise _cleared_errors.pop()
        return done

    remove = replace_function(torch.autograd, ENGINE, functools.partial(functools.partial, run_under_modes))
    try:
        yield
    finally:
        remove()


_without_modes_in_forks: list[bool] = []


def _forked() -> None:
    if _without_modes_in_forks:
        while torch._C._len_torch_dispatch_stack():
            _python_dispatch._pop_mode()
        while torch._C._len_torch_function_stack():
            overrides._pop_mode()  # type: ignore[no-untyped-call]


os.register_at_fork(after_in_child=_forked)


@contextlib.contextmanager
def workers_without_modes() -> Iterator[None]:
    """Run a data loader's forked workers without modes, so that their tensors are rebuilt as real ones. Relies on
    internals of torch 2.13.
    """
    rebuild = torch._utils._rebuild_tensor

    def real(*args: Any) -> torch.Tensor:
        with without_modes(), without_function_modes():
            return rebuild(*args)  # type: ignore[no-any-return, no-untyped-call]

    _without_modes_in_forks.append(True)
    try:
        with patch.object(torch._utils, "_rebuild_tensor", real):
            yield
    finally:
        _without_modes_in_forks.pop()


n_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""Return the number of modes that see calls of torch's functions in this thread. Relies on internals of torch 2.13,
present since 2.0.
"""

without_function_modes: Callable[[], contextlib.AbstractContextManager[Any]] = torch._C.DisableTorchFunction
"""Bypass all function modes and tensor subclasses inside this `with` block. Read in torch 2.13; present since 1.13."""


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a differentiable alias of a tensor, made by the operator `aten.alias`; the tensor itself if it is not
    strided.
    """
    return torch.ops.aten.alias.default(tensor) if is_strided(tensor) else tensor


def make_parameter(fake: torch.Tensor, requires_grad: bool) -> None:
    """Make a fake tensor count as an `nn.Parameter`. Relies on internals of torch 2.13, present since 2.0."""
    fake.requires_grad_(requires_grad)
    fake._is_param = True
