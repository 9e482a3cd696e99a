"""All private names of torch that Lowtide relies on. `tests/_torch/test_private_names.py` says what each must do.

Each was read in the sources of torch 2.13; those marked so have been there since 2.10 or longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import overrides
from torch._subclasses import fake_tensor as _fake_tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import graph
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as _module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.optim.optimizer import _foreach_supported_types as _foreach_types
from torch.utils import _device, _python_dispatch, backend_registration, checkpoint
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype, _has_foreach_support
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import SUPPORTED_NODES as SUPPORTED_NODES
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_structure as tree_structure

if TYPE_CHECKING:
    from torch.autograd.graph import Node

F = TypeVar("F", bound=Callable[..., Any])


# --- tensors and their memory ---------------------------------------------------------------------------------------


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that a view was taken of, through any number of views; None for no view. 2.13."""
    return tensor._base


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is just a strided piece of memory: no subclass with a will of its own, not sparse. 2.13."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that have the memory: those inside of a sparse or nested one or of another wrapper, else itself."""
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(part := getattr(tensor, name), torch.Tensor):  # a DTensor names its mesh, too
                yield from parts_of(part)
    else:
        yield tensor


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Let `tensor._version` be this number, as if it had been changed in place so many times. 2.13, since 2.6."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def storage_number(storage: torch.UntypedStorage) -> int:
    """The same number for all Python objects of one storage, while it lives. 2.13."""
    return int(storage._cdata)


def storage_id(tensor: torch.Tensor) -> int:
    """The same number for tensors that share memory, while one of them lives; 0 for those without a storage. 2.13."""
    try:
        return storage_number(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse tensors
        return 0


class WeakStorage:
    """A tensor's memory, without holding it. 2.13: a storage's Python object, once made, counts as one owner."""

    __slots__ = ("_reference", "address")

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.address = storage.data_ptr()

    def owners(self) -> int:
        """How many tensors of C++ have this memory; 0 when it is gone."""
        return max(0, int(torch._C._storage_Use_Count(self._reference.cdata)) - 1)


def has_one_owner(tensor: torch.Tensor) -> bool:
    """Whether nothing but this one tensor object refers to its memory: no view, no other graph. 2.13.

    The memory's Python object counts as well.
    """
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == 2 and tensor._use_count() == 1)  # type: ignore[attr-defined]


def references(things: tuple[Any, ...]) -> tuple[int, ...]:
    """How many refer to the first of these, a tensor, and to its memory: to be compared with another call's. 2.13.

    The last is an object that nobody else has. Whoever refers to all of them alike, as callers do whose frames somebody
    traces or evaluates (Dynamo, debuggers), is not counted. No variable here has any of them, for these are looked at.
    """
    return (
        things[0]._use_count(),
        sys.getrefcount(things[0]) - sys.getrefcount(things[-1]),
        torch._C._storage_Use_Count(things[0].untyped_storage()._cdata),
        sys.getrefcount(things[0].untyped_storage()),
    )


def held_by_python(tensors: Sequence[Any], index: int, known: int) -> bool:
    """Whether Python refers to the tensor `tensors[index]` beside `known` references; False where only C++ does. 2.13.

    The object of Python stays with its C++ tensor, which owns one reference to it while it has other owners.
    """
    owners = int(tensors[index]._use_count())
    # An item, not a variable: since Python 3.14 a call may borrow the reference that a variable has.
    return sys.getrefcount(tensors[index]) - 1 - known - (owners > 1) > 0


def as_kind(kind: type[Any], tensor: torch.Tensor) -> Any:
    """A tensor of that subclass with the memory of `tensor`, which may require no gradient. 2.13, since 1.0."""
    return torch.Tensor._make_subclass(kind, tensor)


DEVICE = vars(torch._C.TensorBase)["device"].__get__
"""What `tensor.device` calls. 2.13."""
SET_DATA = vars(torch._C.TensorBase)["data"].__set__
"""What `tensor.data = other` calls. 2.13."""
IS_CUDA = vars(torch._C.TensorBase)["is_cuda"].__get__
"""What `tensor.is_cuda` calls. 2.13."""
PAD_PACKED = torch._VF._pad_packed_sequence
"""What `pad_packed_sequence` calls. 2.13."""
PARSE_TO = torch._C._nn._parse_to
"""What `module.to` reads its arguments with. 2.13."""
SET_REQUIRES_GRAD = vars(torch._C.TensorBase)["requires_grad"].__set__
"""What `tensor.requires_grad = True` calls. 2.13."""


