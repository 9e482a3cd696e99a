"""Gradients written over the gradients that they are computed from, where nobody needs those any longer.

A node of autograd is given a gradient, gives another one of the same size, and lets go of the first when it is done. So
for a moment both are there, beside what the node has saved: at a loss over a large vocabulary, three times the logits
instead of twice. While this is in force, kernels of ours stand before torch's for some operators of backward. Such a
kernel lets torch's write its result over the incoming gradient, if

- autograd's own node calls it, whose formula looks at the gradient once (`Operator.node`);
- nothing else refers to the gradient, nor to its memory. References are counted, of Python and of C++, and have to be
  as many as in a call that was tried out when there were no others (`_calibrated`);
- the result is as large as the gradient and laid out like it.

In all other cases, as where a graph of gradients is made, torch's kernel runs as ever. The arithmetic is the same, so
are the bits; the audit compares them all the same.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from lowtide import _torch
from lowtide._removable import Removable
from lowtide.errors import LowtideError

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
        result: Tensor = overload(gradient, *args, **kwargs, **{out: gradient})
        return result

    return Operator(name=name, node=node, write=write, forward=forward, **more)


def _pieces(gradient: Tensor, n_groups: int) -> list[slice]:
    """Slices of the groups of channels, each a sixteenth of the tensor where that leaves the sums as they are.

    Where channels lie side by side, a processor adds up as many of them at once as one of its vectors holds.
    """
    step = -(-n_groups // 16)
    if gradient.stride(1) == 1:
        vector_bytes = 64 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 32
        lanes = vector_bytes // gradient.element_size()
        step = -(-step // lanes) * lanes
    return [slice(first, min(first + step, n_groups)) for first in range(0, n_groups, step)]


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
    return gradient, *map(_joined, zip(*parts, strict=True))


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
    return gradient, *map(_joined, zip(*parts, strict=True))


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
    """While it is in force gradients are written over others; where several are, the last one rules.

    It is until `remove`, or until nobody refers to it.
    """

    def __init__(self, device: str, told: Callable[[str, int], None] | None = None) -> None:
        """`device` is its type. `told` is called with the node and the bytes each time before it is done."""
        self.device = device
        self.least: Mapping[str, int] = {}
        """For each node from how many bytes on; none others."""
        self._told = told
        _put_before(device)
        _IN_FORCE.append(weakref.ref(self))

    def wants(self, node: str, n_bytes: int) -> bool:
        """Whether the gradient of that many bytes that comes to such a node is written over."""
        return node in self.least and n_bytes >= self.least[node]

    def run(self, operator: Operator, own: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """What the operator gives, written over its first argument. `own` is torch's kernel."""
        if self._told is not None:
            self._told(operator.node, args[0].numel() * args[0].element_size())
        return operator.write(own, *args, **kwargs)

    def remove(self) -> None:
        """Gradients have memory of their own again. May be called again."""
        _IN_FORCE[:] = [other for other in _IN_FORCE if other() not in (None, self)]
        devices = {other.device for reference in _IN_FORCE if (other := reference()) is not None}
        for device in _LIBRARIES.keys() - devices:
            _torch.remove_kernels(_LIBRARIES.pop(device))


_IN_FORCE: list[weakref.ref[InPlace]] = []
"""A model that is dropped with its plan is not to stay because of it."""
_LIBRARIES: dict[str, torch.library.Library] = {}
"""By the type of device, our kernels."""


def check(device: str, nodes: Iterable[str]) -> None:
    """Raise LowtideError if these nodes' gradients can't be written in place on that type of device."""
    missing = sorted(set(nodes) - set(available(device)))
    if missing and device in DEVICES:
        raise LowtideError(
            f"the plan writes gradients of {', '.join(missing)} in place, which can't be done here: somebody else's "
            "kernels stand before torch's. Rehearse and plan again, or do without them."
        )


