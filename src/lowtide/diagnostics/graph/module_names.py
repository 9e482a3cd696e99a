"""The module that each node ran in, inferred from the parameters that nodes were applied to.

A node that takes a parameter, or a view or cast of one, ran in the module that owns the parameter. Any other node is
assigned to the smallest module that encloses the nearest such nodes before and after it: a node between `h.3.mlp.fc1`
and `h.3.mlp.fc2` ran in `h.3.mlp`. Nodes before the first such node, and after the last, get no module. Debts: a module
without parameters is not distinguished from the one around it, nor one call of a module from the next.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import takewhile
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lowtide.diagnostics.graph.graph_records import Node

if TYPE_CHECKING:
    from lowtide.diagnostics.graph.whole_graph import Graph


def collect_named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers by name; a shared tensor appears under each of its names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def name_modules(graph: Graph, model: nn.Module) -> None:
    """Set `Node.module` to the path of the module of `model` that each node ran in, where it can be inferred."""
    owners: dict[str, list[str]] = defaultdict(list)
    first_name: dict[Tensor, str] = {}
    for name, tensor in collect_named_tensors(model).items():
        owners[first_name.setdefault(tensor, name)].append(name.rpartition(".")[0])

    from_parameter: dict[int, str] = {}  # index of a value -> the parameter that it is, or is a view or cast of
    for value in graph.leaves:
        if value.name in owners:
            from_parameter[value.index] = value.name
    outputs: dict[int, list[int]] = defaultdict(list)
    for value in graph.values:
        if value.producer is not None:
            outputs[value.producer.index].append(value.index)
    owner: dict[int, str] = {}
    for node in graph.nodes:
        names = [from_parameter[value.index] for value in node.inputs if value.index in from_parameter]
        if names:
            owner[node.index] = _choose_owner(node, owners[names[-1]], model)
        if names and len(node.inputs) == 1:
            from_parameter |= dict.fromkeys(outputs[node.index], names[0])
    _name_all_nodes(graph, owner)


def _choose_owner(node: Node, paths: list[str], model: nn.Module) -> str:
    """Return the path of the module that ran `node`, from the `paths` of all modules that share its parameter.

    An embedding lookup ran in an `nn.Embedding`, any other node in a module of another class.
    """
    looks_up = "Embedding" in node.name
    fitting = [path for path in paths if isinstance(model.get_submodule(path), nn.Embedding) == looks_up]
    return (fitting or paths)[0]


def _name_all_nodes(graph: Graph, owner: dict[int, str]) -> None:
    known = sorted(owner)
    if not known:
        return
    position = 0  # first known node that is not before the current one
    for node in graph.nodes:
        while position < len(known) and known[position] < node.index:
            position += 1
        if node.index in owner:
            node.module = owner[node.index]
        elif 0 < position < len(known):
            node.module = _find_common_path(owner[known[position - 1]], owner[known[position]])


def _find_common_path(one: str, other: str) -> str:
    pairs = zip(one.split("."), other.split("."), strict=False)
    return ".".join(part for part, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
