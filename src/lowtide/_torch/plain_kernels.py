"""Private names of torch: graphs under a plan whose kernels are those of the graphs without a plan.

A fused kernel holds 16-bit values in 32 bits and rounds only the values that it writes, and on a CPU the order in which
it sums depends on the types of all values in it (`joint_slots.py`). So under autocast a value keeps its bits only in
the kernel that computes it without a plan. Forward therefore writes the same values as without a plan, although not all
of them are saved. Backward is torch's own graph, preceded by a second graph that recomputes its missing inputs: kernels
of the two graphs are never fused, and a recomputed value is in memory, rounded, as if it had been saved.

Read in torch 2.13 (`torch/_inductor/graph.py`, `run_node`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from torch import fx

RECOMPUTED: Final = "lowtide_recomputed"
"""Key in the metadata of a node that is computed again for `with_plain_backward`."""

WRITTEN: Final = "inductor_realize_to_strides"
"""Key of torch in the metadata of a node whose value inductor writes to memory as soon as it is computed."""


def write_as_plain(forward: fx.GraphModule, names: Collection[str]) -> None:
    """Mark nodes of the graph `forward` so that inductor writes their values to memory, as it does without a plan.

    `names` are the names of the nodes that are outputs without a plan. Those that `forward` does not read itself are
    not marked.
    """
    for node in forward.graph.nodes:
        if node.name in names and node.users:
            node.meta[WRITTEN] = True


def with_plain_backward(
    planned: fx.GraphModule, plain: fx.GraphModule, names: Collection[str], views: Collection[str]
) -> None:
    """Replace the nodes of `planned`, the backward graph under a plan, by those of `plain`, the graph without a plan.

    The inputs stay those of `planned`. Inputs that only `plain` has are computed as in `planned`, right before they are
    first read; if their names are in `names`, inductor writes them to memory there.
    """
    own = {node.name: node for node in planned.graph.nodes}
    place = {node: at for at, node in enumerate(planned.graph.nodes)}
    graph = fx.Graph()
    again: dict[fx.Node, fx.Node] = {}
    copies: dict[fx.Node, fx.Node] = {}

    def recompute(end: fx.Node) -> fx.Node:
        needed, pending = set[fx.Node](), [end]
        while pending:
            node = pending.pop()
            if node not in again and node not in needed:
                needed.add(node)
                pending += node.all_input_nodes
        for node in sorted(needed, key=place.__getitem__):
            again[node] = copy = graph.node_copy(node, again.__getitem__)
            if node.name not in views:  # kernels of `plain` contain views of what they read
                copy.meta[RECOMPUTED] = True
            if node.name in names:
                copy.meta[WRITTEN] = True
        return again[end]

    for node in planned.graph.find_nodes(op="placeholder"):
        again[node] = graph.node_copy(node)
    for node in plain.graph.nodes:
        if node.op == "placeholder":
            continue
        for arg in node.all_input_nodes:
            if arg.op == "placeholder" and arg not in copies and arg.name in own:
                copies[arg] = recompute(own[arg.name])
        if all(arg in copies for arg in node.all_input_nodes):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        elif node.name in own:  # the plan saves the value, and lacks some inputs from which torch computes it
            copies[node] = recompute(own[node.name])
        if node.op == "get_attr" and not hasattr(planned, str(node.target)):
            setattr(planned, str(node.target), getattr(plain, str(node.target)))
    planned.graph = graph
