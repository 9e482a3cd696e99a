"""What `torch.cuda` and its like answer about a card that is not there, and do: nothing.

Functions that wait, seed, empty the cache or mark ranges do nothing, nor do streams and events. What is not known of a
card is taken to be: nothing of it changes what a step takes.
"""

from __future__ import annotations

import itertools
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Self

import torch

from lowtide import _torch
from lowtide.foresight.device.current import CAPABILITY_ASSUMED, CUDA
from lowtide.memory.cards import Card

MULTIPROCESSORS_ASSUMED, THREADS_ASSUMED, SHARED_BYTES_ASSUMED = 100, 1536, 100 * 2**10
"""Of any card, and of each multiprocessor: nothing here depends on them."""

Level = Callable[[], int]
"""Bytes of tensors on the card, now."""


class Idle:
    """A stream or an event on which nothing happens."""

    device, device_index, cuda_stream, priority = CUDA, 0, 0, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def elapsed_time(self, end: object) -> float:
        """No time passes."""
        return 0.0

    def query(self) -> bool:
        """All is done."""
        return True

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    record = synchronize = wait = wait_stream = wait_event = record_event = _nothing


def properties(card: Card) -> SimpleNamespace:
    """As `torch.cuda.get_device_properties` gives them.

    Known are name, memory and capability. What code may divide by is assumed; clocks, caches, buses and the identity of
    the card are 0.
    """
    major, minor = card.capability or CAPABILITY_ASSUMED
    return SimpleNamespace(
        name=card.name,
        gcnArchName=card.name,
        total_memory=card.total_bytes,
        major=major,
        minor=minor,
        multi_processor_count=MULTIPROCESSORS_ASSUMED,
        warp_size=32,
        regs_per_multiprocessor=2**16,
        max_threads_per_multi_processor=THREADS_ASSUMED,
        max_threads_per_block=1024,
        shared_memory_per_block=48 * 2**10,
        shared_memory_per_block_optin=SHARED_BYTES_ASSUMED,
        shared_memory_per_multiprocessor=SHARED_BYTES_ASSUMED,
        is_integrated=0,
        is_multi_gpu_board=0,
        uuid=uuid.UUID(int=0),
        **dict.fromkeys(("L2_cache_size", "clock_rate", "memory_clock_rate", "memory_bus_width"), 0),
        **dict.fromkeys(("pci_bus_id", "pci_device_id", "pci_domain_id"), 0),
    )


def answers(card: Card, level: Level) -> Iterator[tuple[Any, str, Any]]:
    """What stands where, as long as the card is rehearsed: (owner, name, function)."""
    functions = {
        **_asked(card, level),
        **dict.fromkeys(_LEVELS, lambda device=None: level()),
        **dict.fromkeys(_IDLE, _nothing),
        **dict.fromkeys(_ZERO, lambda device=None: 0),
        **dict.fromkeys(_STREAMS, Idle),
    }
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random):
        yield from ((module, name, function) for name, function in functions.items() if hasattr(module, name))
    for name, given in (("range_push", 0), ("range_pop", 0), ("range_start", 0), ("range_end", None), ("mark", None)):
        yield torch.cuda.nvtx, name, lambda *args, given=given: given
    for name in ("start", "stop"):
        yield torch.cuda.profiler, name, _nothing
    yield torch.backends.cuda, "is_built", lambda: True
    yield torch.serialization, "default_restore_location", _restored(torch.serialization.default_restore_location)
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        yield storage, "cuda", lambda self, *args, **kwargs: self
    yield torch.Tensor, "record_stream", _nothing
    yield torch.nn.DataParallel, "forward", _alone
    for name, function in _of_accelerator(card, level).items():
        if hasattr(torch.accelerator, name):
            yield torch.accelerator, name, _unless_torch_asks(getattr(torch.accelerator, name), function)


