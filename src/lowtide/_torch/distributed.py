"""Private names of torch: process groups and DDP."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from lowtide._torch.fake_modes import is_fake, is_own, without_function_modes, without_modes
from lowtide._torch.tensors import find_parts
from lowtide.utils.frames import module_name

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

_n_simulated = [0]
"""Number of collectives that simulated process groups have run."""

_COLLECTIVES = (
    *("_allgather_base", "all_gather_single", "all_gather_single_coalesced", "allgather", "allgather_coalesced"),
    *("allgather_into_tensor_coalesced", "_reduce_scatter_base", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "allreduce", "allreduce_coalesced"),
    *("all_to_all_single", "alltoall", "alltoall_base", "barrier", "monitored_barrier", "broadcast", "gather"),
    *("reduce", "scatter", "send", "recv", "recv_anysource"),
)
"""Methods of ProcessGroup that run a collective; older versions of torch lack some. Read in torch 2.13."""


def count_collectives() -> int:
    """Return the number of collectives that this process has started, over all process groups. Relies on internals of
    torch 2.13, present since 1.10.
    """
    groups: Any = torch.distributed.distributed_c10d._world.pg_map
    real = (group for group, (backend, _) in groups.items() if backend != "fake")
    return _n_simulated[0] + int(sum(group._get_sequence_number_for_group() for group in real))


_n_local = [0]
"""Number of collectives that this process has computed alone."""


def count_local_collectives() -> int:
    """Return the number of collectives that this process has computed alone so far, inside `collectives_alone`."""
    return _n_local[0]


@contextlib.contextmanager
def collectives_alone() -> Iterator[None]:
    """Compute the collectives of distributed tensors, and HSDP's sums, from this process's own parts inside this `with`
    block. Relies on internals of torch 2.13.

    Each collective takes its usual memory, but nothing is sent: a sum is this process's own addend, and all gathered
    parts are copies of this process's part.
    """
    plain_all_reduce = torch.distributed.all_reduce

    @functools.wraps(plain_all_reduce)
    def all_reduce_alone(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not module_name(sys._getframe(1)).startswith("torch.distributed.fsdp."):
            return plain_all_reduce(tensor, *args, **kwargs)
        return None

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(torch.distributed, "all_reduce", all_reduce_alone))
        for namespace, kernels in (("_c10d_functional", _ALONE), ("_dtensor", {"shard_dim_alltoall": _move_alone})):
            library: Any = vars(torch.library)["Library"](namespace, "IMPL")
            stack.callback(library._destroy)
            for name, kernel in kernels.items():
                for key in ("CPU", "CUDA"):
                    library.impl(name, _count_calls(kernel), key)
        yield


def _count_calls(kernel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def counted(*args: Any) -> Any:
        _n_local[0] += 1
        return kernel(*args)

    return counted


def _resolve_group(name: Any) -> Any:
    c10d: Any = torch.distributed.distributed_c10d
    return c10d._resolve_process_group(name) if isinstance(name, str) else name


def _gather_alone(tensor: torch.Tensor, n: int, group: Any) -> torch.Tensor:
    return torch.cat([tensor] * n)


def _scatter_alone(tensor: torch.Tensor, how: str, n: int, group: Any) -> torch.Tensor:
    return tensor.chunk(n)[int(_resolve_group(group).rank())].clone()


def _exchange_alone(tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: Any) -> torch.Tensor:
    return tensor.new_zeros(sum(received), *tensor.shape[1:]) if received else tensor.clone()


def _move_alone(tensor: torch.Tensor, gathered: int, split: int, group: Any) -> torch.Tensor:
    n, rank = _resolve_group(group).size(), int(_resolve_group(group).rank())
    return torch.cat([tensor] * n, gathered).chunk(n, split)[rank].contiguous()


_ALONE: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda tensor, *_: tensor.clone(),
    "all_reduce_": lambda tensor, *_: tensor,
    "all_reduce_coalesced": lambda tensors, *_: [tensor.clone() for tensor in tensors],
    "all_reduce_coalesced_": lambda tensors, *_: tensors,
    "broadcast": lambda tensor, *_: tensor.clone(),
    "broadcast_": lambda tensor, *_: tensor,
    "all_gather_into_tensor": _gather_alone,
    "all_gather_into_tensor_coalesced": lambda tensors, *rest: [_gather_alone(tensor, *rest) for tensor in tensors],
    "reduce_scatter_tensor": _scatter_alone,
    "reduce_scatter_tensor_coalesced": lambda tensors, *rest: [_scatter_alone(tensor, *rest) for tensor in tensors],
    "all_to_all_single": _exchange_alone,
}
"""Functional collectives with one process's own parts, by name. Read in torch 2.13; present since 2.3."""


