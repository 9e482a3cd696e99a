"""`torch.cuda`, as long as a card is rehearsed: the card is there, and "cuda" means it.

Functions that ask are answered for the card; functions that wait, seed or empty the cache do nothing. Streams, events
and graphs of CUDA are not there: a step that makes them is refused by torch itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lowtide.foresight.behaviours.autocast import forget_casts
from lowtide.foresight.device.current import NAME, capability, in_use

if TYPE_CHECKING:
    from lowtide.foresight.answers import Answers
    from lowtide.foresight.device.ledger import CardLedger


class CudaMeansCard(TorchFunctionMode):
    """In this block "cuda" in arguments is the card, and tensors on the card say that they are on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _IS_CUDA:
            return args[0].device.type == NAME
        if func is torch.Tensor.cuda:
            return args[0].to(torch.device(NAME, 0), non_blocking=kwargs.get("non_blocking", False))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _device(kwargs["device"])}
        if func in _MOVES:
            args, kwargs = tree_map(_device, (args, kwargs))
        return func(*args, **kwargs)


_IS_CUDA = (vars(torch._C.TensorBase)["is_cuda"].__get__,)
_MOVES = (torch.Tensor.to,)


def _device(value: Any) -> Any:
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return torch.device(NAME, 0)
    return torch.device(NAME, 0) if isinstance(value, torch.device) and value.type == "cuda" else value


@contextlib.contextmanager
def cuda_is_there(ledger: CardLedger, answers: Answers) -> Iterator[None]:
    """In this block `torch.cuda` and `torch.autocast` are those of the card."""
    with contextlib.ExitStack() as stack:
        for name, function in {**_asked(ledger), **dict.fromkeys(_IDLE, _nothing)}.items():
            if hasattr(torch.cuda, name):
                stack.enter_context(patch.object(torch.cuda, name, function))
        stack.enter_context(_autocast_on_card(answers))
        stack.enter_context(CudaMeansCard())
        yield


def _asked(ledger: CardLedger) -> dict[str, Callable[..., Any]]:
    """What there is to ask, for the card in use."""
    card = in_use[0]
    major, minor = capability()
    properties = SimpleNamespace(name=card.name, total_memory=card.total_bytes, major=major, minor=minor)
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: card.name,
        "get_device_capability": lambda device=None: (major, minor),
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or major >= 8,
        "mem_get_info": lambda device=None: (card.total_bytes - ledger.level_bytes, card.total_bytes),
        **dict.fromkeys(_LEVELS, lambda device=None: ledger.level_bytes),
    }


_LEVELS = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
_IDLE = (
    *("synchronize", "empty_cache", "set_device", "manual_seed", "manual_seed_all", "ipc_collect", "init"),
    *("reset_peak_memory_stats", "reset_accumulated_memory_stats", "set_per_process_memory_fraction"),
)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


@contextlib.contextmanager
def _autocast_on_card(answers: Answers) -> Iterator[None]:
    """Autocast for CUDA is one for the card; one for the CPU as well, as a script without a card would ask for it."""
    entered: dict[int, str] = {}
    enter, leave, clear = torch.autocast.__enter__, torch.autocast.__exit__, torch.clear_autocast_cache

    def on_enter(self: Any) -> Any:
        if self.device in ("cuda", "cpu"):
            if self.device == "cpu" and self._enabled:
                answers.note("autocast for the CPU is taken to be for the card")
            entered[id(self)] = self.device
            self.device = NAME
        return enter(self)  # type: ignore[no-untyped-call]

    def on_leave(self: Any, *error: Any) -> Any:
        try:
            return leave(self, *error)
        finally:
            self.device = entered.pop(id(self), self.device)

    def on_clear() -> None:
        clear()
        forget_casts()

    with (
        patch.object(torch.autocast, "__enter__", on_enter),
        patch.object(torch.autocast, "__exit__", on_leave),
        patch.object(torch, "clear_autocast_cache", on_clear),
    ):
        try:
            yield
        finally:
            forget_casts()
