"""Operators of backward whose result can be written over their incoming gradient (`inplace_gradients.py`).

Most accept an output argument. Batch and group norm have no such kernel, and are computed in pieces: torch's own
results for a sixteenth of the channels at a time, each copied over its part of the gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator of backward whose result may be written over its incoming gradient."""

    name: str
    """Name in the namespace `aten`."""
    node: str
    """Name of the autograd node that calls the operator once and uses the gradient for nothing else
    (torch's derivatives.yaml).
    """
    write: Callable[..., Any]
    """Function with the arguments of the operator, after torch's kernel of it, that writes over the gradient."""
    forward: Callable[[Tensor], Tensor]
    """Function of an input [2, 8, 4, 4] whose result has that node as its `grad_fn`."""
    like: int = 1
    """Index of the operator's argument that has the same layout as the result."""
    groups: Callable[..., int] | None = None
    """For an operator that is computed in pieces, which takes a little more time: function that returns the number of
    groups of channels for the operator's arguments. None for other operators.
    """

    @property
    def piecewise(self) -> bool:
        return self.groups is not None


def _make_operator(
    name: str, node: str, forward: Callable[[Tensor], Tensor], *, out: str = "grad_input", **more: Any
) -> Any:
    """Make the `Operator` for torch's operator `name`, which has an overload with the output argument `out`."""
    overload = getattr(getattr(aten, name), "out" if name.endswith("_data") else "grad_input")

    def write(own: Any, gradient: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        overload(gradient, *args, **kwargs, **{out: gradient})
        return _alias(gradient)

    return Operator(name=name, node=node, write=write, forward=forward, **more)


def _alias(gradient: Tensor) -> Tensor:
    """Return a new tensor object in the memory of the gradient, without its attributes and hooks."""
    return gradient.detach()


def _divide_channels(gradient: Tensor, n_groups: int) -> list[slice]:
    """Return slices that divide `n_groups` groups of channels into pieces of about a sixteenth of them.

    Each sum over a piece has the same order of additions as over the whole gradient. If channels are adjacent in
    memory, a CPU sums a vector of channels at a time, so a slice has whole vectors.
    """
    step = -(-n_groups // 16)
    if gradient.stride(1) == 1:
        vector_bytes = 64 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 32
        lanes = vector_bytes // gradient.element_size()
        step = -(-step // lanes) * lanes
    starts = list(range(0, n_groups, step))
    if len(starts) > 1 and gradient.stride(1) == 1 and n_groups - starts[-1] == 1:
        del starts[-1]  # one channel alone is contiguous as well, so torch would sum it in another order
    return [slice(*ends) for ends in itertools.pairwise([*starts, n_groups])]


def has_pieces(args: Sequence[Any], groups: int) -> bool:
    """Return True if the operator can run in more than three pieces. With fewer it would need as much memory as at
    once, because three copies of a piece exist at a time.

    `args` are the operator's arguments; the last one selects the outputs. Returns False if the input's gradient is not
    selected, because nothing upstream is trained.
    """
    return args[-1][0] and _find_memory_format(args[0]) is not None and len(_divide_channels(args[0], groups)) > 3


def _write_batch_norm(own: Any, gradient: Tensor, saved: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    """Run `native_batch_norm_backward` (`own`) for some channels at a time, and write the input's gradient over
    `gradient`.

    Returns the operator's results. In pieces the results have the same bits, because channels are independent.
    """
    by_channel, rest = args[:5], args[5:]  # weight, running mean and variance, mean and deviation of this batch
    parts: list[tuple[Tensor | None, ...]] = []
    for channels in _divide_channels(gradient, gradient.shape[1]):
        theirs = (None if t is None or not t.numel() else t[channels] for t in by_channel)
        result, *others = own(_copy_channels(gradient, channels), _copy_channels(saved, channels), *theirs, *rest)
        gradient[:, channels] = result
        parts.append(tuple(others))
    return _alias(gradient), *map(_join, zip(*parts, strict=True))


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
    """Run `native_group_norm_backward` (`own`) for some groups of channels at a time, and write the input's gradient
    over `gradient`.

    Returns the operator's results. In pieces the results have the same bits, because groups of channels are
    independent.
    """
    width = channels // groups
    parts: list[tuple[Tensor | None, ...]] = []
    for some in _divide_channels(gradient, groups):
        theirs = slice(some.start * width, some.stop * width)
        n = some.stop - some.start
        result, *others = own(
            _copy_channels(gradient, theirs),
            _copy_channels(saved, theirs),
            mean.view(rows, groups)[:, some].contiguous(),
            deviation.view(rows, groups)[:, some].contiguous(),
            None if weight is None else weight[theirs],
            *(rows, n * width, pixels, n, mask),
        )
        gradient[:, theirs] = result
        parts.append(tuple(others))
    return _alias(gradient), *map(_join, zip(*parts, strict=True))


def _copy_channels(tensor: Tensor, channels: slice) -> Tensor:
    form = _find_memory_format(tensor)
    assert form is not None
    return tensor[:, channels].contiguous(memory_format=form)


def _find_memory_format(tensor: Tensor) -> torch.memory_format | None:
    """Return the memory format of a tensor: contiguous or channels-last; None if it has neither."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    forms = (form for form in (torch.contiguous_format, last) if form is not None)
    return next((form for form in forms if tensor.is_contiguous(memory_format=form)), None)


def _join(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


def _batch_norm(x: Tensor) -> Tensor:
    return functional.batch_norm(x, None, None, training=True)


OPERATORS: Final = {
    operator.node: operator
    for operator in (
        _make_operator(
            "_log_softmax_backward_data", "LogSoftmaxBackward0", lambda x: functional.log_softmax(x, -1), out="out"
        ),
        _make_operator("_softmax_backward_data", "SoftmaxBackward0", lambda x: functional.softmax(x, -1)),
        _make_operator("_softmax_backward_data", "SafeSoftmaxBackward0", lambda x: torch.ops.aten._safe_softmax(x, -1)),
        _make_operator("gelu_backward", "GeluBackward0", functional.gelu),
        _make_operator("silu_backward", "SiluBackward0", functional.silu),
        _make_operator("threshold_backward", "ReluBackward0", functional.relu),
        _make_operator("tanh_backward", "TanhBackward0", torch.tanh),
        _make_operator("sigmoid_backward", "SigmoidBackward0", torch.sigmoid),
        _make_operator("leaky_relu_backward", "LeakyReluBackward0", functional.leaky_relu),
        _make_operator("elu_backward", "EluBackward0", functional.elu, like=5),
        _make_operator("hardtanh_backward", "HardtanhBackward0", functional.hardtanh),
        _make_operator("hardsigmoid_backward", "HardsigmoidBackward0", functional.hardsigmoid),
        _make_operator("softplus_backward", "SoftplusBackward0", functional.softplus),
        Operator(
            name="native_batch_norm_backward",
            node="NativeBatchNormBackward0",
            write=_write_batch_norm,
            forward=_batch_norm,
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
"""Operators by the name of their node."""
