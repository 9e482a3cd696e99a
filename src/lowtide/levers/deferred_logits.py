"""Deferred logits: a tensor that is not computed, but knows its inputs.

If it ends in a cross entropy, the loss is computed in chunks (`torch.nn.functional.linear_cross_entropy`) and the
logits never exist. Before that it may be cast to a wider type, have its rows cut, be reshaped as long as the vocabulary
stays the last dimension, and be scaled by a number: all of these are applied to the hidden states instead. Any other
operation first computes the plain tensor, so the step is right either way.

Debt: in bfloat16 torch adds up the chunks' losses in bfloat16, so the loss itself, not its gradient, is good to about
two digits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide._torch.modes import without_subclasses
from lowtide._torch.tensors import wrapper
from lowtide.errors import LowtideError
from lowtide.levers.accumulation.loss_reduction import Average, note_average
from lowtide.levers.backward_entry import runs_twice


@dataclass(slots=True)
class Head:
    """Output layer of a model, with a record of how its logits are used."""

    layer: nn.Linear
    chunked: int = 0
    """Number of losses that were computed without logits."""
    needed_by: str = ""
    """The first function that needed the logits themselves, in training."""


class Logits(Tensor):
    """Logits, `layer(hidden)`, that are computed only if an operation needs their values."""

    head: Head
    compute: Callable[[], Tensor]
    hidden: Tensor
    version: tuple[int, int]
    computed: dict[bool, Tensor]

    @staticmethod
    def of(head: Head, hidden: Tensor, compute: Callable[[], Tensor], dtype: torch.dtype) -> Logits:
        """Return deferred logits with the shape of `head.layer(hidden)`; `compute()` computes them on demand."""
        shape = (*hidden.shape[:-1], head.layer.out_features)
        logits: Logits = wrapper(Logits, shape, dtype, hidden.device)
        logits.head, logits.hidden, logits.compute, logits.computed = head, hidden, compute, {}
        logits.version = hidden._version, head.layer.weight._version
        return logits

    def rows(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Logits:
        """Return deferred logits to which `change` is applied: a function that keeps the last dimension, as a slice of
        rows does.
        """
        return Logits.of(self.head, change(self.hidden), lambda: change(self.get()), dtype or self.dtype)

    def get(self) -> Tensor:
        """Return the computed logits.

        The first call with gradients enabled computes them with a graph, the first call without gradients computes them
        once more. Raises LowtideError if the hidden states or the layer's weight have been written to since forward.
        """
        wants_graph = torch.is_grad_enabled()
        if wants_graph not in self.computed:
            if self.version != (self.hidden._version, self.head.layer.weight._version):
                raise LowtideError(
                    "the logits of this step were not computed, and can't be any more: the weights have changed since "
                    "(lever 'loss head'). Read them before the optimizer steps, or fit again without that lever."
                )
            self.computed[wants_graph] = self.compute()
        return self.computed[wants_graph]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Logits({list(self.shape)}, {self.dtype}, not computed)"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `function` on the hidden states if `_SHORTCUTS` has a rule for it, else on computed logits."""
        kwargs = dict(kwargs or {})
        if function in _METADATA:
            with without_subclasses():
                return function(*args, **kwargs)
        shortcut = _SHORTCUTS.get(function)
        if shortcut is not None and args and isinstance(args[0], Logits):
            result = shortcut(*args, **kwargs)
            if result is not None:
                return result
        return function(*_compute_logits(args, function), **_compute_logits(kwargs, function))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `function` on computed logits, for calls from C++ that bypass `__torch_function__`."""
        return function(*_compute_logits(args, function), **_compute_logits(dict(kwargs or {}), function))


def _compute_logits(argument: Any, function: Any) -> Any:
    """Return the arguments of `function` with deferred logits replaced by computed ones."""
    if isinstance(argument, Logits):
        if torch.is_grad_enabled():
            argument.head.needed_by = argument.head.needed_by or _format_name(function)
        return argument.get()
    if isinstance(argument, tuple | list):
        return type(argument)(_compute_logits(item, function) for item in argument)
    if isinstance(argument, dict):
        return {key: _compute_logits(value, function) for key, value in argument.items()}
    return argument


def _format_name(function: Any) -> str:
    name = getattr(function, "__name__", str(function))
    return str(getattr(function.__self__, "__name__", name)) if name == "__get__" else name.strip("_")


# --- deferred operations ----------------------------------------------------------------------------------------------


def _float(logits: Logits) -> Logits | None:
    return _cast(logits, torch.float32)


def _to(logits: Logits, *args: Any, **kwargs: Any) -> Logits | None:
    if len(args) == 1 and isinstance(args[0], torch.dtype) and not kwargs:
        return _cast(logits, args[0])
    if not args and kwargs.keys() == {"dtype"}:
        return _cast(logits, kwargs["dtype"])
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.device) and args[0] == logits.device:
        return logits
    return None


def _cast(logits: Logits, dtype: torch.dtype) -> Logits | None:
    if dtype == logits.dtype:
        return logits
    wider = torch.promote_types(dtype, logits.dtype) == dtype
    return Logits.of(logits.head, logits.hidden, lambda: logits.get().to(dtype), dtype) if wider else None


def _view(logits: Logits, *shape: Any) -> Logits | None:
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    rows = logits.shape[:-1].numel()
    if sizes[-1] == -1 and torch.Size(sizes[:-1]).numel() == rows:
        sizes = *sizes[:-1], logits.shape[-1]
    if sizes[-1] != logits.shape[-1]:
        return None
    if sizes[:-1].count(-1) > 1 or (-1 not in sizes and torch.Size(sizes[:-1]).numel() != rows):
        return None
    return logits.rows(lambda tensor: tensor.reshape(*sizes[:-1], tensor.shape[-1]))


def _contiguous(logits: Logits, **_: Any) -> Logits:
    return logits


def _flatten(logits: Logits, start_dim: int = 0, end_dim: int = -1) -> Logits | None:
    last = end_dim % logits.dim()
    return logits.rows(lambda tensor: tensor.flatten(start_dim, last)) if last < logits.dim() - 1 else None


def _getitem(logits: Logits, index: Any) -> Logits | None:
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, int | slice) or part is Ellipsis for part in parts):
        return None
    named = len(parts) - (Ellipsis in parts)
    touches_last = named >= logits.dim() or (Ellipsis in parts and parts[-1] is not Ellipsis)
    if touches_last and parts[-1] != slice(None):
        return None
    return logits.rows(lambda tensor: tensor[index])


def _multiply(logits: Logits, factor: Any) -> Logits | None:
    return logits.rows(lambda tensor: tensor * factor) if _may_scale(logits, factor) else None


def _divide(logits: Logits, divisor: Any, **options: Any) -> Logits | None:
    return logits.rows(lambda tensor: tensor / divisor) if _may_scale(logits, divisor) and not options else None


def _may_scale(logits: Logits, number: Any) -> bool:
    """Return True if scaling the hidden states by `number` scales the logits; it does not if the layer has a bias."""
    return isinstance(number, int | float) and logits.head.layer.bias is None


def _cross_entropy(
    logits: Logits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    is_plain = size_average is None and reduce is None and not label_smoothing
    if not (is_plain and logits.dim() == 2 and target.dim() == 1 and target.dtype == torch.int64):
        return None
    layer, hidden = logits.head.layer, logits.hidden
    parameters: list[Tensor | None] = [layer.weight, layer.bias]
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden = hidden.to(dtype)
        parameters = [None if parameter is None else parameter.to(dtype) for parameter in parameters]
    assert parameters[0] is not None
    loss = functional.linear_cross_entropy(
        hidden,
        parameters[0],
        target,
        linear_bias=parameters[1],
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        options=nn.LinearCrossEntropyOptions(allow_retain_graph=runs_twice(layer.weight)),
    ).to(logits.dtype)
    logits.head.chunked += 1
    if reduction == "mean" and weight is None:
        note_average(loss, lambda: Average("mean", float((target != ignore_index).sum()), target, ignore_index))
    elif reduction == "sum":
        note_average(loss, lambda: Average("sum", float(target.numel()), target, ignore_index))
    return loss


_SHORTCUTS: dict[Any, Callable[..., Tensor | None]] = {
    Tensor.float: _float,
    Tensor.to: _to,
    Tensor.view: _view,
    Tensor.reshape: _view,
    Tensor.contiguous: _contiguous,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.__getitem__: _getitem,
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul), _multiply),
    **dict.fromkeys((Tensor.div, Tensor.__truediv__, torch.div), _divide),
    functional.cross_entropy: _cross_entropy,
}

_METADATA = frozenset(
    {
        Tensor.size,
        Tensor.dim,
        Tensor.ndimension,
        Tensor.numel,
        Tensor.nelement,
        Tensor.is_floating_point,
        Tensor.__len__,
        Tensor.untyped_storage,
        *(
            getattr(Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_nested"),
                *("grad_fn", "grad", "requires_grad", "is_leaf", "_base", "_version"),
            )
        ),
    }
)
"""Functions answered from the tensor's metadata: no values, memory or graph needed."""
