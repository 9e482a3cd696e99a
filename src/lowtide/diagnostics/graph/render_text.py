"""Rendering of a graph as text: from the results down to the leaves, each node once.

The input with the longest path upstream continues at the same indentation, so that a deep model fits the page. Other
inputs branch off. A node that is printed elsewhere appears as a reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lowtide.diagnostics.graph.graph_records import Node, Value, describe
from lowtide.units import format_bytes, format_count

if TYPE_CHECKING:
    from lowtide.diagnostics.graph.whole_graph import Graph


def tree(graph: Graph) -> str:
    """Format the graph as text: one line with its size, and an indented tree of its nodes."""
    return "\n".join([summary(graph), *_Tree(graph).lines()])


def summary(graph: Graph) -> str:
    """Format the number of nodes, and the memory that they keep, in one line."""
    apart = f", and {format_bytes(graph.parameter_bytes)} of parameters" if graph.parameter_bytes else ""
    return f"{format_count(len(graph.nodes), 'node')} keep {format_bytes(graph.held_bytes)}{apart}"


def format_node(node: Node) -> str:
    """Format a node in one line: `AddmmBackward0  keeps 16 KiB  in h.0.mlp`."""
    parts = [node.name]
    if node.held_bytes or not node.kept:
        parts.append(f"keeps {format_bytes(node.held_bytes)}" if node.held_bytes else "")
    if node.parameter_bytes:
        parts.append(f"({format_bytes(node.parameter_bytes)} of parameters)")
    if packed := sorted({kept.packed for kept in node.kept if kept.packed}):
        parts.append(f"packed as {', '.join(packed)}")
    if node.unrecorded:
        parts.append(f"+ {format_count(node.unrecorded, 'input')} not recorded")
    parts += [f"in {node.module}" if node.module else "", node.line]
    return "  ".join(part for part in parts if part)


def format_value(value: Value) -> str:
    """Format a leaf or a constant in one line: `W  [3, 4] float32`."""
    kind = "leaf" if value.requires_grad else "constant"
    return "  ".join(part for part in (value.name or kind, describe(value), kind if value.name else "") if part)


class _Tree:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._depth = depths(graph)
        self._main = {node.index: self._find_deepest_input(node) for node in graph.nodes}
        self._reader = self._choose_readers()

    def _find_deepest_input(self, node: Node) -> int:
        """Return the index of the input of `node` with the longest path to a leaf, or -1 without node inputs.

        The tree continues with this input at the same indentation; the other inputs branch off.
        """
        producers = [value.producer.index for value in node.inputs if value.producer is not None]
        return max(producers, key=lambda index: (self._depth[index], index), default=-1)

    def _choose_readers(self) -> dict[int, int]:
        """Map each node's index to the index of the node below which the tree prints it: its least indented reader."""
        indent = {root.producer.index: 0 for root in self._graph.roots if root.producer is not None}
        reader: dict[int, int] = {}
        for node in reversed(self._graph.nodes):
            for value in node.inputs:
                if value.producer is not None:
                    index = value.producer.index
                    deeper = indent[node.index] + (index != self._main[node.index])
                    if deeper <= indent.get(index, deeper) and not (index in indent and index not in reader):
                        indent[index], reader[index] = deeper, node.index
        return reader

    def lines(self) -> Iterator[str]:
        written: set[int] = set()
        for root in self._graph.roots:
            yield ""
            if root.producer is None:
                yield format_value(root)
                continue
            yield f"{root.name or 'result'}  {describe(root)}"
            if root.producer.index not in written:
                yield from self._format_chain(root.producer, written)
            else:
                yield f"#{root.producer.index} (above)"

    def _format_chain(self, start: Node, written: set[int]) -> Iterator[str]:
        pending: list[tuple[Node, str, str]] = [(start, "", "")]  # node, prefix of its line, prefix of the lines below
        while pending:
            node, first, rest = pending.pop()
            written.add(node.index)
            yield f"{first}#{node.index} {format_node(node)}"
            below: list[Node] = []
            for value in node.inputs:
                producer = value.producer
                if producer is None:
                    yield f"{rest}├─ {format_value(value)}"
                elif self._reader.get(producer.index) != node.index or producer.index in written:
                    yield f"{rest}├─ #{producer.index} {producer.name}  {describe(value)}"
                elif all(producer is not node for node in below):
                    below.append(producer)
            written.update(producer.index for producer in below)
            main = [(producer, rest, rest) for producer in below if producer.index == self._main[node.index]]
            branches = [(p, f"{rest}├─ ", f"{rest}│  ") for p in below if p.index != self._main[node.index]]
            pending += [*main, *reversed(branches)]  # a stack: last in, first out


def depths(graph: Graph) -> list[int]:
    """Return the number of nodes on the longest path to a leaf, for each node."""
    depth: list[int] = []
    for node in graph.nodes:
        depth.append(1 + max((depth[v.producer.index] for v in node.inputs if v.producer is not None), default=0))
    return depth