def wanting(node: str, n_bytes: int) -> InPlace | None:
    """What is in force, if it has such a gradient written over."""
    if n_bytes < MIN_BYTES:
        return None
    ruling = next((found for reference in reversed(_IN_FORCE) if (found := reference()) is not None), None)
    return ruling if ruling is not None and ruling.wants(node, n_bytes) else None


def wanted_from(operator: Any, args: Sequence[Any]) -> bool:
    """Whether the operator is called by a node of autograd, and something is in force that has its gradient written
    over, if nobody else has it.
    """
    node = _torch.running_node_name()
    if node not in OPERATORS or operator.name().partition(".")[0] != f"aten::{OPERATORS[node].name}":
        return False
    return wanting(node, args[0].numel() * args[0].element_size()) is not None and _writable(OPERATORS[node], args)


def _put_before(device: str) -> None:
    """Our kernels stand before torch's. On another kind of device, as where a step is foreseen, there are none."""
    if device in _LIBRARIES or device not in DEVICES:
        return
    try:
        _LIBRARIES[device] = _torch.put_before(_kernels(device), device.upper())
    except RuntimeError:  # somebody else has put kernels there since we looked
        available.cache_clear()
        _LIBRARIES[device] = _torch.put_before(_kernels(device), device.upper())


def _kernels(device: str) -> dict[str, Callable[..., Any]]:
    """By operator what stands before torch's kernel."""
    names = {OPERATORS[node].name for node in available(device)}
    return {f"aten::{name}": _kernel(name, available(device)) for name in sorted(names)}


def _kernel(name: str, counts: Mapping[str, tuple[int, ...]]) -> Callable[..., Any]:
    """What stands before torch's kernel. By node, how many references there are when there are no others."""

    def kernel(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        node = _torch.running_node_name()
        if (
            node in counts
            and OPERATORS[node].name == name
            and (ruling := wanting(node, args[0].numel() * args[0].element_size())) is not None
            and _torch.references(args[0]) == counts[node]
            and _writable(OPERATORS[node], args)
        ):
            return ruling.run(OPERATORS[node], own, args, kwargs)
        return own(*args, **kwargs)

    return kernel


def _writable(operator: Operator, args: Sequence[Any]) -> bool:
    """Whether the result is laid out as the gradient is, without gaps and no element twice, and makes no graph."""
    gradient, saved = args[0], args[operator.like]
    return (
        not torch.is_grad_enabled()
        and not _torch.in_forward_mode()
        and gradient.dtype == saved.dtype
        and gradient.shape == saved.shape
        and gradient.stride() == saved.stride()
        and _torch.is_plain(gradient)
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


@functools.cache
def available(device: str) -> Mapping[str, tuple[int, ...]]:
    """The nodes that can be done so on that type of device with this torch, and how many references they are given.

    Each is tried out, once in a process: whether its kernel is called from that node, and told apart from a call in
    which somebody else refers to the gradient.
    """
    if device not in DEVICES:
        return {}
    found = {}
    with _torch.without_modes(), torch.autocast(device, enabled=False), torch.enable_grad():
        for operator in OPERATORS.values():
            alone, shared = _calibrated(operator, device, shared=False), _calibrated(operator, device, shared=True)
            if alone is not None and shared is not None and alone != shared:
                found[operator.node] = alone
    return found


def _calibrated(operator: Operator, device: str, *, shared: bool) -> tuple[int, ...] | None:
    """How many references there are when the operator is called, with or without somebody else's; None if it is not."""
    found: list[tuple[int, ...]] = []

    def kernel(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if _torch.running_node_name() == operator.node:
            found.append(_torch.references(args[0]))
        return own(*args, **kwargs)

    try:
        library = _torch.put_before({f"aten::{operator.name}": kernel}, device.upper())
    except RuntimeError:  # somebody else's kernel is there
        return None
    try:
        x = torch.ones(2, 8, 4, 4, device=device, requires_grad=True)
        y = operator.forward(x)
        torch.autograd.grad((y * 2).sum(), [x, y] if shared else [x])
    finally:
        _torch.remove_kernels(library)
    return found[0] if len(found) == 1 else None
