"""Rendering of a graph in the DOT language: boxes are functions; ellipses are leaves, constants and results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.diagnostics.graph.graph_records import describe
from lowtide.diagnostics.graph.render_text import format_value
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.diagnostics.graph.whole_graph import Graph


def dot(graph: Graph) -> str:
    """Format the graph in the DOT language. Edges lead from inputs to results and are labelled with shapes."""
    lines = ["digraph {", '  node [fontname="sans-serif", fontsize=11]', '  edge [fontname="sans-serif", fontsize=9]']
    for value in graph.values:
        if value.producer is None:
            style = ", style=bold" if value.requires_grad else ", style=dashed"
            lines.append(f"  v{value.index} [label={_quote(format_value(value))}, shape=ellipse{style}]")
    for node in graph.nodes:
        held = f"\nkeeps {format_bytes(node.held_bytes)}" if node.held_bytes else ""
        module = f"\n{node.module}" if node.module else ""
        lines.append(f"  n{node.index} [label={_quote(node.name + held + module)}, shape=box]")
    for node in graph.nodes:
        for value in node.inputs:
            if value.producer is None:
                lines.append(f"  v{value.index} -> n{node.index}")
            else:
                lines.append(f"  n{value.producer.index} -> n{node.index} [label={_quote(describe(value))}]")
    for number, root in enumerate(graph.roots):
        if root.producer is not None:
            label = _quote(f"{root.name or 'result'}  {describe(root)}")
            lines += [f"  r{number} [label={label}, shape=ellipse]", f"  n{root.producer.index} -> r{number}"]
    return "\n".join([*lines, "}"]) + "\n"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
