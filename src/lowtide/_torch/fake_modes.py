"""Private names of torch: fake tensors."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import overrides
from torch._subclasses import fake_tensor as _fake_tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils import _device, _python_dispatch

from lowtide._torch.backward import ENGINE
from lowtide._torch.patching import stand_in

_taken_on_the_way: list[BaseException] = []


DATA_DEPENDENT = (_fake_tensor.DynamicOutputShapeException, _fake_tensor.DataDependentOutputException)
"""What a fake operator raises whose result's shape, or value, depends on contents. 2.13, since 2.0."""

NO_FAKE_KERNEL = _fake_tensor.UnsupportedOperatorException
"""What a fake operator raises that has no kernel for fake tensors, where `run_on_zeros` is not allowed. 2.13."""


OWN_OPERATORS = frozenset({"aten", "prim", "prims", "profiler"})
"""Namespaces of torch's own operators. 2.13."""


def fake_mode(run_on_zeros: bool = True, nested: Exception | None = None) -> _fake_tensor.FakeTensorMode:
    """A mode under which operators make fake tensors; `nested` is raised where they would be nested. 2.13, since 1.13.

    Those that have no kernel for fake tensors run on real zeros, on the device that the fake ones are on.
    """
    mode = _fake_tensor.FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=run_on_zeros)

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        assert nested is not None
        raise nested

    if nested is not None:
        mode.create_symbolic_nested_int = refuse  # type: ignore[method-assign]
    return mode


def end_fakes(mode: _fake_tensor.FakeTensorMode) -> None:
    """From here on what is computed from fake tensors of a mode and real ones raises. 2.13, since 2.0."""
    mode.allow_non_fake_inputs = False


@contextlib.contextmanager
def running_on_zeros(mode: _fake_tensor.FakeTensorMode) -> Iterator[None]:
    """Allow a mode to do so in this block. 2.13, since 2.0."""
    before, mode.allow_fallback_kernels = mode.allow_fallback_kernels, True
    try:
        yield
    finally:
        mode.allow_fallback_kernels = before


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a fake one. 2.13."""
    return isinstance(tensor, FakeTensor)


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a strided piece of one storage. 2.13."""
    return tensor.layout is torch.strided and type(tensor) in _WITH_STORAGE


_WITH_STORAGE = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor})


class on_real_tensors:
    """Operators and functions in this block run past all modes. 2.13, since 1.13.

    Past those for functions as well: in a backward pass they are on while an operator is dispatched.
    """

    __slots__ = ("_guards",)

    def __enter__(self) -> None:
        self._guards = torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch()
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *_: object) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)


def as_written(thing: Any) -> Any:
    """The function that `torch.compile` was given, where `thing` is what it gave for one; else `thing`. 2.13."""
    return vars(thing).get("_torchdynamo_orig_callable", thing) if isinstance(thing, FunctionType) else thing


def bytes_of(tensor: torch.Tensor) -> Any:
    """All bytes of the storage of a tensor on the CPU, as an array on the same memory, past all modes. 2.13."""
    with on_real_tensors():
        return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """No dispatch mode is on in this block but those that it enters. 2.13, since 2.0."""
    return _python_dispatch._disable_current_modes()


def on_default_device(function: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function makes a tensor on the device that `with torch.device(...)` names. 2.13."""
    return (
        _device.CURRENT_DEVICE is not None
        and kwargs.get("device") is None
        and function in _device._device_constructors()
    )


def default_device() -> torch.device | None:
    """The device that `with torch.device(...)` or `set_default_device` names; None without one. 2.13."""
    return _device.CURRENT_DEVICE


def is_own(frame: FrameType) -> bool:
    """Whether it runs code of torch or this package."""
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith(("torch.", "lowtide.")) or name == "torch"


@contextlib.contextmanager
def fake_devices_shown(true: torch.device, shown: torch.device, inside: Callable[[], bool]) -> Iterator[None]:
    """In this block fake tensors on one device show another one, but to torch and this package.

    Nor `inside` of operators, where fake kernels of others make tensors on the device that they see. 2.13: a property
    in Python, which torch itself asks for at every step.
    """
    meta, asked = torch.device("meta"), vars(FakeTensor)["device"]

    def device(self: FakeTensor) -> torch.device:
        if self.fake_mode.in_kernel_invocation:
            return meta
        found = self.fake_device
        return found if found != true or is_own(sys._getframe(1)) or inside() else shown

    with patch.object(FakeTensor, "device", property(device, asked.fset)):
        yield


@contextlib.contextmanager
def function_modes_in_backward() -> Iterator[None]:
    """The function modes that are on now are on in backward passes, too, where Python code may run forward again.

    In those of this thread. 2.13: `tensor.backward` is a function that modes are asked for, and a mode is off while it
    is asked.
    """
    modes = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    mine = threading.get_ident()

    def run_under_modes(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != mine:
            return run(*args, **kwargs)
        on = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        off = [mode for mode in modes if not any(mode is other for other in on)]
        _taken_on_the_way.clear()
        try:
            for mode in off:  # not entered: a device's would take itself for the one around it
                overrides._push_mode(mode)  # type: ignore[no-untyped-call]
            done = run(*args, **kwargs)
        except SystemError:
            if _taken_on_the_way:
                raise _taken_on_the_way.pop() from None
            raise
        finally:
            for _ in off:
                overrides._pop_mode()  # type: ignore[no-untyped-call]
        if _taken_on_the_way:  # an interrupt that came just there
            raise _taken_on_the_way.pop()
        return done

    remove = stand_in(torch.autograd, ENGINE, functools.partial(functools.partial, run_under_modes))
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
def data_as_they_are() -> Iterator[None]:
    """A data loader's workers are in no mode that was on when they were forked, and what they give is real. 2.13."""
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


def without_function_modes() -> contextlib.AbstractContextManager[Any]:
    """Functions in this block run past all function modes, and see tensors as they are. 2.13, since 1.13."""
    return torch._C.DisableTorchFunction()


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor with the same memory, by which gradients come back; itself if it is not strided. 2.13."""
    return torch.ops.aten.alias.default(tensor) if is_strided(tensor) else tensor


def make_parameter(fake: torch.Tensor, requires_grad: bool) -> None:
    """Make a fake tensor pass for an `nn.Parameter`. 2.13, since 2.0."""
    fake.requires_grad_(requires_grad)
    fake._is_param = True
