"""The point where backward enters a model: all gradients of the model's outputs are known there at once.

The outputs of a model's call pass through one autograd node that changes nothing: same objects, same numbers, same
memory. Autograd runs that node once every gradient of an output has arrived from outside the model.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lowtide._torch.backward import in_backward
from lowtide._torch.tensors import is_plain
from lowtide.levers.loss_only_outputs import is_model_output
from lowtide.levers.partial_gradients import is_gathering
from lowtide.runtime.call_interceptor import OuterInterceptor

if TYPE_CHECKING:
    from torch import nn

OnEntry = Callable[[Sequence[GradientEdge], Sequence[Tensor]], None]
"""Function that is called before backward enters the model, with the edges of its outputs and their gradients."""

_PARAMETERS: set[int] = set()


def runs_twice(parameter: Tensor) -> bool:
    """Return True if backward runs twice through operators on `parameter`, first to compute the norm for clipping."""
    return id(parameter) in _PARAMETERS and not is_gathering(parameter)


class BackwardEntry:
    """Hook on a model that calls `on_entry` when backward reaches the outputs of a call of the model.

    `on_entry` is called with the autograd edges of these outputs and the gradients that have arrived for them.
    """

    def __init__(self, model: nn.Module, on_entry: OnEntry) -> None:
        self._model = weakref.ref(model)
        self._on_entry = weakref.WeakMethod(on_entry)  # weak, since graphs hold it
        self._interceptor = OuterInterceptor(model, self._intercept)
        self._parameters = {id(parameter) for parameter in model.parameters()}
        _PARAMETERS.update(self._parameters)

    def _intercept(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        output, model = inner(*args, **kwargs), self._model()
        if model is None or not torch.is_grad_enabled() or in_backward() or any(map(is_gathering, model.parameters())):
            return output
        tensors = {
            id(tensor): tensor
            for tensor in find_output_tensors(output)
            if tensor.grad_fn is not None and is_plain(tensor)
        }
        if not tensors:
            return output
        enter: Any = _EntryFunction.apply
        return replace_tensors(output, dict(zip(tensors, enter(self._on_entry, *tensors.values()), strict=True)))

    def remove(self) -> None:
        """Remove the hook from the model. Repeated calls do nothing."""
        self._interceptor.remove()
        _PARAMETERS.difference_update(self._parameters)


class _EntryFunction(torch.autograd.Function):
    """Autograd function that returns its inputs unchanged, and whose backward calls `on_entry`."""

    @staticmethod
    def forward(ctx: Any, on_entry: weakref.WeakMethod[OnEntry], *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.on_entry = on_entry
        return tuple(output.detach() for output in outputs)  # no views: these could not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        on_entry = ctx.on_entry()
        if on_entry is not None:
            arrived = [(edge, g) for edge, g in zip(ctx.next_functions, gradients, strict=True) if g is not None]
            on_entry(
                [GradientEdge(node, output) for (node, output), _ in arrived], [gradient for _, gradient in arrived]
            )
        return None, *gradients


def find_output_tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in a model's output: in tuples, lists, dicts, dataclasses and outputs of transformers."""
    if isinstance(output, Tensor):
        yield output
    else:
        for _, item in _items(output):
            yield from find_output_tensors(item)


def _items(output: Any) -> list[tuple[Any, Any]]:
    if type(output) is tuple or type(output) is list or (isinstance(output, tuple) and hasattr(output, "_fields")):
        return list(enumerate(output))
    if is_model_output(output):  # not with `items`: the lever `outputs` may have released some fields
        return [(name, OrderedDict.__getitem__(output, name)) for name in OrderedDict.__iter__(output)]
    if type(output) in (dict, OrderedDict):
        return list(output.items())
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [(f.name, getattr(output, f.name)) for f in dataclasses.fields(output) if hasattr(output, f.name)]
    return []


def replace_tensors(output: Any, replacements: dict[int, Tensor]) -> Any:
    """Replace tensors in a model's output; `replacements` maps the `id` of each replaced tensor to the new tensor."""
    if isinstance(output, Tensor):
        return replacements.get(id(output), output)
    items = {key: replace_tensors(item, replacements) for key, item in _items(output)}
    if all(items[key] is item for key, item in _items(output)):
        return output
    if isinstance(output, tuple):
        make: Any = getattr(type(output), "_make", tuple)  # for a named tuple
        return make(items.values())
    if isinstance(output, list):
        return list(items.values())
    if is_model_output(output):  # copy.copy would read all fields
        for name, item in items.items():
            output[name] = item
        return output
    if isinstance(output, dict):
        return type(output)(items)
    other = copy.copy(output)
    for name, item in items.items():
        object.__setattr__(other, name, item)
    return other
