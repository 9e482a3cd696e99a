"""Calls of compiled modules and functions in one step, to be run once more outside it.

No single call runs all compiled code of a GAN, or of a model and the frozen one that its loss goes through. So each is
called on a copy of its own arguments.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lowtide.memory.entry_storages import exclude_from_entry
from lowtide.runtime.batch_tensors import collect_tensors, with_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], frozenset[int]]
"""Function or module, its arguments, and the ids of the parameters that were trained in that call."""

_Kept = tuple[weakref.ref[Any], Any, tuple[torch.device, ...], frozenset[int]]
"""Function or module, its arguments, their devices, and the parameters that were trained."""


class PartCalls:
    """The different calls in one step, with copies of their arguments in memory that no recorder counts."""

    def __init__(self, model: nn.Module) -> None:
        """Begin without calls; `model` has all parameters that the calls train."""
        self._model = weakref.ref(model)
        self._calls: dict[object, _Kept | None] = {}
        """Each different call; None if its arguments could not be copied."""

    def add(self, called: Callable[..., Any], given: Any) -> None:
        """Copy the arguments `given`, (args, kwargs), unless an earlier call of `called` was like this one."""
        model, tensors = self._model(), collect_tensors(given)
        if model is None:
            return
        trained = frozenset(id(p) for p in model.parameters() if p.requires_grad)
        try:
            like = (id(called), trained, tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors))
            if like not in self._calls:
                kept, devices = with_tensors(given, _outside), tuple(tensor.device for tensor in tensors)
                self._calls[like] = weakref.ref(called), kept, devices, trained
        except (RuntimeError, TypeError, ValueError, NotImplementedError):  # tensors without strides or plain memory
            self._calls[id(called)] = None

    def __len__(self) -> int:
        return len(self._calls)

    def clear(self) -> None:
        """Forget all calls."""
        self._calls.clear()

    def made(self) -> tuple[Call, ...]:
        """Return the recorded calls, with new tensors as arguments.

        The result is empty if the arguments of a call could not be copied, or its function was freed.
        """
        made = list[Call]()
        for kept in self._calls.values():
            if kept is None or (called := kept[0]()) is None:
                return ()
            _, given, devices, trained = kept
            args, kwargs = with_tensors(given, partial(_on_next, iter(devices)))
            made.append((called, args, kwargs, trained))
        return tuple(made)

    def run(self, *calls: Call) -> list[Any]:
        """Run `calls` one after the other, each with the parameters that it trains, and return their results."""
        model = self._model()
        assert model is not None
        return [_with_trained(model, call) for call in calls]


def _with_trained(model: nn.Module, call: Call) -> Any:
    called, args, kwargs, trained = call
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(id(parameter) in trained)
        return called(*args, **kwargs)
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _outside(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` in a bytearray, whose memory no recorder counts."""
    size, stride = tensor.shape, tensor.stride()
    n = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if tensor.numel() else 0
    memory = torch.frombuffer(bytearray(max(n, 1) * tensor.element_size()), dtype=tensor.dtype)
    copy = exclude_from_entry(memory.as_strided(size, stride))
    copy.copy_(tensor.detach())
    return copy.requires_grad_(tensor.requires_grad)


def _on_next(devices: Iterator[torch.device], copy: Tensor) -> Tensor:
    """Return a new tensor like `copy` on the next of `devices`."""
    return copy.detach().to(next(devices), copy=True).requires_grad_(copy.requires_grad)
