"""Which autograd graphs are alive at this moment, how much each holds, and where in the model. Nothing is unpacked."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lowtide._torch.autograd_graph import components
from lowtide._torch.nodes import sequence_number
from lowtide.diagnostics.graph import Graph
from lowtide.diagnostics.graph.build_graph import Walk
from lowtide.diagnostics.graph.module_names import name_modules, parameter_names

if TYPE_CHECKING:
    from torch import nn
    from torch.autograd.graph import Node as Function


@dataclass(frozen=True, slots=True)
class Alive:
    """One connected graph, by the tensors that lead to it."""

    roots: tuple[Tensor, ...]
    newest: int
    """The largest sequence number in it: the later a graph was made, the larger."""
    functions: frozenset[Function]


def tensors_with_graphs() -> list[Tensor]:
    """Every tensor that Python holds and that has a graph behind it."""
    found = []
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            try:
                if thing.grad_fn is not None:
                    found.append(thing)
            except RuntimeError:  # a view whose base was modified in a way that autograd forbids to look at
                continue
    return found


def separate(tensors: Iterable[Tensor]) -> list[Alive]:
    """The graphs behind `tensors`, those that share a computed value as one; the newest last."""
    ends = [(tensor, tensor.grad_fn) for tensor in tensors if tensor.grad_fn is not None]
    graphs = [
        Alive(
            tuple(ends[number][0] for number in part.roots),
            max(map(sequence_number, part.nodes)),
            frozenset(part.nodes),
        )
        for part in components([function for _, function in ends])
    ]
    return sorted(graphs, key=lambda graph: graph.newest)


def look(tensors: Iterable[Tensor], model: nn.Module | None) -> Graph:
    """The graph behind several tensors at once, with the model's names."""
    names = {} if model is None else parameter_names(model)
    found = Walk(tensors, names, names.values()).graph()
    if model is not None:
        name_modules(found, model)
    return found
