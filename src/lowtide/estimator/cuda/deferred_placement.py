"""Track tensors that a script requests on CUDA before a GPU is rehearsed. They stay on the CPU, but report CUDA.

A tensor counts if it was requested on CUDA, or computed from such a tensor. When the rehearsal starts, the tensors in
use are moved to its GPU.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, Self
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from lowtide._torch.fake_modes import (
    alias,
    default_device,
    is_own,
    is_strided,
    on_default_device,
    without_function_modes,
)
from lowtide._torch.tensors import DEVICE, IS_CUDA, PACK_PADDED, SET_DATA, find_parts, get_storage_id
from lowtide.estimator.cuda.current_gpu import CUDA, in_use
from lowtide.estimator.cuda.redirect import CudaRedirect
from lowtide.estimator.cuda.tensor_types import as_move
from lowtide.memory.events import Allocate, Event

if TYPE_CHECKING:
    from torch import Tensor


class DeferredCudaModule(CudaRedirect):
    """Function mode for the time before a GPU is rehearsed. "cuda" means the CPU, but tensors requested on CUDA are
    remembered.
    """

    def __init__(self) -> None:
        super().__init__("cpu")
        self._there = WeakIdKeyDictionary()
        self.streams: dict[int, int] = {}

    def __enter__(self) -> Self:
        self._undo = contextlib.ExitStack()
        for owner, make in ((nn.Parameter, nn.Parameter.__new__), (torch.autograd.Variable, _create_variable)):
            self._undo.enter_context(patch.object(owner, "__new__", functools.partial(self._create_parameter, make)))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._undo.close()

    def _create_parameter(
        self, make: Callable[..., Tensor], kind: type, data: Any = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Create a parameter, which bypasses function modes, on the device of its data."""
        made = make(kind, data, *args, **kwargs)
        if self._is_on_cuda(data):
            self._there[made] = True
        return made

    def put(self, tensors: Iterable[Tensor]) -> None:
        """Remember tensors as requested on CUDA."""
        for tensor in tensors:
            self._there[tensor] = True

    def has(self, tensor: Tensor) -> bool:
        """Return True if a tensor is on CUDA, or was requested there."""
        return super().has(tensor) or tensor in self._there

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if in_use:
            return func(*args, **(kwargs or {}))
        func, args, kwargs = as_move(func, args, kwargs or {})
        given = [*args, *kwargs.values()]
        is_there = bool(self._there) and any(map(self._is_on_cuda, given))
        if is_there and func in _ANSWERS:
            is_torch = is_own(_skip_function_modes(sys._getframe(1)))  # checkpointing compares devices
            return func(*args) if is_torch else _ANSWERS[func]
        place = _find_requested_device(func, args, kwargs)
        goes_there = is_there if place is None else self._is_on_cuda(place) or place == "cuda"
        out = super().__torch_function__(func, types, args, kwargs)
        if func == SET_DATA and self._is_on_cuda(args[1]):
            self._there[args[0]] = True
        if place is not None and args and out is args[0] and goes_there != self._is_on_cuda(args[0]):
            # The argument keeps its device. Of a slice, only the slice is copied.
            out = alias(out) if _is_whole(out) else out.clone()
        if goes_there:
            results = out if isinstance(out, tuple | list) else (out,)
            for made in results[:1] if func is PACK_PADDED else results:
                if isinstance(made, torch.Tensor) and not any(made is one for one in given):
                    self._there[made] = True
        return out

    @property
    def version(self) -> object:
        """New object at each access. Earlier events are never valid, because `since` lists only the live tensors."""
        return object()

    def since(self, position: int) -> Iterator[Event]:
        """Yield an allocation for each storage of the tensors requested on CUDA, from the number `position` on."""
        with without_function_modes():
            parts = (part for tensor in list(self._there) for part in find_parts(tensor))
            sizes = {get_storage_id(part): part.untyped_storage().nbytes() for part in parts}
        return (Allocate(block, n_bytes, 0, "") for block, n_bytes in enumerate(sizes.values()) if block >= position)

    def mark(self, label: str, data: object = None) -> None:
        """Do nothing, because nothing is recorded."""

    def _is_on_cuda(self, obj: Any) -> bool:
        if isinstance(obj, torch.Tensor):
            return obj in self._there
        return isinstance(obj, list | tuple) and any(map(self._is_on_cuda, obj))


def _create_variable(kind: type, data: Any = None, requires_grad: bool = False, volatile: bool = False) -> Tensor:
    """Return the result of `torch.autograd.Variable(data, ...)`: `data` without its graph, or an empty tensor."""
    return (torch.empty(0) if data is None else data.detach()).requires_grad_(requires_grad)


def _skip_function_modes(frame: FrameType) -> FrameType:
    """Return `frame`, or its first caller that is not the `__torch_function__` of a function mode."""
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_whole(tensor: Tensor) -> bool:
    return not is_strided(tensor) or tensor.nbytes == tensor.untyped_storage().nbytes()


def _find_requested_device(func: Any, args: Any, kwargs: Any) -> Literal["cuda", "cpu"] | Tensor | None:
    """Return the device that a call requests, or the tensor whose device it requests; None if it requests neither."""
    if func is torch.Tensor.cuda:
        return "cuda"
    if func is torch.Tensor.cpu:
        return "cpu"
    if func is torch.Tensor.type_as:
        return args[1]  # type: ignore[no-any-return]
    said = [default_device()] if on_default_device(func, kwargs) else [kwargs.get("device")]
    if func is torch.Tensor.to:
        said += [*args[1:], kwargs.get("other")]
    for value in said:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, str | torch.device) or type(value) is int:
            return "cuda" if type(value) is int or torch.device(value).type == "cuda" else "cpu"
    return None


_ANSWERS = {DEVICE: CUDA, IS_CUDA: True, torch.Tensor.get_device: 0}
