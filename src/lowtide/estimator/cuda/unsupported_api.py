"""Parts of `torch.cuda` that an absent GPU does not support: calling one raises an error that names an alternative."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import torch.cuda.comm

from lowtide._torch.privateuse1 import JIT_KERNELS
from lowtide.errors import RehearsalError

_GRAPHS = (
    "a CUDA graph records kernels, and an absent GPU runs none.\n  Estimate the step without it; a graph's own pool "
    "comes on top of that."
)
_POOLS = (
    "memory allocated outside torch's own allocator can't be estimated.\n  Estimate without it: the answer is for "
    "torch's allocator with the settings of PYTORCH_CUDA_ALLOC_CONF."
)
_KERNELS = "kernels that are compiled for a GPU can't run without one.\n  Estimate with an operator of torch instead."
_GPUS = "an estimate is for one GPU.\n  Estimate the work of one of several GPUs, without moving tensors between them."
_STORAGES = "legacy storages can't be on an absent GPU.\n  Make a tensor, and take its untyped_storage()."

_GRAPH_NAMES = ("CUDAGraph", "graph", "make_graphed_callables", "graph_pool_handle")
_POOL_NAMES = ("MemPool", "use_mem_pool", "CUDAPluggableAllocator", "change_current_allocator")
_ALLOCATING = ("caching_allocator_alloc", "caching_allocator_delete")
_MOVING = ("broadcast", "broadcast_coalesced", "reduce_add", "reduce_add_coalesced", "scatter", "gather")

_REFUSED: tuple[tuple[tuple[Any, ...], tuple[str, ...], str], ...] = (
    ((torch.cuda, torch.cuda.graphs), _GRAPH_NAMES, _GRAPHS),
    ((torch.accelerator, getattr(torch.accelerator, "graphs", None)), ("Graph",), _GRAPHS),  # torch 2.10 has none
    ((torch.cuda, torch.cuda.memory), (*_POOL_NAMES, *_ALLOCATING), _POOLS),
    ((torch.cuda.jiterator,), JIT_KERNELS, _KERNELS),
    ((torch.cuda.comm, torch.nn.parallel.comm), _MOVING, _GPUS),
    ((torch.cuda,), tuple(name for name in dir(torch.cuda) if name.endswith("Storage")), _STORAGES),
)
"""Tuples (modules, names in them, text of the error): the reason and an alternative."""


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """Yield replacements that raise `RehearsalError`, as (module, attribute name, function or class)."""
    for owners, names, why in _REFUSED:
        for owner in owners:
            for name in names:
                if (obj := getattr(owner, name, None)) is not None:
                    yield owner, name, _make_refusal(obj, f"{owners[0].__name__}.{name}", why)


def _make_refusal(obj: Any, name: str, why: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RehearsalError(f"{name}: {why}")

    return type(obj.__name__, (), {"__new__": refuse}) if isinstance(obj, type) else refuse
