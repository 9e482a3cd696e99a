"""Replacements for the functions of `torch.cuda` and similar modules on an absent GPU.

Functions that describe the GPU or its memory return their usual results. Functions that synchronize, seed or mark
ranges do nothing, and neither do streams and events. Unknown properties of a GPU are assumed; none of them changes the
memory that a step needs.
"""

from __future__ import annotations

import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from lowtide._torch.fake_modes import is_own
from lowtide._torch.privateuse1 import CUDA_EXCHANGES, CUDA_HISTORY, CUDA_INIT, CUDA_SNAPSHOT
from lowtide._torch.pytree import tree_map
from lowtide.errors import RehearsalError
from lowtide.estimator.absent_processes import gpus_per_node
from lowtide.estimator.cuda.current_gpu import CAPABILITY_ASSUMED, NullStream
from lowtide.estimator.cuda.memory_stats import RESET_PEAKS, RESET_SUMS, Usage
from lowtide.memory.allocator.simulation import EMPTY_CACHE
from lowtide.memory.gpu_specs import CONTEXT_BYTES, GpuSpec

MULTIPROCESSORS_ASSUMED, THREADS_ASSUMED, SHARED_BYTES_ASSUMED = 100, 1536, 100 * 2**10
"""Properties assumed for any GPU and each of its multiprocessors: no estimate depends on them."""

CUDA_ASSUMED, CUDNN_ASSUMED, NCCL_ASSUMED = "13.0", 91900, (2, 27, 0)
"""Versions that torch's CUDA wheels come with."""


