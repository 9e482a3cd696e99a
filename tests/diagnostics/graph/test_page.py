"""The page about graphs shows the real output."""

import doctest
from pathlib import Path

import torch

import lowtide

DOCS = Path(__file__).parents[3] / "docs"


def test_the_examples_of_the_page() -> None:
    torch.manual_seed(0)
    failed, run = doctest.testfile(str(DOCS / "graph.md"), module_relative=False, encoding="utf-8")
    assert (failed, run > 8) == (0, True)


def test_the_picture_of_the_page() -> None:
    w, x, b = torch.ones(3, 4, requires_grad=True), torch.ones(4), torch.zeros(3, requires_grad=True)
    y = w @ x + b
    picture = lowtide.graph(y, names={"W": w, "x": x, "b": b, "y": y}).svg()
    assert picture == (DOCS / "graph.svg").read_text(encoding="utf-8")
