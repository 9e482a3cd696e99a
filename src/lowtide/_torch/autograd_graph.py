"""The autograd graph behind tensors, node by node."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from lowtide._torch.backward import ACCUMULATE_GRAD
from lowtide._torch.nodes import sequence_number

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node


_FIRST_UNNUMBERED = 2**63
"""Smallest sequence number of nodes that forward did not number."""


def producer(tensor: Tensor) -> Node | None:
    """Return `tensor.grad_fn`; None for a leaf, and for a view whose `grad_fn` autograd refuses to return."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view whose base was modified so that autograd refuses access
        return None


def find_nodes_behind(tensors: Iterable[Tensor]) -> list[Node]:
    """Return all nodes of the autograd graph behind `tensors`: each `grad_fn` first, AccumulateGrad nodes included."""
    return collect_nodes(node for tensor in tensors if (node := producer(tensor)) is not None)


def walk(roots: Iterable[Node], without: Container[Node] = ()) -> Iterator[Node]:
    """Yield `roots`, then all nodes reachable by `next_functions`, each once; nodes in `without` are skipped."""
    nodes = list(dict.fromkeys(roots))
    seen = set(nodes)
    for node in nodes:  # grows while it is walked
        yield node
        for upstream, _ in node.next_functions:
            if upstream is not None and upstream not in seen and upstream not in without:
                seen.add(upstream)
                nodes.append(upstream)


def collect_nodes(roots: Iterable[Node]) -> list[Node]:
    """Return `roots`, then all nodes reachable from them by `next_functions`, each once."""
    return list(walk(roots))


@dataclass(slots=True)
class Component:
    """A connected component of an autograd graph without its AccumulateGrad nodes."""

    nodes: list[Node] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)
    """Indices of the roots, in the argument of `components`, from which the nodes are reachable."""


def components(roots: Sequence[Node]) -> list[Component]:
    """Return the connected components of the autograd graph behind `roots`, without its AccumulateGrad nodes.

    So two losses that share only parameters have two components.
    """
    owner: dict[Node, int] = {}
    parent = list(range(len(roots)))  # union-find over the roots

    def find(number: int) -> int:
        while parent[number] != number:
            parent[number] = number = parent[parent[number]]
        return number

    for number, root in enumerate(roots):
        pending = [root]
        while pending:
            node = pending.pop()
            if is_leaf(node):
                continue
            if node in owner:
                parent[find(owner[node])] = find(number)
                continue
            owner[node] = number
            pending += [upstream for upstream, _ in node.next_functions if upstream is not None]
    parts: dict[int, Component] = {}
    for node, number in owner.items():
        parts.setdefault(find(number), Component()).nodes.append(node)
    for number, root in enumerate(roots):
        if not is_leaf(root):
            parts[find(number)].roots.append(number)
    return list(parts.values())


def is_leaf(function: Node) -> bool:
    """Return True if `function` is an AccumulateGrad node, which adds to the gradient of a leaf."""
    return function.name() == ACCUMULATE_GRAD


def is_numbered(node: Node) -> bool:
    """Return True if `node` has a sequence number; AccumulateGrad nodes have none."""
    return sequence_number(node) < _FIRST_UNNUMBERED


def leaves_of(nodes: Iterable[Node]) -> Iterator[Tensor]:
    """Yield the leaf tensors to which `nodes` pass gradients directly; a leaf may occur several times."""
    upstream = (function for node in nodes for function, _ in node.next_functions)
    return (get_variable(function) for function in upstream if function is not None and is_leaf(function))


def get_variable(function: Node) -> Tensor:
    """Return the leaf tensor of an AccumulateGrad node."""
    return cast("Tensor", function.variable)  # type: ignore[attr-defined]
