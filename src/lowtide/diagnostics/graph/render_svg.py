"""Rendering of a graph as SVG, without any other program.

Results are on top and leaves below. Boxes are functions, darker if they keep more bytes. Rounded boxes are values,
solid for leaves that get a gradient and dashed for constants. A leaf is drawn several times if its uses are far apart.
"""

from __future__ import annotations

from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

from lowtide.diagnostics.graph.graph_records import describe
from lowtide.diagnostics.graph.render_text import depths, summary
from lowtide.diagnostics.graph.svg_layout import Box, Layout, lay_out
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.diagnostics.graph.whole_graph import Graph

_FONT, _LETTER, _LINE = 12, 7.8, 16
_MARGIN = 24
_FAR = 3
"""Largest distance, in layers, between two uses of a leaf that share one box."""


class _Drawing:
    """Contents of the picture: texts, kinds and layers of boxes, and edges between them."""

    def __init__(self, graph: Graph) -> None:
        self.texts: list[list[str]] = []
        self.kinds: list[str] = []
        self.shades: list[float] = []
        self.layers: list[int] = []
        self.edges: list[tuple[int, int]] = []
        self.labels: list[str] = []
        depth = _compute_layers(graph)
        most = max((node.held_bytes for node in graph.nodes), default=0) or 1
        boxes = {}
        for node in graph.nodes:
            held = f"keeps {format_bytes(node.held_bytes)}" if node.held_bytes else ""
            text = [line for line in (node.name, held, node.module, node.line) if line]
            boxes[node.index] = self._add(text, "function", depth[node.index], node.held_bytes / most)
        leaves: dict[int, tuple[int, int]] = {}  # value -> its box, and the layer of its last use
        for node in graph.nodes:
            for value in node.inputs:
                if value.producer is not None:
                    self._connect(boxes[value.producer.index], boxes[node.index], describe(value))
                    continue
                box, used = leaves.get(value.index, (-1, -_FAR - 1))
                if depth[node.index] - used > _FAR:
                    kind = "leaf" if value.requires_grad else "constant"
                    text = [line for line in (value.name or kind, describe(value)) if line]
                    box = self._add(text, kind, depth[node.index] - 1)
                else:
                    self.layers[box] = min(self.layers[box], depth[node.index] - 1)
                leaves[value.index] = (box, depth[node.index])
                self._connect(box, boxes[node.index], "")
        for root in graph.roots:
            text = [root.name or "result", describe(root)]
            if root.producer is None:
                self._add(text, "leaf", 0)
            else:
                top = self._add(text, "result", depth[root.producer.index] + 1)
                self._connect(boxes[root.producer.index], top, "")

    def _add(self, text: list[str], kind: str, layer: int, shade: float = 0.0) -> int:
        self.texts.append(text)
        self.kinds.append(kind)
        self.layers.append(layer)
        self.shades.append(shade)
        return len(self.texts) - 1

    def _connect(self, start: int, end: int, label: str) -> None:
        if (start, end) not in self.edges[-8:]:  # two inputs from one box are drawn as one line
            self.edges.append((start, end))
            self.labels.append(label)

    def sizes(self) -> list[tuple[float, float]]:
        return [(max(map(len, text)) * _LETTER + 24, len(text) * _LINE + 12) for text in self.texts]


def _compute_layers(graph: Graph) -> list[int]:
    """Return the layer of each node, counted from 1 at the leaves: one below its lowest reader."""
    layer = depths(graph)
    placed: set[int] = set()
    for node in reversed(graph.nodes):
        for value in node.inputs:
            if value.producer is not None:
                index = value.producer.index
                layer[index] = min(layer[index], layer[node.index] - 1) if index in placed else layer[node.index] - 1
                placed.add(index)
    return layer


_STYLE = f"""<style>
text {{ font: {_FONT}px ui-sans-serif, system-ui, sans-serif; text-anchor: middle; fill: #1c2733; }}
.function {{ fill: #2a78b8; stroke: #1f5f94; }} .edge {{ fill: none; stroke: #8795a3; marker-end: url(#head); }}
.leaf {{ fill: #e3f4e8; stroke: #2f8f4e; }} .constant {{ fill: #fff; stroke: #8795a3; stroke-dasharray: 4 3; }}
.result {{ fill: #fff3d6; stroke: #c08a1e; }} .label {{ font-size: 10px; fill: #5b6a78; }}
.title {{ text-anchor: start; fill: #5b6a78; }}
</style>"""

_HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 8 4 0 8z" fill="#8795a3"/></marker></defs>'
)


def svg(graph: Graph) -> str:
    """Draw the graph as a complete SVG document."""
    drawing = _Drawing(graph)
    layout = lay_out(drawing.sizes(), drawing.layers, drawing.edges)
    title = summary(graph)
    width = max(layout.width, len(title) * _LETTER) + 2 * _MARGIN
    height = layout.height + 2 * _MARGIN + _LINE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(title)}">',
        _STYLE,
        _HEAD,
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text class="title" x="{_MARGIN}" y="{_MARGIN}">{escape(title)}</text>',
        f'<g transform="translate({_MARGIN} {_MARGIN + _LINE})">',
    ]
    parts += [_draw_edge(layout, route, label) for route, label in zip(layout.routes, drawing.labels, strict=True)]
    for box, text, kind, shade in zip(layout.boxes, drawing.texts, drawing.kinds, drawing.shades, strict=False):
        parts.append(_draw_box(box, text, kind, shade))
    return "\n".join([*parts, "</g>", "</svg>"]) + "\n"


def _draw_box(box: Box, text: list[str], kind: str, shade: float) -> str:
    left, top = box.x - box.width / 2, box.y - box.height / 2
    radius = 4 if kind == "function" else box.height / 2
    opacity = f' fill-opacity="{0.12 + 0.5 * shade:.2f}"' if kind == "function" else ""
    lines = [
        f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" '
        f'rx="{radius:.0f}"{opacity}/>'
    ]
    for number, line in enumerate(text):
        weight = ' font-weight="600"' if number == 0 else ""
        y = top + 6 + _LINE * number + _FONT
        lines.append(f'<text x="{box.x:.1f}" y="{y:.1f}"{weight}>{escape(line)}</text>')
    return "".join(lines)


def _draw_edge(layout: Layout, route: list[int], label: str) -> str:
    points = []
    for place, index in enumerate(route):
        box = layout.boxes[index]
        if place:  # the lower side of its target, or of a bend
            points.append((box.x, box.y + box.height / 2))
        if place < len(route) - 1:
            points.append((box.x, box.y - box.height / 2))
    path = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = (y0 + y1) / 2
        path.append(f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}" if y0 != y1 else "")
    text = ""
    if label:
        (x0, y0), (x1, y1) = points[0], points[1]
        text = f'<text class="label" x="{(x0 + x1) / 2:.1f}" y="{(y0 + y1) / 2 + 3:.1f}">{escape(label)}</text>'
    return f'<path class="edge" d="{" ".join(filter(None, path))}"/>{text}'
