"""Which autograd graphs are alive at this moment, how much each holds, and where in the model. Nothing is unpacked."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lowtide._torch.nodes import sequence_number
from lowtide.diagnostics.graph import Graph
from lowtide.diagnostics.graph.build_graph import Walk, is_leaf
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
    group_of: dict[Function, int] = {}
    parent: list[int] = []
    roots: list[list[Tensor]] = []
    newest: list[int] = []

    def find(group: int) -> int:
        while parent[group] != group:
            parent[group] = parent[parent[group]]
            group = parent[group]
        return group

    for tensor in tensors:
        assert tensor.grad_fn is not None
        group = len(parent)
        parent.append(group)
        roots.append([tensor])
        newest.append(0)
        pending = [tensor.grad_fn]
        while pending:
            function = pending.pop()
            if is_leaf(function):
                continue
            if function in group_of:
                other = find(group_of[function])
                mine = find(group)
                if other != mine:
                    parent[mine] = other
                    roots[other] += roots[mine]
                    newest[other] = max(newest[other], newest[mine])
                continue
            group_of[function] = group
            mine = find(group)
            newest[mine] = max(newest[mine], sequence_number(function))
            pending += [upstream for upstream, _ in function.next_functions if upstream is not None]

    members: dict[int, set[Function]] = {}
    for function, group in group_of.items():
        members.setdefault(find(group), set()).add(function)
    graphs = [Alive(tuple(roots[g]), newest[g], frozenset(functions)) for g, functions in members.items()]
    return sorted(graphs, key=lambda graph: graph.newest)


def look(tensors: Iterable[Tensor], model: nn.Module | None) -> Graph:
    """The graph behind several tensors at once, with the model's names."""
    names = {} if model is None else parameter_names(model)
    found = Walk(tensors, names, names.values()).graph()
    if model is not None:
        name_modules(found, model)
    return found
