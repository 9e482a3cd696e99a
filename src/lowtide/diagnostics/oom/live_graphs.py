"""Autograd graphs that are alive now. No saved tensor is unpacked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lowtide._torch.autograd_graph import components
from lowtide._torch.nodes import sequence_number
from lowtide.diagnostics.graph import Graph
from lowtide.diagnostics.graph.build_graph import GraphBuilder
from lowtide.diagnostics.graph.module_names import collect_named_tensors, name_modules
from lowtide.utils.live_objects import live_objects

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class LiveGraph:
    """One connected autograd graph, represented by the live tensors whose `grad_fn` is one of its nodes."""

    roots: tuple[Tensor, ...]
    newest: int
    """Largest sequence number of the graph's nodes, larger for younger graphs."""


def find_tensors_with_graphs() -> list[Tensor]:
    """Return all live Python tensors that have a `grad_fn`."""
    tensors = []
    for tensor in live_objects(Tensor):
        try:
            if tensor.grad_fn is not None:
                tensors.append(tensor)
        except RuntimeError:  # a view whose base was modified, which autograd forbids to look at
            continue
    return tensors


def separate_graphs(tensors: Iterable[Tensor]) -> list[LiveGraph]:
    """Return the graphs of `tensors`, newest last. Tensors whose graphs share a computed value share one graph."""
    ends = [(tensor, tensor.grad_fn) for tensor in tensors if tensor.grad_fn is not None]
    graphs = [
        LiveGraph(tuple(ends[number][0] for number in part.roots), max(map(sequence_number, part.nodes)))
        for part in components([function for _, function in ends])
    ]
    return sorted(graphs, key=lambda graph: graph.newest)


def build_graph_behind(tensors: Iterable[Tensor], model: nn.Module | None) -> Graph:
    """Return the joint graph of `tensors`. If `model` is given, parameters and nodes are named by its modules."""
    names = {} if model is None else collect_named_tensors(model)
    graph = GraphBuilder(tensors, names, names.values()).graph()
    if model is not None:
        name_modules(graph, model)
    return graph
