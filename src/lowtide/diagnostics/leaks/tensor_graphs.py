"""Graphs behind live tensors: which tensors are connected, and what their nodes keep.

Nothing is recomputed and no hook runs. Nodes are referred to only during an inspection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowtide._torch.autograd_graph import collect_nodes, components, get_variable, is_leaf, is_numbered, producer, walk
from lowtide._torch.nodes import n_slots, raw_saved, sequence_number
from lowtide._torch.tensors import get_storage_id
from lowtide.diagnostics.leaks.live_tensors import storage_bytes

if TYPE_CHECKING:
    from torch.autograd.graph import Node


NODE_BYTES, SLOT_BYTES = 577, 107
"""Host bytes of one node with its edges and metadata, and of each tensor that it can save; within 2 % of glibc's count
for the models in docs/retention.md.
"""

_NEXT_TO_NOTHING = 0.05


@dataclass(slots=True)
class Graph:
    """Connected autograd nodes, and indices of the tensors that they computed. A shared parameter connects no nodes."""

    nodes: list[Node] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)
    """Indices, the newest tensor first."""
    numbers: list[int] = field(default_factory=list)
    unfreed: dict[int, int] = field(default_factory=dict)
    """Storage -> bytes of tensors saved for a backward pass."""
    context: dict[int, int] = field(default_factory=dict)
    """Storage -> bytes of tensors that custom Functions put on their ctx as attributes."""
    keepers: set[int] = field(default_factory=set)
    """Indices of tensors whose graph still holds saved tensors. Backward has freed the graphs of all others."""
    n_slots: int = 0
    """Number of tensors that the nodes can save, whether they still hold them or not."""
    gradient_of: list[int] = field(default_factory=list)
    """Indices of the leaves whose `.grad` was computed by this graph."""

    @property
    def node_bytes(self) -> int:
        """Host memory of the nodes themselves, roughly."""
        return NODE_BYTES * len(self.numbers) + SLOT_BYTES * self.n_slots

    @property
    def is_empty(self) -> bool:
        """True if almost nothing is saved, because a backward pass has freed the whole graph."""
        kept = sum(self.unfreed.values()) + sum(self.context.values())
        return kept <= _NEXT_TO_NOTHING * self.node_bytes


def find_computing_node(tensor: Tensor) -> Node | None:
    """Return the autograd node that computed a tensor; None for leaves and tensors without a graph."""
    node = producer(tensor)
    return node if node is not None and is_numbered(node) else None


def collect_computing_nodes(nodes: Iterable[Node]) -> list[Node]:
    """Return `nodes` and all nodes upstream of them, except `AccumulateGrad` nodes."""
    return [node for node in collect_nodes(nodes) if is_numbered(node)]


def split_by_leaves(graph: Iterable[Node], leaves: set[int]) -> tuple[list[Node], list[Node]] | None:
    """Split a graph into the nodes that lead only to `leaves`, given by their ids, and all other nodes.

    Return None if a node that uses one of these leaves also passes gradients to other leaves.
    """
    leads_to_others: dict[Node, bool] = {}
    parts: tuple[list[Node], list[Node]] = [], []
    for node in sorted(graph, key=sequence_number):  # inputs first
        upstream = [n for n, _ in node.next_functions if n is not None]
        is_own = [is_leaf(n) and id(get_variable(n)) in leaves for n in upstream]
        reaches = any(leads_to_others.get(n, is_leaf(n)) for n, own in zip(upstream, is_own, strict=True) if not own)
        if any(is_own) and reaches:
            return None
        leads_to_others[node] = reaches
        parts[reaches].append(node)
    return parts


def map_kept_bytes(nodes: Iterable[Node]) -> tuple[dict[int, int], dict[int, int]]:
    """Return two maps of bytes by storage: of tensors that nodes saved, and of tensors in attributes of ctx."""
    saved: dict[int, int] = {}
    context: dict[int, int] = {}
    for node in nodes:
        for kept in raw_saved(node):
            if isinstance(kept, Tensor):
                saved[get_storage_id(kept)] = storage_bytes(kept)
        for kept in _find_ctx_tensors(node):
            context[get_storage_id(kept)] = storage_bytes(kept)
    return saved, context


def map_kept_bytes_beside(nodes: Iterable[Node], *others: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes by storage of all tensors that `nodes` keep, except storages of the tensors in `others`."""
    saved, context = map_kept_bytes(nodes)
    excused = {get_storage_id(tensor) for group in others for tensor in group}
    return {number: n_bytes for number, n_bytes in {**saved, **context}.items() if number not in excused}


def find_graphs(
    tensors: Sequence[Tensor], held: Iterable[int], gradients: Iterable[tuple[int, Tensor]], *, new_from: int
) -> list[Graph]:
    """Return the connected graphs of the tensors with indices `held`, and of `gradients`.

    `gradients` are pairs of a leaf's index and its gradient. A graph is left out if the sequence numbers of all its
    nodes are `new_from` or higher.
    """
    roots: list[tuple[int, Node, int | None]] = [
        (index, node, None) for index in held if (node := find_computing_node(tensors[index])) is not None
    ]
    roots += [(leaf, node, leaf) for leaf, gradient in gradients if (node := find_computing_node(gradient)) is not None]
    graphs = []
    for part in components([root for _, root, _ in roots]):
        numbers = [sequence_number(node) for node in part.nodes if is_numbered(node)]
        if min(numbers) >= new_from:
            continue
        graph = Graph(nodes=part.nodes, numbers=numbers)
        ends = []
        for index, root, leaf in map(roots.__getitem__, part.roots):
            if leaf is None:
                ends.append((index, root))
            else:
                graph.gradient_of.append(leaf)
        keeping = set()
        for node in graph.nodes:
            saved, context = map_kept_bytes([node])
            graph.n_slots += n_slots(node)
            graph.unfreed |= saved
            graph.context |= context
            if saved or context:
                keeping.add(node)
        ends.sort(key=lambda end: -sequence_number(end[1]))  # newest first
        graph.tensors = [index for index, _ in ends]
        graph.keepers = _find_keepers(keeping, ends)
        graphs.append(graph)
    return graphs


def _find_keepers(keeping: set[Node], ends: list[tuple[int, Node]]) -> set[int]:
    """Return the indices of tensors whose graph contains a node in `keeping`.

    `ends` are pairs of a tensor's index and its `grad_fn`.
    """
    in_vain: set[Node] = set()
    keepers = set()
    for index, root in ends:
        walked = []
        for node in walk([root], in_vain):
            if node in keeping:
                keepers.add(index)
                break
            walked.append(node)
        else:
            in_vain.update(walked)
    return keepers


def is_of_torch(node_class: type) -> bool:
    """Return True if the custom Function of this node class belongs to torch, so that users can't change its ctx."""
    function = getattr(node_class, "_forward_cls", node_class)
    return str(function.__module__).split(".")[0] == "torch"


def _find_ctx_tensors(node: Node) -> Iterator[Tensor]:
    ctx: Any = node
    if isinstance(ctx, torch.autograd.function.BackwardCFunction) and not is_of_torch(type(ctx)):
        for value in vars(ctx).values():
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, list | tuple):
                yield from (part for part in value if isinstance(part, Tensor))