def wrapper(kind: type[Any], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of that subclass, shape, dtype and device, which has no memory. 2.13, since 1.11."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Two tensors change places, each Python object keeping its identity. Neither may be held by a graph. 2.13.

    `torch.utils.swap_tensors`, which refuses tensors with weak references, as recurrent layers have to their weights.
    """
    torch._C._swap_tensor_impl(one, other)
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks run on a tensor's gradient before it is accumulated. 2.13."""
    return bool(tensor._backward_hooks)


def has_accumulation_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks run once a leaf's gradient has been accumulated. 2.13, since 2.1."""
    return bool(tensor._post_accumulate_grad_hooks)


def share_hooks(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """`other`, a leaf like `tensor`, runs the same hooks on its gradient. 2.13, since 2.1."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if hooks := getattr(tensor, name):
            setattr(other, name, hooks)


# --- autograd nodes -------------------------------------------------------------------------------------------------


def node_metadata(node: Node) -> dict[Any, Any]:
    """A dict that lives and dies with the C++ node. 2.13; documented as `Node.metadata`, its use as a store is not."""
    metadata: dict[Any, Any] = node.metadata  # type: ignore[assignment]
    return metadata


def output_metadata(node: Node, output: int) -> Any:
    """`.shape`, `.dtype` and `.device` of a node's forward output. 2.13."""
    return node._input_metadata[output]


def packet_of(func: Any) -> Any:
    """The operator that an overload, as a dispatch mode gets it, is one of. 2.13, since 1.12."""
    return func._overloadpacket


SAVED = "_saved_"
"""Prefix of a node's attributes for what it saved; reading one runs the unpack hook. 2.13, since 1.9."""


def saved_slot(node: Node, attribute: str) -> Any:
    """Where `node` holds the tensor or tensors that it shows as `attribute`; None for constants. Runs no hook. 2.13.

    A slot has `.data`, the tensor or what a pack hook made of it, and `.unpack_hook`, None where no hook packed it.
    """
    return getattr(node, "_raw" + attribute, None)


def has_yet_to_save(node: Node, attribute: str) -> bool:
    """Whether the tensor that `node` will show as `attribute` is not there yet; False if it was let go of. 2.13."""
    slot = saved_slot(node, attribute)
    if slot is None or slot.data is not None or slot.unpack_hook is not None:
        return False
    try:
        return getattr(node, attribute) is None  # no hook is there to be run
    except RuntimeError:  # freed
        return False


def saved_slots(node: Node) -> Iterator[tuple[str, Any]]:
    """Name and slot (see `saved_slot`) of each tensor that `node` holds for its backward; runs no unpack hook. 2.13."""
    for name in _raw_saved_names(type(node)):
        try:
            found = getattr(node, name)
        except RuntimeError:  # a custom Function whose saved tensors were freed
            continue
        short = name.removeprefix("_raw_saved_")
        if isinstance(found, tuple | list):
            yield from ((f"{short}[{index}]", slot) for index, slot in enumerate(found))
        else:
            yield short, found


def raw_saved(node: Node) -> Iterator[Any]:
    """What `node` holds for its backward, tensors or what a pack hook made of them; runs no unpack hook. 2.13."""
    for _, slot in saved_slots(node):
        yield slot.data


def _raw_saved_names(node_class: type) -> tuple[str, ...]:
    names = _names_of.get(node_class)
    if names is None:
        names = _names_of[node_class] = tuple(name for name in dir(node_class) if name.startswith("_raw_saved_"))
    return names


_names_of: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()  # weak: each custom Function makes a class


def sequence_number(node: Node) -> int:
    """Nodes are numbered in the order in which a thread makes them; those of leaves have the largest number. 2.13."""
    return node._sequence_nr()


def next_sequence_number() -> int:
    """The number (see `sequence_number`) that the next autograd node made in this thread will have. 2.13, since 1.4."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


# --- modules --------------------------------------------------------------------------------------------------------


BatchNorm = _BatchNorm
"""What all batch norms are, whatever their number of dimensions. 2.13, since 0.4."""
Convolution = _ConvNd
"""What all convolutions are. 2.13, since 0.1."""

CALL = "_compiled_call_impl"
"""Instance attribute that `Module.__call__` prefers over its own implementation. `Module.compile()` sets it, and
`Module.__getstate__` leaves it out, so copies and pickles of a module do not have it. 2.13, since 2.2."""

GLOBAL_FORWARD_HOOKS = (_module._global_forward_pre_hooks, _module._global_forward_hooks)
"""Hooks on the calls of all modules of the process: tables by key, as each module has its own. 2.13."""


@contextlib.contextmanager
def without_function_mode(kind: type[overrides.TorchFunctionMode]) -> Iterator[None]:
    """The innermost mode of torch functions is out of force in this block, if it is one of `kind`. 2.13, since 2.0."""
    if isinstance(overrides._get_current_function_mode(), kind):  # type: ignore[no-untyped-call]
        with overrides._pop_mode_temporarily():
            yield
    else:
        yield


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks run when backward comes to the module or leaves it. 2.13, since 2.0."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


CALL_CODE = torch.nn.Module._call_impl.__code__
"""What a frame runs in which a module is called: its hooks and its forward. 2.13."""


def own_call(module: torch.nn.Module) -> Callable[..., Any]:
    """What calls `module` past whatever stands in CALL: its hooks and its forward. 2.13."""
    found: Callable[..., Any] = module._call_impl
    return found


# --- compiled code --------------------------------------------------------------------------------------------------


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `torch.compile(module)` made it, or `module.compile()` compiled it where it stands. 2.13, since 2.2.

    What stands in CALL before the compiled code has that, or the next in the row, in its attribute `before`.
    """
    front = module.__dict__.get(CALL)
    while front is not None and not hasattr(front, "_torchdynamo_orig_callable"):
        front = getattr(front, "before", None)
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # not imported here: that takes a second
    return front is not None or (dynamo is not None and isinstance(module, dynamo.OptimizedModule))


def anything_compiled() -> bool:
    """Whether torch.compile has compiled any code in this process. 2.13, since 2.1."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and utils.counters["stats"]["unique_graphs"] > 0


def not_compiled_alone(function: F) -> F:
    """`function`, through which compiled code may go, but with which none begins. 2.13, since 2.7."""
    return _marked(function, _FRAMES._FrameAction.DEFAULT)


def never_compiled(function: F) -> F:
    """`function`, which stays as it is where compiled code has it called, and all that it calls. 2.13, since 2.7."""
    return _marked(function, _FRAMES._FrameAction.SKIP)


def _marked(function: F, calls: Any) -> F:
    strategy = _FRAMES._FrameExecStrategy(_FRAMES._FrameAction.SKIP, calls)
    _FRAMES.set_code_exec_strategy(function.__code__, strategy)
    return function


_FRAMES = torch._C._dynamo.eval_frame


def in_compiled_backward() -> bool:
    """Whether the node that backward runs in this thread is compiled code. Such a node clears what it saved when it has
    read it, and holds the tensors itself, each for as long as it computes with it. 2.13, since 2.0.
    """
    node: Node | None = torch._C._current_autograd_node()
    return node is not None and node.name() == "CompiledFunctionBackward"


# --- what is in force in this thread --------------------------------------------------------------------------------


def without_subclasses() -> Any:
    """No subclass of tensors has a say in what runs in this block. 2.13, since 2.0."""
    return torch._C.DisableTorchFunctionSubclass()


def accelerator_type() -> str:
    """The device type of this machine's accelerator, "cpu" where it has none. 2.13."""
    return str(torch._C._get_accelerator().type)


def any_autocast() -> bool:
    """Whether autocast is on for any device in this thread. 2.13."""
    return bool(torch._C._is_any_autocast_enabled())


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The innermost pair of saved-tensor hooks, pack and unpack, in force in this thread. 2.13."""
    found: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


@contextlib.contextmanager
def saved_tensor_hooks_off(unpack: Callable[[Any], torch.Tensor]) -> Iterator[None]:
    """The innermost saved-tensor hooks are not in force in this block, if `unpack` is theirs. 2.13."""
    hooks = saved_tensor_hooks()
    if hooks is None or hooks[1] is not unpack:
        yield
        return
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


class _OffInTransforms(threading.local):
    """Saved-tensor hooks that transforms of torch.func find off, those of each thread; what torch asks for that."""

    _lock, _n_blocks, _torchs = threading.Lock(), 0, staticmethod(graph.disable_saved_tensors_hooks)

    def __init__(self) -> None:
        self._hooks: list[tuple[Any, Callable[[], contextlib.AbstractContextManager[None]]]] = []

    @contextlib.contextmanager
    def block(
        self, unpack: Callable[[Any], torch.Tensor], apart: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> Iterator[None]:
        kind = type(self)
        self._hooks.append((unpack, apart))
        with kind._lock:  # threads may come and go in any order
            kind._n_blocks += 1
            graph.disable_saved_tensors_hooks = self._disabled
        try:
            yield
        finally:
            self._hooks.pop()
            with kind._lock:
                kind._n_blocks -= 1
                if not kind._n_blocks:
                    graph.disable_saved_tensors_hooks = kind._torchs

    @contextlib.contextmanager
    def _disabled(self, error_message: str) -> Iterator[None]:
        aside: list[tuple[Any, Any]] = []
        with contextlib.ExitStack() as stack:
            for unpack, apart in reversed(self._hooks):
                top = saved_tensor_hooks()
                if top is None or top[1] is not unpack:
                    break  # somebody else's: it is as it would be without ours
                torch._C._autograd._pop_saved_tensors_default_hooks()
                aside.append(top)
                stack.enter_context(apart())
            try:
                with self._torchs(error_message):
                    yield
            finally:
                for hooks in reversed(aside):
                    torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


_off_in_transforms = _OffInTransforms()


@contextlib.contextmanager
def hooks_but_in_transforms(
    pack: Callable[[torch.Tensor], Any],
    unpack: Callable[[Any], torch.Tensor],
    apart: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """Saved-tensor hooks that are off where code in this block uses a transform of torch.func, which refuses hooks.

    While it runs `apart` is entered. 2.13, since 2.0: transforms ask `graph.disable_saved_tensors_hooks` for that.
    """
    with graph.saved_tensors_hooks(pack, unpack), _off_in_transforms.block(unpack, apart):
        yield


# --- backward -------------------------------------------------------------------------------------------------------


backward_number = torch._C._current_graph_task_id
"""Number of the backward pass that runs in this thread, counted from 0; -1 for none. 2.13, since 2.1."""


def in_forward_mode() -> bool:
    """Whether tangents are computed along (`torch.autograd.forward_ad`). 2.13, since 1.8."""
    return torch.autograd.forward_ad._current_level >= 0


def in_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp) runs in this thread; tensors there may have no memory.

    2.13, since 2.1.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_tracing() -> bool:
    """Whether `torch.jit.trace` runs in this thread. 2.13, since 1.0."""
    return torch._C._is_tracing()


def in_backward() -> bool:
    """Whether a backward pass is running in this thread. 2.13."""
    return backward_number() != -1


def running_node_number() -> int:
    """The number (see `sequence_number`) of the node that backward runs in this thread; -1: none. 2.13, since 2.1."""
    node: Node | None = torch._C._current_autograd_node()
    return -1 if node is None else sequence_number(node)


ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"
"""The kind of the node that gives a leaf its gradient. 2.13, since 1.0."""


def running_node() -> Node | None:
    """The node whose backward runs in this thread. 2.13, since 2.1."""
    found: Node | None = torch._C._current_autograd_node()
    return found


def running_node_name() -> str:
    """The kind of that node, as `GeluBackward0`; empty without one. 2.13, since 2.1."""
    node = running_node()
    return "" if node is None else node.name()


ENGINE = "_engine_run_backward"
"""Name in `torch.autograd` of what `backward` and `grad` call to run a backward pass: outputs, their gradients,
retain_graph, create_graph, inputs. 2.13, since 2.3."""

BACKWARD_CALL = torch.autograd.graph._engine_run_backward.__code__
"""The last Python function on the way into the autograd engine. 2.13, since 2.3."""


@contextlib.contextmanager
def around_checkpoints(told: Callable[[], object], *, off: bool = False) -> Iterator[None]:
    """Call `told` for each call that is checkpointed in this block; with `off` it is not. 2.13, since 2.1.

    `torch.utils.checkpoint.checkpoint` itself is in variables of whoever imported it: what it calls is replaced.
    """
    generator, function = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction

    def instead(*args: Any, **kwargs: Any) -> Iterator[None]:
        told()
        if off:
            yield
        else:
            yield from generator(*args, **kwargs)

    class Reentrant:
        @staticmethod
        def apply(run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            told()
            return run(*args) if off else function.apply(run, preserve, *args)  # type: ignore[no-untyped-call]

    with (
        patch.object(checkpoint, "_checkpoint_without_reentrant_generator", instead),
        patch.object(checkpoint, "CheckpointFunction", Reentrant),
    ):
        yield


# --- optimizers, clipping and gradient scalers ----------------------------------------------------------------------


def step_without_hooks(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The optimizer's own `step`, without running anybody's step hooks. 2.13: the wrapper has `hooked`."""
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return functools.partial(step, optimizer)


def has_step_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether anybody registered a hook before this optimizer's steps. 2.13, since 1.14."""
    return bool(optimizer._optimizer_step_pre_hooks)


def clipped(names: Mapping[str, Any]) -> list[torch.Tensor]:
    """The gradients in the local variables of `clip_grad_norm_` or `clip_grad_value_` as it returns. 2.13."""
    if "grouped_grads" in names:
        return [gradient for (gradients,), _ in names["grouped_grads"].values() for gradient in gradients]
    return list(names["grads"])


def norm_of(gradient: torch.Tensor, norm_type: float, foreach: bool | None) -> torch.Tensor:
    """The norm of one gradient, by the operator with which `clip_grad_norm_` takes those of many. 2.13, since 2.1."""
    device = gradient.device
    if _has_foreach_support([gradient], device) if foreach is None else foreach:
        return torch._foreach_norm([gradient], norm_type)[0]
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, norm_type)
    return norm


def as_grouped(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """These tensors in the order of the groups by device and dtype that `clip_grad_norm_` makes. 2.13, since 2.1."""
    groups = _group_tensors_by_device_and_dtype([tensors])  # type: ignore[list-item]
    return [tensor for (group,), _ in groups.values() for tensor in group if tensor is not None]


def scaler_stages(scaler: torch.amp.GradScaler) -> dict[int, dict[str, Any]]:
    """Which optimizers' gradients are unscaled, or used, since the last `update()`; no part of its state_dict. 2.13."""
    return {key: {**state} for key, state in scaler._per_optimizer_states.items()}


def set_scaler_stages(scaler: torch.amp.GradScaler, stages: dict[int, dict[str, Any]]) -> None:
    """Put back what `scaler_stages` gave. 2.13."""
    scaler._per_optimizer_states.clear()
    scaler._per_optimizer_states.update({key: {**state} for key, state in stages.items()})


# --- operators ------------------------------------------------------------------------------------------------------


def tensor_arguments(op: str) -> tuple[tuple[str, ...], ...]:
    """For each overload of `aten.<op>` the names of its tensor arguments; nothing for an op that is not there. 2.13."""
    packet = getattr(torch.ops.aten, op, None)
    if packet is None:
        return ()
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    return tuple(tuple(a.name for a in schema.arguments if "Tensor" in str(a.type)) for schema in schemas)


def changes_geometry(operator: Any) -> bool:
    """Whether an operator changes size or strides of its first argument itself. 2.13, since 1.12."""
    return torch.Tag.inplace_view in operator.tags


def draws(operator: Any) -> bool:
    """Whether an operator draws random numbers. 2.13, since 2.0."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def written_by(operator: Any) -> tuple[int | str, ...]:
    """Which arguments an operator writes to: places of positional ones, names of keyword-only ones. 2.13, since 1.8."""
    found = _written.get(operator)
    if found is None:
        arguments = operator._schema.arguments
        found = _written[operator] = tuple(
            argument.name if argument.kwarg_only else place
            for place, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
    return found


_written: dict[Any, tuple[int | str, ...]] = {}


# --- several processes ----------------------------------------------------------------------------------------------


def n_collectives() -> int:
    """How many collective operations this process has begun, over all of its process groups. 2.13, since 1.10."""
    groups: Any = torch.distributed.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def awaits_first_backward(wrapper: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Whether it has `static_graph`, and has not learned yet which parameters are used how often. 2.13, since 1.13."""
    return wrapper.static_graph and not wrapper._static_graph_delay_allreduce_enqueued


def has_new_buckets(wrapper: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Whether it has put its buckets in the order in which gradients came: in its second forward. 2.13, since 2.1."""
    return wrapper._has_rebuilt_buckets


def after_backward(call: Callable[[], None]) -> None:
    """Call this at the end of the backward pass that runs now. 2.13, since 1.0."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


SYNC_BUFFERS = "_distributed_broadcast_coalesced"
"""Method of a wrapper that sends buffers: it is given tensors, bytes at a time and a rank. 2.13, since 1.10."""


def sent_parameters(
    wrapper: torch.nn.parallel.DistributedDataParallel,
) -> tuple[list[torch.nn.Parameter], list[bool]]:
    """Parameters whose gradients a wrapper sends, and which of them have sparse ones. 2.13, since 1.10."""
    return wrapper._build_params_for_reducer()  # type: ignore[no-any-return, no-untyped-call]


def bucket_limits(wrapper: torch.nn.parallel.DistributedDataParallel) -> tuple[list[int], list[int]]:
    """Bytes up to which gradients share a bucket: at first, and from the second forward on. 2.13."""
    config = wrapper._bucket_config
    first, then = config.compute_bucket_size_limits(
        static_graph=wrapper.static_graph, find_unused_parameters=wrapper.find_unused_parameters
    )
    return first, then or [config.first_bucket_bytes_cap, config.bucket_bytes_cap]


def assign_buckets(
    parameters: Sequence[torch.Tensor], limits: list[int], sparse: list[bool], numbers: Sequence[int]
) -> list[list[int]]:
    """Numbers of the parameters that share each bucket. `sparse` is by number. 2.13, since 1.10."""
    with without_modes(), without_function_modes():
        like = [torch.empty_strided(p.size(), p.stride(), dtype=p.dtype, device="meta") for p in parameters]
        assign: Any = vars(torch.distributed)["_compute_bucket_assignment_by_size"]
        found = assign(like, limits, sparse, list(numbers))
    return [list(group) for group in found[0]]


# --- sharded modules: FSDP2 -----------------------------------------------------------------------------------------


class ShardGroup:
    """Parameters that `fully_shard` gathers together. 2.13; the parts that send, since 2.9 or longer."""

    __slots__ = ("_group",)

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """Those that `fully_shard` was called on."""
        modules: tuple[torch.nn.Module, ...] = self._group.modules
        return modules

    @property
    def is_whole(self) -> bool:
        """Whether the parameters are gathered now."""
        return bool(self._group.is_unsharded)

    @property
    def parts_after_forward(self) -> bool:
        """Whether they are let go of after forward, and gathered again for backward."""
        return self._group.post_forward_mesh_info is not None

    @property
    def is_whole_in_backward(self) -> bool:
        """Whether they are gathered for backward at all."""
        return bool(self._group.unshard_in_backward)

    @property
    def is_on_host(self) -> bool:
        """Whether they wait in memory of the host."""
        return type(self._group.offload_policy).__name__ == "CPUOffloadPolicy"

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether any of them is a distributed tensor also when it is gathered."""
        return any(parameter.is_dtensor for parameter in self._group.fsdp_params)

    @property
    def has_unsent_gradients(self) -> bool:
        """Whether gradients of earlier micro-batches wait to be added to those of other processes."""
        whole = (getattr(p, "_unsharded_param", None) for p in self._group.fsdp_params)
        waiting = [self._group._partial_reduce_output]
        waiting += [p.unsharded_accumulated_grad for p in self._group.fsdp_params]
        waiting += [p.grad for p in whole if p is not None]
        return any(gradient is not None for gradient in waiting)

    @property
    def senders(self) -> tuple[Any, Any]:
        """What gathers the parameters, and what adds up the gradients."""
        return self._group._all_gather_comm, self._group._reduce_scatter_comm

    @senders.setter
    def senders(self, both: tuple[Any, Any]) -> None:
        self._group._all_gather_comm, self._group._reduce_scatter_comm = both

    def stay_whole(self) -> None:
        """Do not let go of the parameters, until `part`."""
        self._group.reshard = lambda: None

    def part(self) -> None:
        """Let go of them as after forward, if that is done at all."""
        del self._group.reshard
        with self._group.use_training_state(type(self._group._training_state).FORWARD):
            self._group.reshard()

    def forget_gradients(self) -> None:
        """Drop what waits to be sent, and the whole parameters."""
        self._group.reshard()
        for parameter in self._group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                whole.grad = None


def shard_groups(module: Any) -> list[ShardGroup]:
    """The groups of a module that `fully_shard` was called on. 2.13; one until 2.11."""
    return _groups(module._get_fsdp_state())


def _groups(state: Any) -> list[ShardGroup]:
    groups = getattr(state, "_fsdp_param_groups", None)
    return [ShardGroup(g) for g in (groups if groups is not None else [state._fsdp_param_group]) if g is not None]


def parts_by_itself(module: Any) -> bool:
    """Whether nobody said if it lets go of its parameters after forward; then a root does not. 2.13."""
    return bool(module._get_fsdp_state()._auto_reshard_after_forward)


@contextlib.contextmanager
def as_in_backward(module: Any) -> Iterator[None]:
    """In this block a forward of the module is a second one for backward: whole parameters stay as they are. 2.13."""
    state = module._get_fsdp_state()
    before, state._training_state = state._training_state, type(state._training_state).PRE_BACKWARD
    try:
        yield
    finally:
        state._training_state = before


def forget_step(module: Any) -> None:
    """Be as between two steps, wherever this one was broken off; said to the root. 2.13; no word for it until 2.11."""
    state = module._get_fsdp_state()
    if not state._is_root:
        return
    if hasattr(state, "_reset_iter_state"):
        state._reset_iter_state()
    else:
        state._root_post_backward_final_callback()
    for group in (group for other in state._state_ctx.all_states for group in _groups(other)):
        group.forget_gradients()


def sum_over_processes(how: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Have distributed tensors added up like this, as for the norm that gradients are clipped by. Gives how they were.

    2.13, since 2.5.
    """
    functional: Any = torch.distributed._functional_collectives
    before: Callable[..., torch.Tensor] = functional.all_reduce
    functional.all_reduce = how
    return before


# --- the profiler, on CPU -------------------------------------------------------------------------------------------


RecordFunction = torch._C._profiler._RecordFunctionFast
"""Puts an event of the given name between the operators that a running profiler records; 0.7 us. 2.13."""

ALLOCATION = "[memory]"
"""Name of the profiler's events for allocations and frees. 2.13, since 1.6."""


def profiler_running() -> bool:
    """Whether any of torch's profilers records, in this thread or in another. 2.13."""
    return bool(torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled)


def profiler_warming_up() -> bool:
    """Whether one of torch's profilers is prepared and not started yet; another one's start would take its place, and
    its own would then end the process (2.13). torch does not say so: its objects are looked through, in some 20 ms.
    """
    inner, outer = torch.autograd.profiler.profile, torch.profiler.profile
    return any(
        (type(found) is inner and found.entered and not found.profiling_start_time_ns)
        # One that accumulates prepares the same inner profiler over and over.
        or (type(found) is outer and found.acc_events and found.current_action is torch.profiler.ProfilerAction.WARMUP)
        for found in gc.get_referrers(inner, outer)
    )


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


def drop_workspaces() -> None:
    """Give the memory that cuBLAS works in back to the allocator; the next products take it anew. 2.13, since 1.11."""
    torch._C._cuda_clearCublasWorkspaces()


def set_metadata(text: str) -> None:
    """Attach `text` to all actions that the CUDA allocator records in this thread from now on. 2.13, since 2.10."""
    torch.cuda.memory._set_memory_metadata(text)


# --- fake tensors ---------------------------------------------------------------------------------------------------


DATA_DEPENDENT = (_fake_tensor.DynamicOutputShapeException, _fake_tensor.DataDependentOutputException)
"""What a fake operator raises whose result's shape, or value, depends on contents. 2.13, since 2.0."""

NO_FAKE_KERNEL = _fake_tensor.UnsupportedOperatorException
"""What a fake operator raises that has no kernel for fake tensors, where `run_on_zeros` is not allowed. 2.13."""


OWN_OPERATORS = frozenset({"aten", "prim", "prims", "profiler"})
"""Namespaces of torch's own operators. 2.13."""


def fake_mode(run_on_zeros: bool = True, nested: Exception | None = None) -> _fake_tensor.FakeTensorMode:
    """A mode under which operators make fake tensors; `nested` is raised where they would be nested. 2.13, since 1.13.

    Those that have no kernel for fake tensors run on real zeros, on the device that the fake ones are on.
    """
    mode = _fake_tensor.FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=run_on_zeros)

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        assert nested is not None
        raise nested

    if nested is not None:
        mode.create_symbolic_nested_int = refuse  # type: ignore[method-assign]
    return mode


def end_fakes(mode: _fake_tensor.FakeTensorMode) -> None:
    """From here on what is computed from fake tensors of a mode and real ones raises. 2.13, since 2.0."""
    mode.allow_non_fake_inputs = False


@contextlib.contextmanager
def running_on_zeros(mode: _fake_tensor.FakeTensorMode) -> Iterator[None]:
    """Allow a mode to do so in this block. 2.13, since 2.0."""
    before, mode.allow_fallback_kernels = mode.allow_fallback_kernels, True
    try:
        yield
    finally:
        mode.allow_fallback_kernels = before


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a fake one. 2.13."""
    return isinstance(tensor, FakeTensor)


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a strided piece of one storage. 2.13."""
    return tensor.layout is torch.strided and type(tensor) in _WITH_STORAGE


_WITH_STORAGE = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor})


