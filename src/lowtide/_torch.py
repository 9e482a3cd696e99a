"""The private names of torch that Lowtide relies on, all of them. `tests/test_private_torch.py` says what each must do.

Each was read in the sources of torch 2.13; those marked so have been there since 2.10 or longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as _module

if TYPE_CHECKING:
    from torch.autograd.graph import Node

# --- autograd nodes -------------------------------------------------------------------------------------------------


def node_metadata(node: Node) -> dict[Any, Any]:
    """A dict that lives and dies with the C++ node. 2.13; documented as `Node.metadata`, its use as a store is not."""
    metadata: dict[Any, Any] = node.metadata  # type: ignore[assignment]
    return metadata


def output_metadata(node: Node, output: int) -> Any:
    """`.shape`, `.dtype` and `.device` of a node's forward output. 2.13."""
    return node._input_metadata[output]


SAVED = "_saved_"
"""Prefix of a node's attributes for what it saved; reading one runs the unpack hook. 2.13, since 1.9."""


def saved_slot(node: Node, attribute: str) -> Any:
    """Where `node` holds the tensor or tensors that it shows as `attribute`; None for constants. Runs no hook. 2.13.

    A slot has `.data`, the tensor or what a pack hook made of it, and `.unpack_hook`, None where no hook packed it.
    """
    return getattr(node, "_raw" + attribute, None)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that a view was taken of, through any number of views; None for no view. 2.13."""
    return tensor._base


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is just a strided piece of memory: no subclass with a will of its own, not sparse. 2.13."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided


def storage_id(tensor: torch.Tensor) -> int:
    """The same number for tensors that share memory, while one of them lives; 0 for those without a storage. 2.13."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors
        return 0


# --- modules --------------------------------------------------------------------------------------------------------

CALL = "_compiled_call_impl"
"""Instance attribute that `Module.__call__` prefers over its own implementation. `Module.compile()` sets it, and
`Module.__getstate__` leaves it out, so copies and pickles of a module do not have it. 2.13, since 2.2."""


GLOBAL_FORWARD_HOOKS = (_module._global_forward_pre_hooks, _module._global_forward_hooks)
"""Hooks on the calls of all modules of the process: tables by key, as each module has its own. 2.13."""


def call_module(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`module(*args, **kwargs)` past whatever stands in CALL: its hooks and its forward. 2.13."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


# --- backward -------------------------------------------------------------------------------------------------------


def any_autocast() -> bool:
    """Whether autocast is on for any device in this thread. 2.13."""
    return bool(torch._C._is_any_autocast_enabled())


backward_number = torch._C._current_graph_task_id
"""Number of the backward pass that runs in this thread, counted from 0; -1 for none. 2.13, since 2.1."""


def in_backward() -> bool:
    """Whether a backward pass is running in this thread. 2.13."""
    return backward_number() != -1


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The innermost pair of saved-tensor hooks, pack and unpack, in force in this thread. 2.13."""
    found: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def in_function_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp, ...) is running in this thread. 2.13."""
    return torch._C._functorch.maybe_current_level() is not None


def raw_saved(node: Node) -> Iterator[Any]:
    """What `node` holds for its backward, tensors or what a pack hook made of them; runs no unpack hook. 2.13."""
    for name in _raw_saved_names(type(node)):
        try:
            slots = getattr(node, name)
        except RuntimeError:  # a custom Function whose saved tensors were freed
            continue
        for slot in slots if isinstance(slots, tuple | list) else (slots,):
            yield slot.data


def _raw_saved_names(node_class: type) -> tuple[str, ...]:
    names = _names_of.get(node_class)
    if names is None:
        names = _names_of[node_class] = tuple(name for name in dir(node_class) if name.startswith("_raw_saved_"))
    return names


_names_of: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()  # weak: each custom Function makes a class


# --- the profiler, on CPU -------------------------------------------------------------------------------------------

RecordFunction = torch._C._profiler._RecordFunctionFast
"""Puts an event of the given name between the operators that a running profiler records; 0.7 us. 2.13."""

ALLOCATION = "[memory]"
"""Name of the profiler's events for allocations and frees. 2.13, since 1.6."""


def profiler_running() -> bool:
    """Whether any of torch's profilers records, in this thread or in another. 2.13."""
    return bool(torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled)


def profiler_roots(profile: torch.autograd.profiler.profile) -> list[Any]:
    """The outermost events that a stopped profiler saw: `.name`, `.start_time_ns`, `.children`. 2.13, since 1.12.

    An ALLOCATION has `.extra_fields.ptr`, `.alloc_size` (negative for a free) and `.device`. The size of a free is that
    of the allocation at that address which a profiler saw last: right within one profile, any number across two.
    """
    results = profile.kineto_results
    return [] if results is None else list(results.experimental_event_tree())


# --- the caching allocator, on CUDA ---------------------------------------------------------------------------------


def history_is_on() -> bool:
    """Whether someone records the allocator's history. 2.13."""
    return bool(torch._C._cuda_isHistoryEnabled())


def start_history() -> None:
    """Record every action of the CUDA allocator, with the Python frames of allocations. 2.13, since 2.1."""
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", clear_history=True)


def stop_history() -> None:
    """Stop recording and forget what was recorded. 2.13, since 2.1."""
    torch.cuda.memory._record_memory_history(None)


def snapshot() -> dict[str, Any]:
    """The allocator's state and, under "device_traces", one list of recorded actions per device. 2.13, since 2.1."""
    return dict(torch.cuda.memory._snapshot())


def set_metadata(text: str) -> None:
    """Attach `text` to all actions that the CUDA allocator records in this thread from now on. 2.13, since 2.10."""
    torch.cuda.memory._set_memory_metadata(text)
