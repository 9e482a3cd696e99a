"""Gradients written over the gradients that they are computed from, where nobody needs those any longer.

A node of autograd is given a gradient, gives another one of the same size, and lets go of the first when it is done. So
for a moment both are there, beside what the node has saved: at a loss over a large vocabulary, three times the logits
instead of twice. While this is in force, kernels of ours stand before torch's for some operators of backward. Such a
kernel lets torch's write its result over the incoming gradient, if

- autograd's own node calls it, whose formula looks at the gradient once (`Operator.node`);
- nothing else refers to the gradient, nor to its memory. References are counted, of Python and of C++, and have to be
  as many as in a call that was tried out when there were no others (`_tried`);
- the memory is torch's own, all of it is the gradient's, and no other process has it;
- the result is as large as the gradient and laid out like it.

In all other cases, as where a graph of gradients is made, torch's kernel runs as ever. The arithmetic is the same, so
are the bits; the audit compares them all the same.

Our kernels stay where they are once they are put there, for the dispatcher frees one that is taken off although another
thread may be about to call it. While nothing is in force they call torch's at once.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from lowtide import _torch
from lowtide._removable import Removable
from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from torch.autograd.graph import Node

aten = torch.ops.aten

MIN_BYTES: Final = 4096
"""Smaller gradients have memory of their own as ever."""
DEVICES: Final = frozenset({"cpu", "cuda"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator of backward whose result may be written over the gradient that it is given."""

    name: str
    """In the namespace `aten`."""
    node: str
    """The node of autograd that calls it, once, and uses the gradient for nothing else (torch's derivatives.yaml)."""
    write: Callable[..., Any]
    """As the operator, with torch's kernel before its arguments: writes over the gradient and gives what it gives."""
    forward: Callable[[Tensor], Tensor]
    """Leads to such a node, for [2, 8, 4, 4]."""
    like: int = 1
    """Which argument the result is laid out like."""
    groups: Callable[..., int] | None = None
    """For what is done in pieces, which takes some more time: of how many groups of channels, given the arguments."""

    @property
    def piecewise(self) -> bool:
        return self.groups is not None