def _asked(card: Card, level: Level) -> dict[str, Callable[..., Any]]:
    """What there is to ask of a card."""
    known = properties(card)
    capability = known.major, known.minor
    state = torch.zeros(16, dtype=torch.uint8, device="cpu")  # seed and offset
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: card.name,
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: known,
        "get_arch_list": lambda: [f"sm_{known.major}{known.minor}"],
        "can_device_access_peer": lambda device, peer_device: False,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or known.major >= 8,
        "is_tf32_supported": lambda: known.major >= 8,
        "mem_get_info": lambda device=None: (card.total_bytes - level(), card.total_bytes),
        "memory_stats": lambda device=None: _stats(level()),
        "memory_stats_as_nested_dict": lambda device=None: _nested(_stats(level())),
        "memory_snapshot": lambda *args, **kwargs: [],
        "list_gpu_processes": lambda device=None: "GPU:0\nno processes are running",
        "get_rng_state": lambda device="cuda": state,
        "get_rng_state_all": lambda: [state],
        "initial_seed": lambda: torch.initial_seed(),
        **dict.fromkeys(_torch.CUDA_EXCHANGES, lambda device: 0),
    }


_STREAMS = ("Event", "Stream", "ExternalStream", "stream", "current_stream", "default_stream")
_LEVELS = (
    *("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"),
    *("memory_cached", "max_memory_cached", "device_memory_used"),
)
_IDLE = (
    *("synchronize", "empty_cache", "set_device", "set_stream", "ipc_collect", "init", "set_sync_debug_mode"),
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"),
    *("reset_peak_memory_stats", "reset_accumulated_memory_stats", "set_per_process_memory_fraction"),
    *("reset_max_memory_allocated", "reset_max_memory_cached", _torch.CUDA_INIT),
)
_ZERO = ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate", "get_sync_debug_mode")


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _stats(level_bytes: int) -> Counter[str]:
    """Levels and peaks are what there is now; all that is not known is 0."""
    found = Counter(dict.fromkeys(("num_alloc_retries", "num_ooms"), 0))
    for kind, pool, what in itertools.product(_KINDS, ("all", "large_pool", "small_pool"), _OF_EACH):
        is_level = kind in _IN_BYTES and pool == "all" and what in ("current", "peak")
        found[f"{kind}.{pool}.{what}"] = level_bytes if is_level else 0
    return found


_IN_BYTES = ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes")
_KINDS = (*_IN_BYTES, "inactive_split_bytes", "allocation", "active", "segment", "inactive_split")
_OF_EACH = ("current", "peak", "allocated", "freed")


def _nested(stats: Counter[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in stats.items():
        *kinds, last = name.split(".")
        place = found
        for kind in kinds:
            place = place.setdefault(kind, {})
        place[last] = value
    return found


def _restored(restore: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """What `torch.load` finds in a file for CUDA, or is to put there, is loaded on the CPU."""

    def restored(storage: Any, location: str) -> Any:
        return restore(storage, "cpu" if str(location).startswith("cuda") else location)

    return restored


def _alone(self: torch.nn.DataParallel[Any], *inputs: Any, **kwargs: Any) -> Any:
    """With one card the module itself is called, with its inputs there."""

    def there(leaf: Any) -> Any:
        return leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf

    inputs, kwargs = _torch.tree_map(there, (inputs, kwargs))
    return self.module(*inputs, **kwargs)


def _of_accelerator(card: Card, level: Level) -> dict[str, Callable[..., Any]]:
    functions: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "device_count": lambda: 1,
        "current_device_index": lambda: 0,
        "current_device_idx": lambda: 0,
        "current_stream": Idle,
        "get_memory_info": lambda device=None: (card.total_bytes - level(), card.total_bytes),
        "memory_stats": lambda device=None: _stats(level()),
    }
    idle = ("set_device_index", "set_device_idx", "set_stream", "synchronize", "empty_cache", "reset_peak_memory_stats")
    return {
        **functions,
        **dict.fromkeys(_LEVELS, lambda device=None: level()),
        **dict.fromkeys((*idle, "reset_accumulated_memory_stats"), _nothing),
    }


def _unless_torch_asks(true: Callable[..., Any], told: Callable[..., Any]) -> Callable[..., Any]:
    """Torch itself goes on to pin memory and to set up threads for what it is told."""

    def ask(*args: Any, **kwargs: Any) -> Any:
        return (true if _torch.is_own(sys._getframe(1)) else told)(*args, **kwargs)

    return ask