class on_real_tensors:
    """Operators and functions in this block run past all modes. 2.13, since 1.13.

    Past those for functions as well: in a backward pass they are on while an operator is dispatched.
    """

    __slots__ = ("_guards",)

    def __enter__(self) -> None:
        self._guards = torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch()
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *_: object) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)


def as_written(thing: Any) -> Any:
    """The function that `torch.compile` was given, where `thing` is what it gave for one; else `thing`. 2.13."""
    return vars(thing).get("_torchdynamo_orig_callable", thing) if isinstance(thing, FunctionType) else thing


def bytes_of(tensor: torch.Tensor) -> Any:
    """All bytes of the storage of a tensor on the CPU, as an array on the same memory, past all modes. 2.13."""
    with on_real_tensors():
        return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """No dispatch mode is on in this block but those that it enters. 2.13, since 2.0."""
    return _python_dispatch._disable_current_modes()


def on_default_device(function: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function makes a tensor on the device that `with torch.device(...)` names. 2.13."""
    return (
        _device.CURRENT_DEVICE is not None
        and kwargs.get("device") is None
        and function in _device._device_constructors()
    )


def default_device() -> torch.device | None:
    """The device that `with torch.device(...)` or `set_default_device` names; None without one. 2.13."""
    return _device.CURRENT_DEVICE


def is_own(frame: FrameType) -> bool:
    """Whether it runs code of torch or this package."""
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith(("torch.", "lowtide.")) or name == "torch"


@contextlib.contextmanager
def fake_devices_shown(true: torch.device, shown: torch.device, inside: Callable[[], bool]) -> Iterator[None]:
    """In this block fake tensors on one device show another one, but to torch and this package.

    Nor `inside` of operators, where fake kernels of others make tensors on the device that they see. 2.13: a property
    in Python, which torch itself asks for at every step.
    """
    meta, asked = torch.device("meta"), vars(FakeTensor)["device"]

    def device(self: FakeTensor) -> torch.device:
        if self.fake_mode.in_kernel_invocation:
            return meta
        found = self.fake_device
        return found if found != true or is_own(sys._getframe(1)) or inside() else shown

    with patch.object(FakeTensor, "device", property(device, asked.fset)):
        yield


@contextlib.contextmanager
def function_modes_in_backward() -> Iterator[None]:
    """The function modes that are on now are on in backward passes, too, where Python code may run forward again.

    In those of this thread. 2.13: `tensor.backward` is a function that modes are asked for, and a mode is off while it
    is asked.
    """
    modes = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    mine = threading.get_ident()

    def run_under_modes(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != mine:
            return run(*args, **kwargs)
        on = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        off = [mode for mode in modes if not any(mode is other for other in on)]
        _taken_on_the_way.clear()
        try:
            for mode in off:  # not entered: a device's would take itself for the one around it
                overrides._push_mode(mode)  # type: ignore[no-untyped-call]
            done = run(*args, **kwargs)
        except SystemError:
            if _taken_on_the_way:
                raise _taken_on_the_way.pop() from None
            raise
        finally:
            for _ in off:
                overrides._pop_mode()  # type: ignore[no-untyped-call]
        if _taken_on_the_way:  # an interrupt that came just there
            raise _taken_on_the_way.pop()
        return done

    with patch.object(torch.autograd, "_engine_run_backward", run_under_modes):
        yield


_without_modes_in_forks: list[bool] = []


def _forked() -> None:
    if _without_modes_in_forks:
        while torch._C._len_torch_dispatch_stack():
            _python_dispatch._pop_mode()
        while torch._C._len_torch_function_stack():
            overrides._pop_mode()  # type: ignore[no-untyped-call]


os.register_at_fork(after_in_child=_forked)


@contextlib.contextmanager
def data_as_they_are() -> Iterator[None]:
    """A data loader's workers are in no mode that was on when they were forked, and what they give is real. 2.13."""
    rebuild = torch._utils._rebuild_tensor

    def real(*args: Any) -> torch.Tensor:
        with without_modes(), without_function_modes():
            return rebuild(*args)  # type: ignore[no-any-return, no-untyped-call]

    _without_modes_in_forks.append(True)
    try:
        with patch.object(torch._utils, "_rebuild_tensor", real):
            yield
    finally:
        _without_modes_in_forks.pop()


def without_function_modes() -> contextlib.AbstractContextManager[Any]:
    """Functions in this block run past all function modes, and see tensors as they are. 2.13, since 1.13."""
    return torch._C.DisableTorchFunction()


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor with the same memory, by which gradients come back; itself if it is not strided. 2.13."""
    return torch.ops.aten.alias.default(tensor) if is_strided(tensor) else tensor


def make_parameter(fake: torch.Tensor, requires_grad: bool) -> None:
    """Make a fake tensor pass for an `nn.Parameter`. 2.13, since 2.0."""
    fake.requires_grad_(requires_grad)
    fake._is_param = True


# --- the place for devices of other makers --------------------------------------------------------------------------


DeviceModule = backend_registration._DummyBackendModule
"""What `torch.<device>` has to answer, answered for one device. 2.13, since 2.9."""

DeviceHook = backend_registration._DummyPrivateUse1Hook
"""What torch's C++ code asks of such a device, answered likewise. 2.13, since 2.9."""


def device_place() -> str | None:
    """Who has taken the place for devices of other makers (PrivateUse1); None if nobody. 2.13, since 2.1."""
    name = str(torch._C._get_privateuse1_backend_name())
    return None if name == "privateuseone" and not hasattr(torch, name) else name


def take_device_place(name: str, module: DeviceModule, hook: DeviceHook) -> None:
    """Take that place, until the process ends. 2.13, since 2.9."""
    backend_registration._setup_privateuseone_for_python_backend(
        name, backend_module=module, hook=hook, device_guard=_DeviceGuard()
    )


class _DeviceGuard(backend_registration._DummyDeviceGuard):
    """Is asked for its type also while C++ code leaves a node of a graph with an error. 2.13.

    Python code must not return while an error is on its way: that would end the process. So the error is taken off the
    way here, and put on it again where backward was called (`function_modes_in_backward`). Nothing may be looked up
    before: looking for an attribute in a class that does not have it loses an error that is on its way.
    """

    def type_(self, occurred: Callable[[], Any] = ctypes.pythonapi.PyErr_Occurred) -> Any:
        try:
            occurred()  # raises what is on its way
        except BaseException as error:
            _taken_on_the_way.append(error)
        return super().type_()  # type: ignore[no-untyped-call]


_taken_on_the_way: list[BaseException] = []


@contextlib.contextmanager
def constants_made_on_cpu() -> Iterator[None]:
    """`torch.tensor(..., device=...)` makes its tensor on the CPU in this block, and then moves it in sight. 2.13."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


@contextlib.contextmanager
def foreach_for_fakes() -> Iterator[None]:
    """Optimizers take fake parameters for parameters, when they choose their implementation. 2.13, since 2.0."""
    _foreach_types.append(FakeTensor)
    try:
        yield
    finally:
        _foreach_types.remove(FakeTensor)


CUDA_INIT, CUDA_EXCHANGES = "_lazy_init", ("_exchange_device", "_maybe_exchange_device")
"""What sets CUDA up, and what changes its current card and gives the one before. 2.13: in `torch.cuda`."""

CUDA_SNAPSHOT, CUDA_HISTORY = "_snapshot", ("_record_memory_history", "_dump_snapshot")
"""What gives, begins and writes the history of the allocator. 2.13: in `torch.cuda.memory`."""

JIT_KERNELS = ("_create_jit_fn", "_create_multi_output_jit_fn")
"""What compiles kernels at run time. 2.13: in `torch.cuda.jiterator`."""

AUTOGRAD_KEY, AUTOCAST_KEY = "AutogradPrivateUse1", "AutocastPrivateUse1"
"""Dispatch keys of that device. 2.13, since 2.0."""

_AUTOCAST = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(AUTOCAST_KEY))


def register_kernels(namespace: str, kernels: Mapping[str, Any], key: str) -> torch.library.Library:
    """Python functions as kernels of operators, for as long as what is returned lives. 2.13, since 1.13."""
    library = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    for name, kernel in kernels.items():
        library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
    return library


ASIDE = "TESTING_ONLY_GenericMode"
"""A dispatch key before all others, which torch looks at only in a thread that asks for it. 2.13, since 1.12."""

_ASIDE = torch._C._dispatch_key_parse(ASIDE)
_BEHIND_ASIDE = torch._C._dispatch_keyset_full_after(_ASIDE)
_BEHIND_AUTOGRAD = torch._C._dispatch_keyset_full_after(torch._C._dispatch_key_parse("ADInplaceOrView"))


_aside: list[torch.library.Library] = []
"""Once there are such kernels: all other operators know nothing of that key."""


def put_aside(kernels: Mapping[str, Callable[..., Any]]) -> torch.library.Library:
    """Let these run instead of the kernels of operators of `aten`, in a block of `with_aside`. 2.13, since 2.10.

    Each is given, before the arguments, a function that goes on to torch's own and one that goes on past autograd; and
    behind them an object that nobody else has, for `references`.
    """
    if not _aside:
        _aside.append(pass_through(ASIDE))
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, kernel in kernels.items():
        given = _given_its_own(kernel, getattr(torch.ops.aten, name).default)
        library.impl(name, given, ASIDE, with_keyset=True, allow_override=False)  # type: ignore[no-untyped-call]
    return library


def _given_its_own(kernel: Callable[..., Any], operator: Any) -> Callable[..., Any]:
    @never_compiled  # else it would be wherever a compiled function runs backward, with all that it calls
    def replaced(keys: Any, *args: Any, **kwargs: Any) -> Any:
        on, past = (functools.partial(operator.redispatch, keys & mask) for mask in (_BEHIND_ASIDE, _BEHIND_AUTOGRAD))
        return kernel(on, past, *args, object(), **kwargs)

    return replaced


@never_compiled
def with_aside() -> contextlib.AbstractContextManager[Any]:
    """In this block, and in backward passes that begin in it, kernels of `put_aside` are asked. 2.13."""
    return torch._C._IncludeDispatchKeyGuard(_ASIDE)


@contextlib.contextmanager
def without_aside() -> Iterator[None]:
    """Compiled code finds in this block what it would without such kernels, else it would be compiled anew. 2.13."""
    if not (was := torch._C._dispatch_tls_is_dispatch_key_included(_ASIDE)):
        yield
        return
    torch._C._dispatch_tls_set_dispatch_key_included(_ASIDE, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(_ASIDE, was)


def below_autograd() -> contextlib.AbstractContextManager[Any]:
    """Operators in this block are those of the device itself: no graph, no new version of what they write to. 2.13."""
    return torch._C._AutoDispatchBelowADInplaceOrView()


def is_dispatched_plainly(tensor: torch.Tensor) -> bool:
    """Whether nothing stands between a call and the device: no mode, no transform, no bits of a view to be applied."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or in_transform()
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._is_zerotensor()
    )