@contextlib.contextmanager
def simulated_collectives_counted() -> Iterator[None]:
    """Let `count_collectives` also count collectives of simulated groups inside this `with` block.

    Relies on internals of torch 2.13.
    """

    def counting(collective: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            _n_simulated[0] += 1
            return collective(*args, **kwargs)

        return counted

    group = torch.distributed.ProcessGroup
    with contextlib.ExitStack() as stack:
        for name in _COLLECTIVES:
            if hasattr(group, name):
                stack.enter_context(patch.object(group, name, counting(getattr(group, name))))
        yield


def find_ddp_wrappers(modules: Iterable[Any]) -> list[torch.nn.parallel.DistributedDataParallel]:
    """Return the modules that are DDP wrappers.

    DDP is an ABC, so `isinstance` would hash the class of each module, and a metaclass may make its classes unhashable.
    """
    return [module for module in modules if torch.nn.parallel.DistributedDataParallel in type(module).__mro__]


def awaits_first_backward(wrapper: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return True if a DDP wrapper with `static_graph=True` has not yet recorded, in its first backward, which
    parameters are used. Relies on internals of torch 2.13, present since 1.13.
    """
    return wrapper.static_graph and not wrapper._static_graph_delay_allreduce_enqueued


def has_new_buckets(wrapper: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return True if `wrapper` has put its buckets in gradient order, as its second forward does. Relies on internals
    of torch 2.13, present since 2.1.
    """
    return wrapper._has_rebuilt_buckets


def after_backward(call: Callable[[], None]) -> None:
    """Run `call()` at the end of the running backward pass. Relies on internals of torch 2.13, present since 1.0."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


SYNC_BUFFERS = "_distributed_broadcast_coalesced"
"""Name of a DDP wrapper's method that broadcasts buffers. Arguments: tensors, bytes to send at a time, source rank.
Read in torch 2.13; present since 1.10.
"""


def find_sent_parameters(
    wrapper: torch.nn.parallel.DistributedDataParallel,
) -> tuple[list[torch.nn.Parameter], list[bool]]:
    """Return the parameters whose gradients DDP reduces, and for each of them True if its gradient is sparse. Relies on
    internals of torch 2.13, present since 1.10.
    """
    return wrapper._build_params_for_reducer()  # type: ignore[no-any-return, no-untyped-call]


_buckets: dict[int, weakref.ref[torch.Tensor]] = {}
"""Weak references to the DDP buckets that `keep_own_gradients` has received, by the `id` of the bucket's tensor."""


def keep_own_gradients(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Return the gradients in `bucket` unchanged, as a completed future.

    This is a communication hook for DDP that sends nothing. Relies on internals of torch 2.13.
    """
    buffer = bucket.buffer()
    _buckets[id(buffer)] = weakref.ref(buffer, functools.partial(_forget, id(buffer)))
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


def _forget(number: int, _: object) -> None:
    _buckets.pop(number, None)


def find_seen_buckets() -> list[torch.Tensor]:
    """Return the tensors of the DDP buckets that `keep_own_gradients` has received and that are alive.

    Other buckets have no Python object.
    """
    return [bucket for reference in [*_buckets.values()] if (bucket := reference()) is not None]


def compute_bucket_limits(wrapper: torch.nn.parallel.DistributedDataParallel) -> tuple[list[int], list[int]]:
    """Return the largest sizes of DDP's buckets in bytes, in two lists: for the first forward, and from the second one
    on.

    Relies on internals of torch 2.13.
    """
    config = getattr(wrapper, "_bucket_config", None)
    if config is None:  # as in torch 2.10, where the wrapper itself has the numbers
        first_cap: int = vars(torch.distributed)["_DEFAULT_FIRST_BUCKET_BYTES"]
        cap = wrapper.bucket_bytes_cap
        limits = [first_cap, cap] if wrapper.bucket_bytes_cap_default else [cap]
        has_one_bucket = wrapper.static_graph or not wrapper.find_unused_parameters
        return ([sys.maxsize] if has_one_bucket else limits), [limits[0], cap]
    first, then = config.compute_bucket_size_limits(
        static_graph=wrapper.static_graph, find_unused_parameters=wrapper.find_unused_parameters
    )
    return first, then or [config.first_bucket_bytes_cap, config.bucket_bytes_cap]


def find_communication_hooks(
    wrapper: torch.nn.parallel.DistributedDataParallel,
) -> tuple[list[str], list[torch.dtype]]:
    """Inspect the communication hooks of `wrapper`; return the names of hooks that are not torch's own, and the dtypes
    to which torch's own hooks compress copies of the buckets.

    Relies on internals of torch 2.13, present since 2.1.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as own

    dtypes = {own.fp16_compress_hook: torch.float16, own.bf16_compress_hook: torch.bfloat16}
    hooks = [hook for hook, _ in wrapper._comm_hooks]
    others = [hook for hook in hooks if hook not in dtypes and hook is not own.allreduce_hook]
    names = [getattr(hook, "__name__", str(hook)) for hook in others]
    return names, [dtypes[hook] for hook in hooks if hook in dtypes]


def assign_buckets(
    parameters: Sequence[torch.Tensor], limits: list[int], sparse: list[bool], numbers: Sequence[int]
) -> list[list[int]]:
    """Assign parameters to DDP's buckets as torch does; return the numbers of the parameters in each bucket.

    `limits` are the largest sizes of the buckets in bytes. `numbers[i]` is the number of `parameters[i]`, and
    `sparse[number]` is True if that parameter's gradient is sparse. Relies on internals of torch 2.13, present since
    1.10.
    """
    with without_modes(), without_function_modes():
        like = [torch.empty_strided(p.size(), p.stride(), dtype=p.dtype, device="meta") for p in parameters]
        assign: Any = vars(torch.distributed)["_compute_bucket_assignment_by_size"]
        result = assign(like, limits, sparse, list(numbers))
    return [list(group) for group in result[0]]


_wrapping: dict[type[Any], bool] = {}


def is_wrapping(kind: type[Any]) -> bool:
    """Return True if `kind` is a tensor class whose instances wrap this process's shard, as DTensor's do. Relies on
    internals of torch 2.13, present since 2.0.
    """
    wrapping = _wrapping.get(kind)
    if wrapping is None:
        wrapping = _wrapping[kind] = kind.__module__.startswith("torch.distributed.")
    return wrapping


def get_own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's local tensor of a DTensor or a similar class; return any other tensor unchanged."""
    return next(find_parts(tensor)) if is_wrapping(type(tensor)) else tensor


def import_functional_collectives() -> Any:
    """Return torch's module of collectives that return new tensors. Relies on internals of torch 2.13, present since
    2.0.
    """
    from torch.distributed import _functional_collectives

    return _functional_collectives


def make_distributed_like(tensor: Any, local: torch.Tensor) -> Any:
    """Return a leaf of the class of `tensor` (a DTensor, or a collective's result to be waited for) with `local` as
    this process's part. Relies on internals of torch 2.13, present since 2.4.
    """
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        return type(tensor)(local)
    return type(tensor)(local, tensor._spec, requires_grad=tensor.requires_grad)


def start_absent_processes(start: Callable[..., None], rank: int, size: int) -> None:
    """Make this process the rank `rank` of a simulated group of `size` processes, whose collectives return at once.

    `start` is `torch.distributed.init_process_group`. Relies on internals of torch 2.13.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    start("fake", rank=rank, world_size=size, store=FakeStore())


def build_own_state_patch() -> tuple[Any, str, Callable[..., None]]:
    """Return a replacement for the function that broadcasts rank 0's state dict, as (owner, name, function).

    On ranks other than 0 the replacement receives nothing: it keeps the process's own state, and gives memory to
    tensors in it that are on the meta device. Relies on internals of torch 2.13, present since 2.4.
    """
    from torch.distributed.checkpoint import state_dict

    broadcast = vars(state_dict)["_broadcast_state_dict"]

    @functools.wraps(broadcast)
    def kept(
        full: dict[str, Any], own: dict[str, Any], device: torch.device, *args: Any, cpu_offload: bool = False, **_: Any
    ) -> None:
        if torch.distributed.get_rank() == 0:
            broadcast(full, own, device, *args, cpu_offload=cpu_offload, **_)
            return
        for key, value in own.items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                own[key] = torch.empty_like(value, device="cpu" if cpu_offload else device)

    return state_dict, "_broadcast_state_dict", kept


def is_replicated(module: torch.nn.Module) -> bool:
    """Return True if `replicate` was called on `module`. Its first forward then makes a DDP wrapper. Relies on
    internals of torch 2.13.
    """
    contract = sys.modules.get("torch.distributed._composable.contract")
    return contract is not None and "replicate" in (contract._get_registry(module) or ())


def n_groups() -> int:
    """Return the number of process groups that have more than one process. Relies on internals of torch 2.13, present
    since 1.10.
    """
    return sum(group.size() > 1 for group in torch.distributed.distributed_c10d._world.pg_map)


@contextlib.contextmanager
def sharding_without_modes(contents: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """Let DTensor compute shapes, and device meshes their ranks, without dispatch modes inside this `with` block.
    Relies on internals of torch 2.13.

    DTensor runs operators on fake tensors of the global shape, which take no memory. A mesh reads its tensor of ranks;
    if it is fake, `contents` returns its real contents, if known.
    """
    if not torch.distributed.is_available():
        yield
        return
    from torch.distributed._mesh_layout import _MeshLayout
    from torch.distributed.device_mesh import DeviceMesh

    make = DeviceMesh.__init__

    def real(value: Any) -> Any:
        return contents(value) if is_fake(value) else value

    @_without_modes
    def made(*args: Any, **kwargs: Any) -> None:
        make(*map(real, args), **{name: real(value) for name, value in kwargs.items()})

    ranks = _without_modes(_MeshLayout.remap_to_tensor)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(DeviceMesh, "__init__", made))
        stack.enter_context(patch.object(_MeshLayout, "remap_to_tensor", ranks))
        if "torch.distributed.tensor" in sys.modules:
            from torch.distributed.tensor._sharding_prop import ShardingPropagator

            name = "_propagate_tensor_meta_non_cached"
            shapes = _without_modes(getattr(ShardingPropagator, name))
            stack.enter_context(patch.object(ShardingPropagator, name, shapes))
            name = "propagate_op_sharding_non_cached"
            propagate = _run_once_for_like_tensors(getattr(ShardingPropagator, name))
            stack.enter_context(patch.object(ShardingPropagator, name, propagate))
        yield


_OVER_LISTS = ("aten::_foreach_", "aten::_amp_foreach_", "aten::_fused_")
"""Beginnings of the names of operators that treat the tensors of their lists one by one. Read in torch 2.13."""


def _run_once_for_like_tensors(propagate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a version of DTensor's `propagate` that runs once for all tensors of a list that have equal metadata.

    An optimizer's lists hold all parameters, and torch's time grows with the square of their number. Relies on
    internals of torch 2.13.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSchema

    @functools.wraps(propagate)
    def propagated(self: Any, schema: Any) -> Any:
        lists = [arg for arg in schema.args_schema if isinstance(arg, list | tuple) and arg]
        specs = [arg for arg in lists if isinstance(arg[0], DTensorSpec)]
        if not schema.op.name().startswith(_OVER_LISTS) or not specs or len({*map(len, lists)}) > 1:
            return propagate(self, schema)
        numbers: dict[tuple[Any, ...], int] = {}
        places = [numbers.setdefault(specs_of_tensor, len(numbers)) for specs_of_tensor in zip(*specs, strict=True)]
        firsts = [places.index(number) for number in range(len(numbers))]

        def shortened(arg: Any) -> Any:
            return type(arg)(arg[place] for place in firsts) if isinstance(arg, list | tuple) and arg else arg

        args = tuple(map(shortened, schema.args_schema))
        result = propagate(self, OpSchema(schema.op, args, schema.kwargs_schema, schema.schema_info))
        if result.needs_redistribute:
            return propagate(self, schema)
        if isinstance(result.output_spec, tuple):
            outputs = [result.output_spec[number] for number in places]
            result.output_spec = tuple(
                spec and spec.shallow_copy_with_tensor_meta(spec.tensor_meta) for spec in outputs
            )
        return result

    return propagated


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with without_modes(), without_function_modes():
            return function(*args, **kwargs)

    return called


@contextlib.contextmanager
def meshes_on(device_type: str) -> Iterator[None]:
    """Make device meshes on the CPU report `device_type` to torch and this package, and "cuda" to other code, inside
    this `with` block. Relies on internals of torch 2.13.
    """
    if not torch.distributed.is_available():
        yield
        return
    from torch.distributed.device_mesh import DeviceMesh

    def of(mesh: Any) -> str:
        if mesh._device_type != "cpu":
            return str(mesh._device_type)
        return device_type if is_own(sys._getframe(1)) else "cuda"

    with patch.object(DeviceMesh, "device_type", property(of)):
        yield


def find_ring_attention() -> tuple[Any, tuple[str, ...]] | None:
    """Return the module of context parallel, and the names of its functions that begin and run attention.

    Returns None if the module is not imported. Relies on internals of torch 2.13.
    """
    module = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    if module is None:
        return None
    names = ("_enable_context_parallel_dispatcher_impl", "_templated_ring_attention")
    return module, tuple(name for name in names if hasattr(module, name))


def find_symmetric_memory() -> Iterator[tuple[Any, str]]:
    """Yield owner and name of the functions that begin to use symmetric memory and that this version of torch has.
    Relies on internals of torch 2.13.
    """
    from torch.distributed import _symmetric_memory
    from torch.distributed.fsdp import FSDPModule

    for owner, name in (
        (FSDPModule, "set_symm_mem_for_comm"),
        *((_symmetric_memory, name) for name in ("empty", "rendezvous", "enable_symm_mem_for_group")),
    ):
        if hasattr(owner, name):
            yield owner, name


def is_spawned(process: BaseProcess) -> bool:
    """Return True if `torch.multiprocessing.spawn` or `start_processes` started `process`. Relies on internals of torch
    2.13.
    """
    return getattr(getattr(process, "_target", None), "__module__", "") == "torch.multiprocessing.spawn"
