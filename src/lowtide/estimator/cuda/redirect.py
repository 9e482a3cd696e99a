"""Redirect `torch.cuda` to an absent GPU during an estimate: "cuda" in arguments means that GPU.

Functions such as `torch.cuda.get_device_properties` describe the GPU (`torch_cuda_api.py`). CUDA graphs are not
available.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from lowtide._torch.fake_modes import (
    default_device,
    fake_devices_shown,
    is_fake,
    on_default_device,
    without_function_modes,
)
from lowtide._torch.pytree import tree_map
from lowtide._torch.tensors import IS_CUDA, PARSE_TO, SET_REQUIRES_GRAD, reads_attribute
from lowtide.estimator.cuda import tensor_types
from lowtide.estimator.cuda import torch_cuda_api as about
from lowtide.estimator.cuda import unsupported_api as refused
from lowtide.estimator.cuda.current_gpu import CUDA, NAME
from lowtide.estimator.cuda.ops.autocast import forget_casts
from lowtide.estimator.cuda.tensor_types import as_move, type_name
from lowtide.utils.frames import module_name

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.estimator.cuda.gpu_allocation_tracker import GpuAllocationTracker
    from lowtide.estimator.cuda.memory_stats import Usage
    from lowtide.estimator.values.value_oracle import ValueOracle
    from lowtide.memory.gpu_specs import GpuSpec


class CudaRedirect(TorchFunctionMode):
    """Function mode that replaces "cuda" in arguments by another device, whose tensors report that they are on CUDA.

    `tracker` moves CPU tensors to the GPU before they require gradients, because autograd sends no gradients across
    devices.
    """

    def __init__(self, device: str, tracker: GpuAllocationTracker | None = None) -> None:
        super().__init__()
        self._tracker = tracker
        self._device = torch.device(device, 0) if device == NAME else torch.device(device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._tracker is not None and reads_attribute(func, types) and func not in _IS_CUDA:
            with without_function_modes():  # half of all calls, which the other modes don't change
                return func(*args)
        func, args, kwargs = as_move(func, args, kwargs or {})
        if func in _IS_CUDA:
            return self.has(args[0])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return type_name(func(*args)) if self.has(args[0]) else func(*args)
        if func is torch.device and type((*args, kwargs.get("device"))[0]) is int:
            return CUDA
        if func in _TO_CUDA:
            return args[0].to(self._device, **{name: given for name, given in kwargs.items() if name != "device"})
        if func in _TO_PINNED or (func is torch.Tensor.share_memory_ and self.has(args[0])):
            return args[0]
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is PARSE_TO:
            args = tuple(CUDA if type(arg) is int else arg for arg in args)
        elif on_default_device(func, kwargs):  # the default device's mode runs after this one
            kwargs = {**kwargs, "device": default_device()}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self._translate(kwargs["device"])}
        if func in _CELLS and self._tracker is not None:  # cells choose their kernel by the input's device
            args = tree_map(self._tracker.on_gpu, args)
        if func is torch.Tensor.to:
            args = tuple(self._translate(arg) for arg in args)
        if self._tracker is None:
            return func(*args, **kwargs)
        asks_for_gradients = func in _ASKING_FOR_GRADIENTS and (*args[1:], *kwargs.values(), True)[0]
        if asks_for_gradients or self._writes_gpu_data(func, args):
            self._tracker.put_on_gpu(args[0])
        out = func(*args, **kwargs)
        if kwargs.get("requires_grad") is True and isinstance(out, torch.Tensor):
            self._tracker.put_on_gpu(out)
        return out

    def has(self, tensor: Tensor) -> bool:
        """Return True if a tensor is on the GPU."""
        return tensor.device.type in (NAME, "cuda")

    def _writes_gpu_data(self, func: Any, args: Any) -> bool:
        """Return True if a call writes a GPU tensor into a CPU tensor, such as `cpu_tensor[0] = gpu_tensor`."""
        name = getattr(func, "__name__", "")
        if not (name in _WRITING or (name.endswith("_") and not name.endswith("__"))) or len(args) < 2:
            return False
        target, *others = args
        return (
            is_fake(target)
            and target.device.type == "cpu"
            and target.dim() > 0
            and any(isinstance(other, torch.Tensor) and other.device.type == NAME for other in others)
        )

    def _translate(self, value: Any) -> Any:
        is_cuda = (
            type(value) is int  # the number of a GPU
            or (isinstance(value, str) and value.partition(":")[0] == "cuda")
            or (isinstance(value, torch.device) and value.type == "cuda")
        )
        return self._device if is_cuda else value


_WRITING = frozenset(
    {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__ixor__"}
)
"""Methods that write to their first argument although their names do not end in "_"."""

CHECKPOINT = "torch.utils.checkpoint"

_CELLS = (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
_IS_CUDA = (IS_CUDA,)
_TO_CUDA = (torch.Tensor.cuda,)
_TO_PINNED = (torch.Tensor.pin_memory,)
_ASKING_FOR_GRADIENTS = (torch.Tensor.requires_grad_, SET_REQUIRES_GRAD)


class _CpuGenerator(torch.Generator):
    """Random generator that is on the CPU even if the GPU is requested, because random values are drawn on the CPU."""

    def __new__(cls, device: Any = "cpu") -> Self:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


@contextlib.contextmanager
def emulated_cuda(
    gpu: GpuSpec,
    means: CudaRedirect,
    usage: Usage,
    tracker: GpuAllocationTracker | None = None,
    answers: ValueOracle | None = None,
) -> Iterator[None]:
    """Make `torch.cuda` describe `gpu` in this block, and enter the function mode `means`, which redirects "cuda".

    With `tracker` and `answers`, `torch.autocast` is replaced too.
    """
    importlib.import_module("torch._dynamo")  # dynamo, imported by optimizers, builds tables of these functions
    with contextlib.ExitStack() as stack:
        for owner, name, obj in (*about.answers(gpu, usage), *refused.replacements(), *tensor_types.replacements()):
            stack.enter_context(patch.object(owner, name, obj))
        if answers is not None and tracker is not None:
            shown = fake_devices_shown(torch.device(NAME, 0), CUDA, lambda: tracker.is_inside)
            stack.enter_context(shown)
            stack.enter_context(_redirect_autocast(answers))
        stack.enter_context(patch.object(torch, "Generator", _CpuGenerator))
        stack.enter_context(means)
        yield


@contextlib.contextmanager
def _redirect_autocast(answers: ValueOracle) -> Iterator[None]:
    """Redirect `torch.autocast` for "cuda" to the absent GPU, and for "cpu", which scripts use if they find no GPU."""
    entered: dict[int, str] = {}
    devices: list[str] = []
    """Devices of the autocast contexts in force, the innermost last."""
    is_on, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    enter, leave, clear = torch.autocast.__enter__, torch.autocast.__exit__, torch.clear_autocast_cache

    def copy_settings(device: str) -> None:
        """Copy the autocast settings of `device`, "cuda" or "cpu", to the absent GPU: enabled or not, and the dtype."""
        torch.set_autocast_enabled(NAME, is_on(device))
        torch.set_autocast_dtype(NAME, dtype(device))

    def on_enter(self: Any) -> Any:
        entered[id(self)] = self.device
        # CPU autocast turned off changes nothing while CUDA's is on. Checkpoints reenter both, each as it was.
        is_off = self.device == "cpu" and not self._enabled
        if is_off and (devices[-1:] == ["cuda"] or module_name(sys._getframe(1)) == CHECKPOINT):
            return enter(self)  # type: ignore[no-untyped-call]
        if self.device == "cpu" and self._enabled:
            answers.note("autocast for the CPU is assumed to be for the GPU")
        if self.device in ("cuda", "cpu", NAME):
            devices.append(self.device)
            self.device = NAME
        return enter(self)  # type: ignore[no-untyped-call]

    def on_leave(self: Any, *error: Any) -> Any:
        try:
            return leave(self, *error)
        finally:
            if id(self) in entered:
                if self.device == NAME:
                    devices.pop()
                self.device = entered.pop(id(self))
            else:  # entered before this block
                copy_settings(self.device)

    def on_clear() -> None:
        clear()
        forget_casts()

    changed: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch, "is_autocast_enabled", lambda device="cuda": is_on(NAME if device == "cuda" else device)),
        (torch, "get_autocast_dtype", lambda device: dtype(NAME if device == "cuda" else device)),
        (torch, "get_autocast_gpu_dtype", lambda: dtype(NAME)),
        (torch, "clear_autocast_cache", on_clear),
        (torch.autocast, "__enter__", on_enter),
        (torch.autocast, "__exit__", on_leave),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, function in changed:
            stack.enter_context(patch.object(owner, name, function))
        try:
            for device in ("cpu", "cuda"):
                if is_on(device):
                    devices.append(device)
                    copy_settings(device)
            yield
        finally:
            torch.set_autocast_enabled(NAME, False)
            forget_casts()