def is_replaced(name: str, key: str) -> bool:
    """Whether a Python function is the kernel of `aten.<name>` for a dispatch key. 2.13, since 2.0."""
    return f"aten/{name}/{key}" in torch.library._impls


def remove_kernels(library: torch.library.Library) -> None:
    """Torch's own kernels are back. 2.13, since 2.0.

    No other thread may be running one of the operators: the dispatcher frees what it is about to call.
    """
    library._destroy()  # type: ignore[no-untyped-call]
    library._op_impls.clear()  # when it is collected it would take somebody's next kernels off the list of them


def pass_through(key: str) -> torch.library.Library:
    """Every operator that has no kernel for `key` goes on to the next key. 2.13, since 2.3."""
    library = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    library.fallback(torch.library.fallthrough_kernel, key)  # type: ignore[no-untyped-call]
    return library


def without_autocast() -> contextlib.AbstractContextManager[Any]:
    """Autocast for that device is past in this block, as in a kernel that has cast its arguments. 2.13, since 2.0."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


def attention_allowed(kernel: str) -> bool:
    """Whether a kernel of attention is switched on: "cudnn", "flash", "efficient". 2.13, since 2.5."""
    ask = {
        "cudnn": torch._C._get_cudnn_sdp_enabled,
        "flash": torch._C._get_flash_sdp_enabled,
        "efficient": torch._C._get_mem_efficient_sdp_enabled,
    }
    return bool(ask[kernel]())
