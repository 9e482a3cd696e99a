"""The graphs behind living tensors: which tensors hang together, and what their nodes keep.

Nothing is recomputed and no hook runs. Nodes are referred to only while an inspection lasts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowtide._torch.autograd_graph import nodes_from, producer
from lowtide._torch.nodes import raw_saved, sequence_number
from lowtide._torch.tensors import storage_id
from lowtide.diagnostics.leaks.live_tensors import storage_bytes

if TYPE_CHECKING:
    from torch.autograd.graph import Node

_LEAF_NUMBERS = 2**63  # nodes that gather gradients have numbers above


@dataclass(slots=True)
class Graph:
    """Nodes that hang together otherwise than through parameters, and the tensors (by index) that end in them."""

    nodes: list[Node] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)
    """The one that was made last first."""
    numbers: list[int] = field(default_factory=list)
    unfreed: dict[int, int] = field(default_factory=dict)
    """Storage -> bytes, of what is saved for a backward pass."""
    context: dict[int, int] = field(default_factory=dict)
    """Storage -> bytes, of the tensors that custom Functions put on their ctx as attributes."""
    keepers: set[int] = field(default_factory=set)
    """The tensors that lead to anything that is kept. What is before the others a backward pass has freed."""
    gradient_of: list[int] = field(default_factory=list)
    """The leaves whose `.grad` ends in this graph."""


def computed_by(tensor: Tensor) -> Node | None:
    """The node that computed a tensor, if any did."""
    node = producer(tensor)
    return node if node is not None and sequence_number(node) < _LEAF_NUMBERS else None


def computing(nodes: Iterable[Node]) -> list[Node]:
    """All nodes that these lead to, themselves included; without those that gather the gradients of leaves."""
    return [node for node in nodes_from(nodes) if sequence_number(node) < _LEAF_NUMBERS]


def kept_by(nodes: Iterable[Node]) -> tuple[dict[int, int], dict[int, int]]:
    """Storage -> bytes of what these nodes saved, and of what custom Functions put on their ctx."""
    saved: dict[int, int] = {}
    context: dict[int, int] = {}
    for node in nodes:
        for kept in raw_saved(node):
            if isinstance(kept, Tensor):
                saved[storage_id(kept)] = storage_bytes(kept)
        for kept in _attributes(node):
            context[storage_id(kept)] = storage_bytes(kept)
    return saved, context


def kept_beside(nodes: Iterable[Node], *others: Iterable[Tensor]) -> dict[int, int]:
    """Storage -> bytes of what these nodes keep in any way, less the memory of other tensors."""
    saved, context = kept_by(nodes)
    excused = {storage_id(tensor) for group in others for tensor in group}
    return {number: n_bytes for number, n_bytes in {**saved, **context}.items() if number not in excused}


def graphs_of(
    tensors: Sequence[Tensor], held: Iterable[int], gradients: Iterable[tuple[int, Tensor]], *, new_from: int
) -> list[Graph]:
    """The graphs that end in the held tensors or in gradients, without those that began at node `new_from` or later."""
    roots: list[tuple[int, Node, int | None]] = [
        (index, node, None) for index in held if (node := computed_by(tensors[index])) is not None
    ]
    roots += [(leaf, node, leaf) for leaf, gradient in gradients if (node := computed_by(gradient)) is not None]
    owner: dict[Node, int] = {}
    merged: list[int] = []  # union-find over the roots

    def find(number: int) -> int:
        while merged[number] != number:
            number = merged[number]
        return number

    for number, (_, root, _) in enumerate(roots):
        merged.append(number)
        if root in owner:
            merged[number] = find(owner[root])
            continue
        pending = [root]
        owner[root] = number
        while pending:
            for upstream, _ in pending.pop().next_functions:
                if upstream is None or sequence_number(upstream) >= _LEAF_NUMBERS:
                    continue
                if upstream not in owner:
                    owner[upstream] = number
                    pending.append(upstream)
                else:
                    merged[find(owner[upstream])] = find(number)
    graphs: dict[int, Graph] = {}
    for node, number in owner.items():
        graph = graphs.setdefault(find(number), Graph())
        graph.nodes.append(node)
    ends: dict[int, list[tuple[int, Node]]] = {}
    for number, (index, root, leaf) in enumerate(roots):
        key = find(number)
        if leaf is not None:
            graphs[key].gradient_of.append(leaf)
        else:
            ends.setdefault(key, []).append((index, root))
    for key, graph in graphs.items():
        graph.numbers = [n for node in graph.nodes if (n := sequence_number(node)) < _LEAF_NUMBERS]
        if graph.numbers:
            keeping = set()
            for node in graph.nodes:
                saved, context = kept_by([node])
                graph.unfreed |= saved
                graph.context |= context
                if saved or context:
                    keeping.add(node)
            newest_first = sorted(ends.get(key, []), key=lambda end: -sequence_number(end[1]))
            graph.tensors = [index for index, _ in newest_first]
            graph.keepers = _leading_to(keeping, newest_first)
    return [graph for graph in graphs.values() if graph.numbers and min(graph.numbers) < new_from]


def _leading_to(keeping: set[Node], ends: list[tuple[int, Node]]) -> set[int]:
    """Tensors to whose nodes one of `keeping` is upstream."""
    in_vain: set[Node] = set()
    return {index for index, root in ends if _leads_to(keeping, root, in_vain)}


def _leads_to(keeping: set[Node], root: Node, in_vain: set[Node]) -> bool:
    """Whether one of `keeping` is upstream of a node. If not, all that was walked goes to `in_vain`."""
    pending, seen = [root], {root}
    while pending:
        node = pending.pop()
        if node in keeping:
            return True
        for upstream, _ in node.next_functions:
            if upstream is not None and upstream not in seen and upstream not in in_vain:
                seen.add(upstream)
                pending.append(upstream)
    in_vain |= seen
    return False


def _attributes(node: Node) -> Iterator[Tensor]:
    ctx: Any = node
    if isinstance(ctx, torch.autograd.function.BackwardCFunction):
        for value in vars(ctx).values():
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, list | tuple):
                yield from (part for part in value if isinstance(part, Tensor))
