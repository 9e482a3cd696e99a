"""That the pictures show the graph: every box once and apart from the others, the right lines, and all names."""

import itertools
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.diagnostics.graph import Graph, graph
from lowtide.diagnostics.graph.svg_layout import lay_out


@pytest.fixture
def residual() -> Graph:
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(2, 4)
    h = x @ w
    return graph(h + (h @ w).relu(), names={"w": w, 'a <b> & "c"': x})


def test_the_tree_writes_each_node_once_and_keeps_a_chain_at_one_depth(residual: Graph) -> None:
    assert [line.partition("  keeps")[0].partition("  (")[0] for line in str(residual).splitlines()] == [
        "4 nodes keep 96 B, and 64 B of parameters",
        "",
        "result  [2, 4] float32",
        "#3 AddBackward0",
        "├─ #0 MmBackward0  [2, 4] float32",
        "#2 ReluBackward0",
        "#1 MmBackward0",
        "├─ w  [4, 4] float32  leaf",
        "#0 MmBackward0",
        '├─ a <b> & "c"  [2, 4] float32  constant',
        "├─ w  [4, 4] float32  leaf",
    ]


def test_dot_has_the_edges_and_quotes_names(residual: Graph) -> None:
    text = residual.dot()
    ids = {value.name: f"v{value.index}" for value in residual.values if value.is_leaf}
    for arrow in (
        f"{ids['w']} -> n0",
        f"{ids['w']} -> n1",
        "n0 -> n1 ",
        "n0 -> n3 ",
        "n1 -> n2 ",
        "n2 -> n3 ",
        "n3 -> r0",
    ):
        assert f"  {arrow}" in text
    assert '[label="a <b> & \\"c\\"  [2, 4] float32  constant"' in text


def test_svg_is_well_formed_and_says_what_is_there(residual: Graph, tmp_path: Path) -> None:
    residual.save(tmp_path / "graph.svg")
    root = ET.parse(tmp_path / "graph.svg").getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("MmBackward0") == 2
    assert {"w", 'a <b> & "c"', "result", "4 nodes keep 96 B, and 64 B of parameters"} <= set(texts)
    residual.save(tmp_path / "graph.gv")
    assert (tmp_path / "graph.gv").read_text() == residual.dot()
    residual.save(tmp_path / "graph.txt")
    assert (tmp_path / "graph.txt").read_text() == f"{residual}\n"


@given(st.data())
def test_boxes_do_not_overlap_and_edges_lead_upwards(data: st.DataObject) -> None:
    layers = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=12))
    sizes = [(float(data.draw(st.integers(20, 90))), 20.0) for _ in layers]
    pairs = [(a, b) for a, b in itertools.permutations(range(len(layers)), 2) if layers[a] < layers[b]]
    edges = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    layout = lay_out(sizes, layers, edges)
    boxes = layout.boxes[: len(layers)]
    for one, other in itertools.combinations(boxes, 2):
        apart = (one.width + other.width) / 2
        assert one.layer != other.layer or abs(one.x - other.x) >= apart - 1e-6
        assert one.layer == other.layer or abs(one.y - other.y) >= 20
    for (start, end), route in zip(edges, layout.routes, strict=True):
        assert (route[0], route[-1]) == (start, end)
        heights = [layout.boxes[index].y for index in route]
        assert heights == sorted(heights, reverse=True)
    assert all(box.x - box.width / 2 >= -1e-6 and box.x + box.width / 2 <= layout.width + 1e-6 for box in boxes)