def _written(name: str, node: str, forward: Callable[[Tensor], Tensor], *, out: str = "grad_input", **more: Any) -> Any:
    """An operator that can be told where to write its result."""
    overload = getattr(getattr(aten, name), "out" if name.endswith("_data") else "grad_input")

    def write(own: Any, gradient: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        overload(gradient, *args, **kwargs, **{out: gradient})
        return _anew(gradient)

    return Operator(name=name, node=node, write=write, forward=forward, **more)


def _anew(gradient: Tensor) -> Tensor:
    """A tensor of its own with the memory of the gradient, to which none of what clings to that clings."""
    return gradient.detach()


def _pieces(gradient: Tensor, n_groups: int) -> list[slice]:
    """Slices of the groups of channels, each a sixteenth of the tensor where that leaves the sums as they are.

    Where channels lie side by side, a processor adds up as many of them at once as one of its vectors holds.
    """
    step = -(-n_groups // 16)
    if gradient.stride(1) == 1:
        vector_bytes = 64 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 32
        lanes = vector_bytes // gradient.element_size()
        step = -(-step // lanes) * lanes
    starts = list(range(0, n_groups, step))
    if len(starts) > 1 and gradient.stride(1) == 1 and n_groups - starts[-1] == 1:
        del starts[-1]  # a single channel is laid out in both ways, and would be added up as in the other one
    return [slice(*ends) for ends in itertools.pairwise([*starts, n_groups])]


def _has_pieces(args: Sequence[Any], groups: int) -> bool:
    """Whether it can be done in pieces that take less than the whole: each is there three times.

    The last argument says what is asked for; the gradient itself is not where nothing upstream is trained.
    """
    return args[-1][0] and _form(args[0]) is not None and len(_pieces(args[0], groups)) > 3


def _write_batch_norm(own: Any, gradient: Tensor, saved: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    """`native_batch_norm_backward`: channels have nothing to do with each other."""
    by_channel, rest = args[:5], args[5:]  # weight, running mean and variance, mean and deviation of this batch
    parts: list[tuple[Tensor | None, ...]] = []
    for channels in _pieces(gradient, gradient.shape[1]):
        theirs = (None if t is None or not t.numel() else t[channels] for t in by_channel)
        result, *others = own(_copy(gradient, channels), _copy(saved, channels), *theirs, *rest)
        gradient[:, channels] = result
        parts.append(tuple(others))
    return _anew(gradient), *map(_joined, zip(*parts, strict=True))


def _write_group_norm(
    own: Any,
    gradient: Tensor,
    saved: Tensor,
    mean: Tensor,
    deviation: Tensor,
    weight: Tensor | None,
    rows: int,
    channels: int,
    pixels: int,
    groups: int,
    mask: list[bool],
) -> tuple[Tensor | None, ...]:
    """`native_group_norm_backward`: groups of channels have nothing to do with each other."""
    width = channels // groups
    parts: list[tuple[Tensor | None, ...]] = []
    for some in _pieces(gradient, groups):
        theirs = slice(some.start * width, some.stop * width)
        n = some.stop - some.start
        result, *others = own(
            _copy(gradient, theirs),
            _copy(saved, theirs),
            mean.view(rows, groups)[:, some].contiguous(),
            deviation.view(rows, groups)[:, some].contiguous(),
            None if weight is None else weight[theirs],
            *(rows, n * width, pixels, n, mask),
        )
        gradient[:, theirs] = result
        parts.append(tuple(others))
    return _anew(gradient), *map(_joined, zip(*parts, strict=True))


def _copy(tensor: Tensor, channels: slice) -> Tensor:
    form = _form(tensor)
    assert form is not None
    return tensor[:, channels].contiguous(memory_format=form)


def _form(tensor: Tensor) -> torch.memory_format | None:
    """How a tensor is laid out, if it is so in one of the usual ways."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    forms = (form for form in (torch.contiguous_format, last) if form is not None)
    return next((form for form in forms if tensor.is_contiguous(memory_format=form)), None)


def _joined(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


def _normed(x: Tensor) -> Tensor:
    return functional.batch_norm(x, None, None, training=True)


OPERATORS: Final = {
    operator.node: operator
    for operator in (
        _written(
            "_log_softmax_backward_data", "LogSoftmaxBackward0", lambda x: functional.log_softmax(x, -1), out="out"
        ),
        _written("_softmax_backward_data", "SoftmaxBackward0", lambda x: functional.softmax(x, -1)),
        _written("_softmax_backward_data", "SafeSoftmaxBackward0", lambda x: torch.ops.aten._safe_softmax(x, -1)),
        _written("gelu_backward", "GeluBackward0", functional.gelu),
        _written("silu_backward", "SiluBackward0", functional.silu),
        _written("threshold_backward", "ReluBackward0", functional.relu),
        _written("tanh_backward", "TanhBackward0", torch.tanh),
        _written("sigmoid_backward", "SigmoidBackward0", torch.sigmoid),
        _written("leaky_relu_backward", "LeakyReluBackward0", functional.leaky_relu),
        _written("elu_backward", "EluBackward0", functional.elu, like=5),
        _written("hardtanh_backward", "HardtanhBackward0", functional.hardtanh),
        _written("hardsigmoid_backward", "HardsigmoidBackward0", functional.hardsigmoid),
        _written("softplus_backward", "SoftplusBackward0", functional.softplus),
        Operator(
            name="native_batch_norm_backward",
            node="NativeBatchNormBackward0",
            write=_write_batch_norm,
            forward=_normed,
            groups=lambda gradient, *_: gradient.shape[1],
        ),
        Operator(
            name="native_group_norm_backward",
            node="NativeGroupNormBackward0",
            write=_write_group_norm,
            forward=lambda x: functional.group_norm(x, 4),
            groups=lambda *args: args[8],
        ),
    )
}
"""By the name of the node."""


# --- in force --------------------------------------------------------------------------------------------------------


class InPlace(Removable):
    """While it is in force gradients are written over others: all that any of those in force wants.

    It is until `remove`, or until nobody refers to it.
    """

    def __init__(self, device: str, told: Callable[[str, int], None] | None = None, *, alone: bool = False) -> None:
        """`device` is its type. `told` is called with the node and the bytes each time before it is done. What was put
        in force before has no say if this is to be `alone`.
        """
        self.device = device
        self.alone = alone
        self.least: Mapping[str, int] = {}
        """For each node from how many bytes on; none others."""
        self._told = told
        available(device)
        _IN_FORCE.append(weakref.ref(self, _IN_FORCE.remove))

    def wants(self, node: str, n_bytes: int) -> bool:
        """Whether the gradient of that many bytes that comes to such a node is written over."""
        return node in self.least and n_bytes >= self.least[node]

    def run(self, operator: Operator, own: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """What the operator gives, written over its first argument. `own` is torch's kernel."""
        if self._told is not None:
            self._told(operator.node, args[0].numel() * args[0].element_size())
        return operator.write(own, *args, **kwargs)

    def remove(self) -> None:
        """It wants nothing any more. May be called again."""
        _IN_FORCE[:] = [other for other in _IN_FORCE if other() not in (None, self)]


_IN_FORCE: list[weakref.ref[InPlace]] = []
"""A model that is dropped with its plan is not to stay because of it."""


def check(device: str, nodes: Iterable[str]) -> None:
    """Raise LowtideError if these nodes' gradients can't be written in place on that type of device."""
    missing = sorted(set(nodes) - set(available(device)))
    if missing and device in DEVICES:
        raise LowtideError(
            f"the plan writes gradients of {', '.join(missing)} in place, which can't be done here: somebody else's "
            "kernels stand before torch's. Rehearse and plan again, or do without them."
        )


def wanting(node: str, n_bytes: int) -> InPlace | None:
    """Of what is in force the last that has such a gradient written over."""
    for reference in _IN_FORCE[::-1] if n_bytes >= MIN_BYTES else ():
        if (found := reference()) is not None and found.wants(node, n_bytes):
            return found
        if found is not None and found.alone:
            break
    return None


def wanted_from(operator: Any, args: Sequence[Any]) -> bool:
    """Whether the operator is called by a node of autograd, and something is in force that has its gradient written
    over, if nobody else has it.
    """
    node = _torch.running_node_name()
    if node not in OPERATORS or operator.name().partition(".")[0] != f"aten::{OPERATORS[node].name}":
        return False
    return wanting(node, args[0].numel() * args[0].element_size()) is not None and _writable(OPERATORS[node], args)


def _kernel(name: str, device: str) -> Callable[..., Any]:
    """What stands before torch's kernel."""

    def kernel(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The last of them is for `references`, and none of them is to have a variable.
        trial = _trial
        if trial is not None and _torch.running_node() is trial.node:
            trial.found.append(_torch.references(args))
        elif (found := _ruling(name, device, args)) is not None:
            ruling, operator = found
            return ruling.run(operator, own, args[:-1], kwargs)
        return own(*args[:-1], **kwargs)

    return kernel


def _ruling(name: str, device: str, args: tuple[Any, ...]) -> tuple[InPlace, Operator] | None:
    """What is in force, and as what, if it wants the first of the arguments to be written over and that can be done."""
    if not _IN_FORCE or args[0].numel() * args[0].element_size() < MIN_BYTES:
        return None
    node = _torch.running_node_name()
    if node not in OPERATORS or OPERATORS[node].name != name:
        return None
    found, operator = wanting(node, args[0].numel() * args[0].element_size()), OPERATORS[node]
    if found is None or _torch.references(args) != _COUNTS.get(device, {}).get(node):
        return None
    return (found, operator) if _writable(operator, args[:-1]) else None


def _writable(operator: Operator, args: Sequence[Any]) -> bool:
    """Whether the result is laid out as the gradient is, without gaps and no element twice, and makes no graph; and the
    memory is nobody else's.
    """
    gradient, saved = args[0], args[operator.like]
    if not _torch.is_plain(gradient):
        return False
    storage = gradient.untyped_storage()
    return (
        storage.nbytes() == gradient.numel() * gradient.element_size()
        and storage.resizable()  # else NumPy or a file has the memory
        and not (gradient.device.type == "cpu" and storage.is_shared())
        and not (gradient.requires_grad or gradient.is_inference())
        and not torch.is_grad_enabled()
        and not _torch.in_forward_mode()
        and all(each == gradient.dtype for each in (saved.dtype, *args) if isinstance(each, torch.dtype))
        and gradient.shape == saved.shape
        and gradient.stride() == saved.stride()
        and (_is_dense(gradient) if operator.groups is None else _has_pieces(args, operator.groups(*args)))
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side, in any order of the dimensions."""
    steps = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in steps:
        if stride != expected:
            return False
        expected *= size
    return True


# --- what is possible here -------------------------------------------------------------------------------------------


_LOCK: Final = threading.RLock()
_LIBRARIES: dict[tuple[str, str], torch.library.Library] = {}
"""By the type of device and the operator's name, our kernels."""
_COUNTS: dict[str, Mapping[str, tuple[int, ...]]] = {}
"""By the type of device and the node, how many references there are when there are no others."""


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    """A node of ours that is being tried out, and how many references its operator was given."""

    node: Node
    found: list[tuple[int, ...]] = field(default_factory=list)


_trial: _Trial | None = None


def available(device: str) -> Mapping[str, tuple[int, ...]]:
    """The nodes that can be done so on that type of device with this torch, and how many references they are given.

    Each is tried out, once in a process: whether its kernel is called from that node, and told apart from a call in
    which somebody else refers to the gradient. On another kind of device, as where a step is foreseen, there are none.
    """
    if device not in DEVICES:
        return {}
    with _LOCK:
        if device not in _COUNTS:
            _put_before(device)
            found = {}
            with _torch.without_modes(), torch.autocast(device, enabled=False), torch.enable_grad():
                for operator in OPERATORS.values():
                    alone, shared = (_tried(operator, device, shared=shared) for shared in (False, True))
                    if alone is not None and shared is not None and alone != shared:
                        found[operator.node] = alone
            _COUNTS[device] = found
        return _COUNTS[device]


def _put_before(device: str) -> None:
    """Our kernels stand before torch's, unless somebody else's are there."""
    for name in sorted({operator.name for operator in OPERATORS.values()}):
        if (device, name) not in _LIBRARIES:
            with contextlib.suppress(RuntimeError):
                kernels = {f"aten::{name}": _kernel(name, device)}
                _LIBRARIES[device, name] = _torch.put_before(kernels, device.upper())


def _tried(operator: Operator, device: str, *, shared: bool) -> tuple[int, ...] | None:
    """How many references there are when the operator is called, with or without somebody else's; None if it is not."""
    global _trial
    x = torch.ones(2, 8, 4, 4, device=device, requires_grad=True)
    y = operator.forward(x)
    if y.grad_fn is None or y.grad_fn.name() != operator.node:
        return None
    trial = _trial = _Trial(y.grad_fn)
    try:
        torch.autograd.grad((y * 2).sum(), [x, y] if shared else [x])
    finally:
        _trial = None
    return trial.found[0] if len(trial.found) == 1 else None
