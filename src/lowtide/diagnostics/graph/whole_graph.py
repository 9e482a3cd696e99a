"""The whole autograd graph of some tensors: its leaves, its memory, and its renderings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from lowtide.diagnostics.graph import render_dot, render_svg, render_text
from lowtide.diagnostics.graph.graph_records import Node, Value, count_unique_bytes
from lowtide.units import format_bytes


class Graph:
    """Autograd graph of one or several tensors at the time of the call of `lowtide.graph`. `print` shows it as a tree.

    The record keeps torch's nodes alive, and with them the tensors that they have saved. A backward pass still frees
    saved tensors as usual.
    """

    def __init__(self, roots: tuple[Value, ...], nodes: tuple[Node, ...], values: tuple[Value, ...]) -> None:
        self.roots = roots
        self.nodes = nodes
        """Nodes in the order in which forward ran."""
        self.values = values

    @property
    def leaves(self) -> tuple[Value, ...]:
        """Values that receive gradients: parameters and other leaves that need a gradient."""
        return tuple(value for value in self.values if value.is_leaf and value.requires_grad)

    @property
    def constants(self) -> tuple[Value, ...]:
        """Inputs of the graph that need no gradient. Only those that a node keeps are known."""
        return tuple(value for value in self.values if not value.requires_grad)

    @property
    def held_bytes(self) -> int:
        """Bytes that the graph keeps, counting each storage once and without `parameter_bytes`."""
        return count_unique_bytes(kept for node in self.nodes for kept in node.kept if not kept.parameter)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters, buffers and other leaves that the graph keeps. They are in memory anyway."""
        return count_unique_bytes(kept for node in self.nodes for kept in node.kept if kept.parameter)

    def consumers(self, value: Value) -> tuple[Node, ...]:
        """Return the nodes that have `value` as an input."""
        return tuple(node for node in self.nodes if any(known is value for known in node.inputs))

    def upstream(self, start: Node | Value) -> Iterator[Value]:
        """Yield all values from which `start` was computed, each once, nearest first."""
        pending = list(start.inputs if isinstance(start, Node) else (start.producer.inputs if start.producer else ()))
        seen = {value.index for value in pending}
        for value in pending:  # grows during the loop
            yield value
            for further in value.producer.inputs if value.producer else ():
                if further.index not in seen:
                    seen.add(further.index)
                    pending.append(further)

    def by_module(self) -> dict[str, int]:
        """Return the bytes that the graph keeps by module, largest first.

        Each storage counts for the first node that keeps it. Bytes that belong to no known module are under "".
        """
        totals: dict[str, int] = defaultdict(int)
        counted: set[int] = set()
        for node in self.nodes:
            for kept in node.kept:
                if not kept.parameter and kept.storage not in counted:
                    counted.add(kept.storage)
                    totals[node.module] += kept.bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def dot(self) -> str:
        """Return the graph in the DOT language, for Graphviz and related programs."""
        return render_dot.dot(self)

    def svg(self) -> str:
        """Return a picture of the graph as a complete SVG document."""
        return render_svg.svg(self)

    def save(self, path: str | Path) -> None:
        """Write the graph to `path`: a picture for `.svg`, DOT for `.dot` and `.gv`, else the text tree."""
        path = Path(path)
        kind = path.suffix.lower()
        text = self.svg() if kind == ".svg" else self.dot() if kind in (".dot", ".gv") else f"{self}\n"
        path.write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        return render_text.tree(self)

    def __repr__(self) -> str:
        held = format_bytes(self.held_bytes)
        return f"Graph({len(self.nodes)} nodes, {len(self.values)} values, holds {held})"

    def _repr_svg_(self) -> str:
        """Return the picture that a notebook shows."""
        return self.svg()