def properties(gpu: GpuSpec) -> SimpleNamespace:
    """Return properties as `torch.cuda.get_device_properties` does.

    Name, memory and capability are known. Numbers that code may divide by are assumed; clocks, caches, buses and the
    identity of the GPU are 0.
    """
    major, minor = gpu.capability or CAPABILITY_ASSUMED
    return SimpleNamespace(
        name=gpu.name,
        gcnArchName=gpu.name,
        total_memory=gpu.total_bytes,
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


def answers(gpu: GpuSpec, usage: Usage) -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements for an absent GPU, as (module or class, attribute name, new value)."""
    functions = {
        **_make_queries(gpu, usage),
        **_make_memory_functions(gpu, usage),
        **dict.fromkeys(_IDLE, _nothing),
        **dict.fromkeys(_ZERO, lambda device=None: 0),
        **dict.fromkeys(_STREAMS, NullStream),
        **dict.fromkeys(("Stream", "ExternalStream"), _UsersStream),
        "stream": _check_stream,
    }
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random):
        yield from ((module, name, function) for name, function in functions.items() if hasattr(module, name))
    for name, given in (("range_push", 0), ("range_pop", 0), ("range_start", 0), ("range_end", None), ("mark", None)):
        yield torch.cuda.nvtx, name, lambda *args, given=given: given
    for name in ("start", "stop"):
        yield torch.cuda.profiler, name, _nothing
    yield torch.backends.cuda, "is_built", lambda: True
    yield torch.backends.cuda, "is_flash_attention_available", lambda: True
    yield torch.backends.cudnn, "is_available", lambda: True
    yield torch.backends.cudnn, "version", lambda: CUDNN_ASSUMED
    yield torch.version, "cuda", CUDA_ASSUMED
    yield torch.cuda.nccl, "version", lambda: NCCL_ASSUMED
    yield torch.cuda.nccl, "is_available", lambda tensors: False
    yield torch.autograd.profiler.profile, "__init__", _profile_only_cpu(torch.autograd.profiler.profile.__init__)
    for name in ("__enter__", "__exit__"):
        yield torch.autograd.profiler.emit_nvtx, name, lambda self, *error: None if error else self
    for name in torch.cuda.tunable.__all__:
        yield torch.cuda.tunable, name, _nothing
    for name in ("Stream", "Event"):
        yield torch, name, NullStream
    yield torch.serialization, "default_restore_location", _load_onto_cpu(torch.serialization.default_restore_location)
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        yield storage, "cuda", lambda self, *args, **kwargs: self
    yield torch.Tensor, "record_stream", _nothing
    yield torch.nn.DataParallel, "forward", _forward_on_one_gpu
    yield torch.accelerator, "current_stream", NullStream  # FSDP2 asks, too
    for name, function in _list_accelerator_functions(gpu, usage).items():
        if hasattr(torch.accelerator, name):
            yield torch.accelerator, name, _replace_except_for_torch(getattr(torch.accelerator, name), function)


def _make_queries(gpu: GpuSpec, usage: Usage) -> dict[str, Any]:
    """Return the functions of `torch.cuda` that describe a GPU, by name."""
    known = properties(gpu)
    capability = known.major, known.minor
    state = torch.zeros(16, dtype=torch.uint8, device="cpu")  # seed and offset
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: gpus_per_node[-1],
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: gpu.name,
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: known,
        "get_arch_list": lambda: [f"sm_{known.major}{known.minor}"],
        "can_device_access_peer": lambda device, peer_device: False,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or known.major >= 8,
        "is_tf32_supported": lambda: known.major >= 8,
        "memory_stats_as_nested_dict": lambda device=None: _nest(usage.stats()),
        "memory_snapshot": lambda *args, **kwargs: usage.snapshot()["segments"],
        CUDA_SNAPSHOT: lambda *args, **kwargs: usage.snapshot(),
        "list_gpu_processes": lambda device=None: "GPU:0\nno processes are running",
        "get_rng_state": lambda device="cuda": state,
        "get_rng_state_all": lambda: [state],
        "initial_seed": lambda: torch.initial_seed(),
        "default_generators": (torch.default_generator,),
        "get_allocator_backend": lambda: "native",
        "get_per_process_memory_fraction": lambda device=None: 1.0,
        "cudart": lambda: _Runtime(gpu, usage),
        **dict.fromkeys(("host_memory_stats", "host_memory_stats_as_nested_dict"), dict),
        **dict.fromkeys(CUDA_EXCHANGES, lambda device: 0),
    }


class _Runtime:
    """Replacement for the result of `torch.cuda.cudart()`: every CUDA runtime call does nothing and returns 0.

    Only `cudaMemGetInfo` returns something else: the absent GPU's free and total bytes.
    """

    def __init__(self, gpu: GpuSpec, usage: Usage) -> None:
        self.cudaMemGetInfo = lambda device=0: _make_memory_functions(gpu, usage)["mem_get_info"](device)

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args, **kwargs: 0


class _UsersStream(NullStream):
    """A CUDA stream that the script creates."""


def _check_stream(stream: NullStream | None) -> NullStream:
    if isinstance(stream, _UsersStream) and len(gpus_per_node) > 1:
        raise RehearsalError(
            "the script allocates on a CUDA stream of its own (torch.cuda.stream), which is not estimated; only "
            "FSDP2's streams are.\n  "
            "Estimate without it: the real step reserves more, because a stream does not reuse another stream's "
            "blocks."
        )
    return stream or NullStream()


_STREAMS = (
    "Event",
    "current_stream",
    "default_stream",
    "get_stream_from_external",
)
_LEVELS = {
    "memory_allocated": "allocated_bytes.all.current",
    "max_memory_allocated": "allocated_bytes.all.peak",
    **dict.fromkeys(("memory_reserved", "memory_cached"), "reserved_bytes.all.current"),
    **dict.fromkeys(("max_memory_reserved", "max_memory_cached"), "reserved_bytes.all.peak"),
}
_MARKS = {
    "empty_cache": EMPTY_CACHE,
    "reset_accumulated_memory_stats": RESET_SUMS,
    **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"), RESET_PEAKS),
}


def _make_memory_functions(gpu: GpuSpec, usage: Usage) -> dict[str, Callable[..., Any]]:
    """Return the functions of `torch.cuda` and `torch.accelerator` about the allocator."""

    def count_used() -> int:
        """Return the used bytes of the GPU, including those of the largest CUDA context."""
        return min(usage.level("reserved_bytes.all.current") + CONTEXT_BYTES[1], gpu.total_bytes)

    return {
        **{name: lambda device=None, of=of: usage.level(of) for name, of in _LEVELS.items()},
        **{name: lambda device=None, what=what: usage.mark(what) for name, what in _MARKS.items()},
        "memory_stats": lambda device=None: usage.stats(),
        "device_memory_used": lambda device=None: count_used(),
        **dict.fromkeys(
            ("mem_get_info", "get_memory_info"), lambda device=None: (gpu.total_bytes - count_used(), gpu.total_bytes)
        ),
    }


_IDLE = (
    *("synchronize", "set_device", "set_stream", "ipc_collect", "init", "set_sync_debug_mode"),
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"),
    *("set_per_process_memory_fraction", *CUDA_HISTORY, "check_error", CUDA_INIT),
    *("reset_peak_host_memory_stats", "reset_accumulated_host_memory_stats", "empty_host_cache"),
)
_ZERO = (
    "current_blas_handle",
    "current_solver_handle",
    "utilization",
    "memory_usage",
    "temperature",
    "power_draw",
    "clock_rate",
    "get_sync_debug_mode",
)


_DTYPES = frozenset(dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype))


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _nest(stats: Counter[str]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in stats.items():
        *kinds, last = name.split(".")
        place = nested
        for kind in kinds:
            place = place.setdefault(kind, {})
        place[last] = value
    return nested


def _profile_only_cpu(profile: Callable[..., None]) -> Callable[..., None]:
    """Wrap the profiler's constructor so that it profiles only the CPU, because no kernels run on an absent GPU."""

    def init(
        self: Any, enabled: bool = True, *, use_cuda: Any = False, use_device: Any = None, **settings: Any
    ) -> None:
        if use_cuda or use_device == "cuda":
            settings, use_device = {**settings, "use_cpu": True}, None
        profile(self, enabled, use_device=use_device, **settings)

    return init


def _load_onto_cpu(restore: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Wrap `restore`, a part of `torch.load`, so that it loads CUDA storages onto the CPU."""

    def restored(storage: Any, location: str) -> Any:
        return restore(storage, "cpu" if str(location).startswith("cuda") else location)

    return restored


def _forward_on_one_gpu(self: torch.nn.DataParallel[Any], *inputs: Any, **kwargs: Any) -> Any:
    """Replace `DataParallel.forward` on one GPU: move the inputs to the GPU and call the wrapped module."""

    def move_to_the_gpu(leaf: Any) -> Any:
        return leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf

    inputs, kwargs = tree_map(move_to_the_gpu, (inputs, kwargs))
    return self.module(*inputs, **kwargs)


def _list_accelerator_functions(gpu: GpuSpec, usage: Usage) -> dict[str, Callable[..., Any]]:
    return {
        **_make_memory_functions(gpu, usage),
        "is_available": lambda: True,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "device_count": lambda: gpus_per_node[-1],
        "current_device_index": lambda: 0,
        "current_device_idx": lambda: 0,
        "device_index": NullStream,
        "get_device_capability": lambda device=None: {"supported_dtypes": _DTYPES},
        **dict.fromkeys(("set_device_index", "set_device_idx", "set_stream", "synchronize"), _nothing),
    }


def _replace_except_for_torch(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `original` if its caller is torch's own code, otherwise `replacement`.

    If torch called `replacement`, it would pin memory for a GPU.
    """

    def choose(*args: Any, **kwargs: Any) -> Any:
        return (original if is_own(sys._getframe(1)) else replacement)(*args, **kwargs)

    return choose
