"""Gradients written over the gradients that they are computed from, once those are no longer needed.

A node of autograd receives a gradient, returns another one of the same size, and releases the first when it is done. So
for a moment both exist, in addition to the node's saved tensors: at a loss over a large vocabulary, three times the
logits instead of twice. While an `InPlacePermission` is in force, kernels of Lowtide run before torch's for some
operators of backward. Such a kernel lets torch's write its result over the incoming gradient, if

- the caller is autograd's own node, whose formula reads the gradient once (`Operator.node`);
- nothing else refers to the gradient, nor to its memory. References of Python and of C++ are counted, and must be as
  many as in a trial call without other references (`_count_alone`). A gradient that went through a view of the node's
  output, as in `log_softmax(x, -1).view(-1, n)`, is a view itself, whose base must be free of other references too;
- torch owns the memory, all of it belongs to the gradient, and no other process shares it;
- the result has the size and layout of the gradient.

In all other cases, such as when a graph of gradients is recorded, torch's kernel runs unchanged. The arithmetic is the
same, and so are the bits; the audit still compares them.

Lowtide's kernels are registered while something in force asks for them. They are removed only while no backward pass
that may call them is in progress, because the dispatcher frees a removed kernel even if another thread is about to call
it. Until then, a kernel that is no longer asked for only calls torch's.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from lowtide._torch.backward import ENGINE, get_running_node, get_running_node_name, in_backward, in_forward_mode
from lowtide._torch.compiled_code import never_compiled, not_compiled_alone
from lowtide._torch.fake_modes import without_modes
from lowtide._torch.nodes import node_metadata
from lowtide._torch.patching import replace_function
from lowtide._torch.privateuse1 import (
    OverrideKernel,
    below_autograd,
    is_dispatched_plainly,
    is_replaced,
    with_overrides,
)
from lowtide._torch.pytree import tree_leaves
from lowtide._torch.tensors import is_plain, references
from lowtide.errors import LowtideError
from lowtide.runtime.inplace_kernels import OPERATORS, Operator, has_pieces
from lowtide.runtime.saved_values import native
from lowtide.utils.removable import Removable

if TYPE_CHECKING:
    from torch.autograd.graph import Node

MIN_BYTES: Final = 4096
"""Smallest gradient that is written in place; smaller ones get their own memory, as without a plan."""
DEVICES: Final = frozenset({"cpu", "cuda"})


# --- in force --------------------------------------------------------------------------------------------------------


class InPlacePermission(Removable):
    """Permission, while in force, to write gradients over the gradients that they are computed from.

    The permission is in force until `remove`, or until it is garbage collected.
    """

    def __init__(self, device: str, on_write: Callable[[str, int], None] | None = None, *, alone: bool = False) -> None:
        """Put the permission in force on the device type `device`.

        `on_write` is called before each write over a gradient, with the node's name and the gradient's bytes. With
        `alone`, permissions that were put in force earlier are ignored.
        """
        self.device = device
        self.alone = alone
        self.least: Mapping[str, int] = {}
        """Smallest size in bytes of a gradient that is written over, by node; gradients of other nodes never are."""
        self._on_write = on_write
        self._is_for_all = False
        self._n_running = 0
        self._graphs: list[weakref.ref[_Graph]] = []
        """Graphs of the model's runs that await their backward, from the first run to the last."""
        self._unseen: list[_Graph] = []
        """Graphs of runs whose outputs have no `grad_fn`, held here because no node refers to them."""
        self._has_written = False
        _IN_FORCE.append(weakref.ref(self, _IN_FORCE.remove))

    def wants(self, node: str, n_bytes: int) -> bool:
        """Return True if the permission covers a gradient of `n_bytes` that arrives at a node named `node`."""
        return node in self.least and n_bytes >= self.least[node]

    def of_all(self, least: Mapping[str, int]) -> None:
        """Allow writes in each later backward pass of any model.

        `least` maps the names of autograd nodes to the size in bytes of the smallest gradient that is written over.
        """
        self.least, self._is_for_all = least, True
        _register_wanted()
        if least:
            available(self.device)
            _wrap_engine()

    @contextlib.contextmanager
    def of_run(self, least: Mapping[str, int]) -> Iterator[list[Any]]:
        """Allow writes in the backward pass of one run of a model. The block runs the model, and appends its output to
        the yielded list.

        `least` maps the names of autograd nodes to the size in bytes of the smallest gradient that is written over.
        """
        if least is not self.least:
            self.least = least
            _register_wanted()
        outputs: list[Any] = []
        if not least:
            yield outputs
            return
        self._n_running += 1  # the run may call backward itself
        _wrap_engine()
        try:
            yield outputs
        finally:
            self._n_running -= 1
        graph = _Graph()
        nodes = [t.grad_fn for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.grad_fn is not None]
        for node in nodes:
            node_metadata(node).setdefault(_Graph, []).append(graph)
        if not nodes:
            self._unseen.append(graph)
        self._graphs.append(weakref.ref(graph))
        _wrap_engine()

    @property
    def is_awaiting(self) -> bool:
        """Return True if this permission allows a backward pass that begins now to write gradients in place."""
        self._graphs = [graph for graph in self._graphs if graph() is not None]
        return bool(self.least) and bool(self._is_for_all or self._n_running or self._graphs)

    def end_backward(self, roots: Iterable[Any]) -> None:
        """Record the end of a backward pass from the tensors `roots` that has not retained its graph."""
        if not self._has_written or self._n_running:
            return
        self._has_written = False
        passed = _find_graphs_behind(roots) if len(self._graphs) > 1 else []
        if passed:
            self._graphs = [graph for graph in self._graphs if graph() not in passed]
        else:
            del self._graphs[:1], self._unseen[:1]

    def run(self, operator: Operator, own: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a backward operator with its result written over its first argument, the gradient; return the result.

        `own` is torch's kernel of the operator.
        """
        self._has_written = True
        if self._on_write is not None:
            self._on_write(operator.node, args[0].numel() * args[0].element_size())
        return operator.write(own, *args, **kwargs)

    def remove(self) -> None:
        """Withdraw this permission. Repeated calls do nothing."""
        _IN_FORCE[:] = [other for other in _IN_FORCE if other() not in (None, self)]
        _register_wanted()


_IN_FORCE: list[weakref.ref[InPlacePermission]] = []
"""Permissions in force, by weak references, so that a dropped model is freed with its plan."""

_kernels: dict[str, OverrideKernel] = {}
"""Lowtide's registered kernels, by operator."""
_n_passes = 0
"""Number of backward passes in progress that may call Lowtide's kernels."""


def _register_wanted(tried: Iterable[str] = ()) -> None:
    """Register the kernels that the permissions in force ask for, and those of the operators in `tried`; remove all
    other kernels unless a backward pass may call them.

    A kernel is registered for gradients as large as the smallest that a permission covers, or larger; for an operator
    in `tried`, any gradient will do. torch finds the kernels only in a backward pass that a permission awaits. There, a
    call takes some 20 us; with compiled hooks, a call for a smaller gradient takes 1 us.
    """
    with _LOCK:
        wanted = dict.fromkeys(tried, 0)
        for reference in _IN_FORCE:
            permission = reference()
            for node, least in () if permission is None else permission.least.items():
                if node in OPERATORS:
                    name, least_bytes = OPERATORS[node].name, max(least, MIN_BYTES)
                    wanted[name] = min(least_bytes, wanted.get(name, least_bytes))
        for name, least in wanted.items():
            if name in _kernels:
                _kernels[name].let_pass(least)
            else:
                _kernels[name] = OverrideKernel(
                    name, _make_kernel(name), least, None if native is None else native.Gate
                )
        for name in _kernels.keys() - wanted.keys() if not _n_passes else ():
            _kernels.pop(name).remove()


class _Graph:
    """Marker in the metadata of a graph's output nodes: it is alive as long as the graph is."""

    __slots__ = ("__weakref__",)


_MOST_NODES: Final = 1000
"""Largest number of nodes, between a loss and the outputs of the model, that `_find_graphs_behind` visits."""


def _find_graphs_behind(roots: Iterable[Any]) -> list[_Graph]:
    """Return the graphs of those runs of models from whose outputs the tensors `roots` were computed.

    The search visits at most `_MOST_NODES` nodes.
    """
    graphs: list[_Graph] = []
    visited: set[Node] = set()
    pending = [tensor.grad_fn for tensor in roots if isinstance(tensor, Tensor)]
    while pending and len(visited) < _MOST_NODES:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if of_node := node_metadata(node).get(_Graph):
            graphs += of_node
        else:
            pending += [further for further, _ in node.next_functions]
    return graphs


_unwrap_engine: Callable[[], None] | None = None


def _wrap_engine() -> None:
    """Wrap the function that begins a backward pass, to check if gradients may be written in place in that pass.

    A backward pass in which gradients may not be written in place removes the wrapper, so that training without a plan
    does not run it.
    """
    global _unwrap_engine
    with _LOCK:
        if _unwrap_engine is None:
            _unwrap_engine = replace_function(
                torch.autograd, ENGINE, functools.partial(functools.partial, _run_backward)
            )


@not_compiled_alone
def _run_backward(
    run: Callable[..., Any], tensors: Any, gradients: Any, keep_graph: bool, *args: Any, **kwargs: Any
) -> Any:
    if not (permissions := _find_awaiting_permissions()):
        return run(tensors, gradients, keep_graph, *args, **kwargs)
    _enter_backward()
    try:
        with with_overrides():
            return run(tensors, gradients, keep_graph, *args, **kwargs)
    finally:
        _leave_backward(permissions, () if keep_graph else tensors)


@never_compiled
def _find_awaiting_permissions() -> list[InPlacePermission]:
    """Return the permissions that apply to a backward pass that begins now; none inside another backward pass.

    If no permission applies, the wrapper of `_wrap_engine` is removed.
    """
    global _unwrap_engine
    if in_backward():
        return []
    permissions = [
        permission for reference in _IN_FORCE if (permission := reference()) is not None and permission.is_awaiting
    ]
    with _LOCK:
        if not permissions and _unwrap_engine is not None:
            _unwrap_engine()
            _unwrap_engine = None
    return permissions


@never_compiled
def _enter_backward() -> None:
    global _n_passes
    with _LOCK:
        _n_passes += 1


@never_compiled
def _leave_backward(permissions: list[InPlacePermission], roots: Sequence[Any]) -> None:
    global _n_passes
    with _LOCK:
        _n_passes -= 1
    for permission in permissions if roots else ():
        permission.end_backward(roots)
    _find_awaiting_permissions()


def check_writable(device: str, nodes: Iterable[str]) -> None:
    """Raise LowtideError if these nodes' gradients can't be written in place on that type of device."""
    missing = sorted(set(nodes) - set(available(device)))
    if missing and device in DEVICES:
        raise LowtideError(
            f"the plan writes gradients of {', '.join(missing)} in place, which can't be done here: kernels of "
            "another library replace torch's. Rehearse and plan again; with in_place=False no plan writes in place."
        )


def find_permission(node: str, n_bytes: int) -> InPlacePermission | None:
    """Return the latest permission in force to write over a gradient of `n_bytes` that arrives at `node`; None if there
    is none.
    """
    for reference in _IN_FORCE[::-1] if n_bytes >= MIN_BYTES else ():
        if (permission := reference()) is not None and permission.wants(node, n_bytes):
            return permission
        if permission is not None and permission.alone:
            break
    return None


def wanted_from(operator: Any, args: Sequence[Any]) -> bool:
    """Return True if the running autograd node calls `operator`, and its result may be written over `args[0]`.

    `args[0]` is the incoming gradient.
    """
    node = get_running_node_name()
    if node not in OPERATORS or operator.name().partition(".")[0] != f"aten::{OPERATORS[node].name}":
        return False
    n_bytes = args[0].numel() * args[0].element_size()
    return find_permission(node, n_bytes) is not None and _has_writable_gradient(OPERATORS[node], args)


def _make_kernel(name: str) -> Callable[..., Any]:
    """Make the kernel that runs before torch's kernel of the operator `name`.

    It writes the result over the incoming gradient if that is allowed and possible, and otherwise calls torch's kernel.
    """

    def kernel(on: Callable[..., Any], past: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The last argument is for `references`. No argument may be bound to a variable, which would be a reference.
        trial = _trial
        if trial is not None and get_running_node() is trial.node:
            trial.counts.append(references(args))
        elif (allowed := _find_permission_to_write(name, args)) is not None:
            permission, operator = allowed
            with below_autograd():
                return permission.run(operator, past, args[:-1], kwargs)
        return on(*args[:-1], **kwargs)

    return kernel


def _find_permission_to_write(name: str, args: tuple[Any, ...]) -> tuple[InPlacePermission, Operator] | None:
    """Return the permission and the operator if the result may be written over the gradient `args[0]`; else None."""
    if not _IN_FORCE:
        return None
    node = get_running_node_name()
    if node not in OPERATORS or OPERATORS[node].name != name:
        return None
    permission, operator = find_permission(node, args[0].numel() * args[0].element_size()), OPERATORS[node]
    device = args[0].device.type
    if permission is None or not is_dispatched_plainly(args[0]) or not is_plain(args[0]):
        return None  # tensors of torch.func's transforms, and sparse ones, have no storage to inspect
    if references(args) not in _COUNTS.get(device, {}).get(node, ()) or is_replaced(name, device.upper()):
        return None
    return (permission, operator) if _has_writable_gradient(operator, args[:-1]) else None


def _has_writable_gradient(operator: Operator, args: Sequence[Any]) -> bool:
    """Return True if the gradient `args[0]` has the properties that an operator needs to write its result over it.

    It must have the result's dtype and layout, without gaps or overlaps, and all of its storage. No graph of gradients
    may be recorded. References to the gradient are not checked here.
    """
    gradient, saved = args[0], args[operator.like]
    if not all(is_plain(each) for each in args if isinstance(each, Tensor)):
        return False
    storage = gradient.untyped_storage()
    return (
        storage.nbytes() == gradient.numel() * gradient.element_size()
        and storage.resizable()  # otherwise NumPy or a file owns the memory
        and not (gradient.device.type == "cpu" and storage.is_shared())
        and not (gradient.requires_grad or gradient.is_inference())
        and not torch.is_grad_enabled()
        and not in_forward_mode()
        and all(each == gradient.dtype for each in (saved.dtype, *args) if isinstance(each, torch.dtype))
        and gradient.shape == saved.shape
        and gradient.stride() == saved.stride()
        and (_is_dense(gradient) if operator.groups is None else has_pieces(args, operator.groups(*args)))
    )


def _is_dense(tensor: Tensor) -> bool:
    """Return True if the elements are adjacent, in any order of the dimensions."""
    steps = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in steps:
        if stride != expected:
            return False
        expected *= size
    return True


# --- what is possible here -------------------------------------------------------------------------------------------


_LOCK: Final = threading.RLock()
_COUNTS: dict[str, Mapping[str, frozenset[tuple[int, ...]]]] = {}
"""By device type and node, the reference counts of a gradient that nothing else holds: an ordinary one, and a view."""


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    """Node of a trial backward, and the reference counts of the gradient in each call of the node's operator."""

    node: Node
    counts: list[tuple[int, ...]] = field(default_factory=list)


_trial: _Trial | None = None


def available(device: str) -> Mapping[str, frozenset[tuple[int, ...]]]:
    """Return the names of the nodes that can write in place on this device type with this version of torch.

    Each name is mapped to the reference counts (`references`) of a gradient to which nothing else refers: of an
    ordinary one, and of one that is a view. Each node is tried once per process: it must call its kernel, and the
    counts must differ if other code refers to the gradient. Device types other than those in `DEVICES`, as in an
    estimated step, have no such nodes.
    """
    if device not in DEVICES:
        return {}
    with _LOCK:
        if device not in _COUNTS:
            counts = {}
            _register_wanted(tried=[operator.name for operator in OPERATORS.values()])
            with (
                without_modes(),
                with_overrides(),
                torch.autocast(device, enabled=False),
                torch.enable_grad(),
            ):
                for operator in OPERATORS.values():
                    # the kernel belongs to other code, which has precedence
                    if is_replaced(operator.name, device.upper()):
                        continue
                    if alone := _count_alone(operator, device):
                        counts[operator.node] = alone
            _COUNTS[device] = counts
            _register_wanted()
        return _COUNTS[device]


def _count_alone(operator: Operator, device: str) -> frozenset[tuple[int, ...]]:
    """Count the references to a gradient that only the operator's node holds: an ordinary one, and one that is a view.

    Counts that are the same if other code refers to the gradient, or to the view's base, are left out.
    """
    counts = set()
    for viewed, holders in ((False, "y"), (True, "yz")):
        alone, *shared = (_count_in_trial(operator, device, viewed=viewed, held=held) for held in ("", *holders))
        if alone is not None and not {None, alone} & {*shared}:
            counts.add(alone)
    return frozenset(counts)


def _count_in_trial(operator: Operator, device: str, *, viewed: bool, held: str) -> tuple[int, ...] | None:
    """Run a small backward pass, and count the references to the incoming gradient when the node calls its operator.

    The gradient is that of the forward output `y`. If `viewed`, `y` is used only through a view `z`, so that the
    gradient is a view of the gradient of `z`. Other code refers to the gradients named by `held`: "y", "z" or none.
    Returns None if the node does not call the operator exactly once.
    """
    global _trial
    # float64 on a CPU, because the kernels that oneDNN compiles for float32 would stay in memory
    dtype = torch.float64 if device == "cpu" else torch.float32
    x = torch.ones(2, 8, 4, 4, device=device, dtype=dtype, requires_grad=True)
    y = operator.forward(x)
    if y.grad_fn is None or y.grad_fn.name() != operator.node:
        return None
    trial = _trial = _Trial(y.grad_fn)
    try:
        z = y.view(2, -1) if viewed else y
        torch.autograd.grad((z * 2).sum(), [x, *({"y": y, "z": z}[name] for name in held)])
    finally:
        _trial = None
    return trial.counts[0] if len(trial.counts) == 1 else None
