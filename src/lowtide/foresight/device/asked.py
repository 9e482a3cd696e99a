"""What a script has asked for on CUDA before there is a card: it stays on the CPU, and says that it is on CUDA.

A tensor was asked for there, or was computed from one that was. When the card comes, those at hand are put on it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lowtide import _torch
from lowtide.foresight.device.cuda import CudaMeans
from lowtide.foresight.device.current import CUDA, in_use

if TYPE_CHECKING:
    from torch import Tensor


class AskedForCuda(CudaMeans):
    """In this block, as long as there is no card, "cuda" is the CPU, and it is remembered what was asked for there."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self._there = WeakIdKeyDictionary()

    def has(self, tensor: Tensor) -> bool:
        """Whether a real tensor is on CUDA, or was asked for there."""
        return tensor.device.type == "cuda" or tensor in self._there

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if in_use:
            return func(*args, **kwargs)
        given = [*args, *kwargs.values()]
        is_there = bool(self._there) and any(map(self._holds, given))
        if is_there and func in _ANSWERS:
            return func(*args) if _torch.is_own(sys._getframe(1)) else _ANSWERS[func]  # checkpoints compare these
        place = _place(func, args, kwargs)
        goes_there = is_there if place is None else self._holds(place) or place == "cuda"
        out = super().__torch_function__(func, types, args, kwargs)
        if func == _torch.SET_DATA and self._holds(args[1]):
            self._there[args[0]] = True
        if place is not None and args and out is args[0] and goes_there != is_there:
            # What was given stays where it was. A piece of something larger comes alone.
            out = _torch.alias(out) if _is_whole(out) else out.clone()
        if goes_there:
            for made in out if isinstance(out, tuple | list) else (out,):
                if isinstance(made, torch.Tensor) and not any(made is one for one in given):
                    self._there[made] = True
        return out

    def _holds(self, thing: Any) -> bool:
        if isinstance(thing, torch.Tensor):
            return thing in self._there
        return isinstance(thing, list | tuple) and any(map(self._holds, thing))


def _is_whole(tensor: Tensor) -> bool:
    return not _torch.is_strided(tensor) or tensor.nbytes == tensor.untyped_storage().nbytes()


def _place(func: Any, args: Any, kwargs: Any) -> Literal["cuda", "cpu"] | Tensor | None:
    """Where the result is asked for: there, or where a tensor is; None if nothing was said."""
    if func is torch.Tensor.cuda:
        return "cuda"
    if func is torch.Tensor.cpu:
        return "cpu"
    said = [_torch.default_device()] if _torch.on_default_device(func, kwargs) else [kwargs.get("device")]
    if func is torch.Tensor.to:
        said += [*args[1:], kwargs.get("other")]
    for value in said:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, str | torch.device) or type(value) is int:
            return "cuda" if type(value) is int or torch.device(value).type == "cuda" else "cpu"
    return None


_ANSWERS = {_torch.DEVICE: CUDA, _torch.IS_CUDA: True, torch.Tensor.get_device: 0}
