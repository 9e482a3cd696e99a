"""The autograd graph behind tensors, node by node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node


def producer(tensor: Tensor) -> Node | None:
    """The node that made a tensor; None for a leaf, and where autograd forbids to look."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view whose base was modified in a way that autograd forbids to look at
        return None


def nodes_behind(tensors: Iterable[Tensor]) -> list[Node]:
    """All nodes that the producers of these tensors lead to, themselves first, those that gather gradients included."""
    return nodes_from(node for tensor in tensors if (node := producer(tensor)) is not None)


def nodes_from(roots: Iterable[Node]) -> list[Node]:
    """All nodes that these lead to, themselves first, each once."""
    found = list(dict.fromkeys(roots))
    seen = set(found)
    for node in found:  # grows while it is walked
        for upstream, _ in node.next_functions:
            if upstream is not None and upstream not in seen:
                seen.add(upstream)
                found.append(upstream)
    return found
