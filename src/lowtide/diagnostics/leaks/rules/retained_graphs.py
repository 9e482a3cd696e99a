"""Graphs that a backward pass went through and left behind."""

from lowtide.diagnostics.leaks.finding import Past, Rule
from lowtide.diagnostics.leaks.inspection import Survivor


def _is_retained(survivor: Survivor, past: Past) -> bool:
    return survivor.has_graph and any(b.retain_graph for b in survivor.backwards)


def _is_partial(survivor: Survivor, past: Past) -> bool:
    return survivor.has_graph and bool(survivor.backwards)


def _is_gradient(survivor: Survivor, past: Past) -> bool:
    return survivor.is_of_gradients


RETAIN_GRAPH = Rule(
    code="LT003",
    name="retain_graph keeps the graph",
    what="A backward pass with `retain_graph=True` (or `create_graph=True`, which implies it), and no later one that "
    "frees the graph.",
    why="All that was saved for backward stays until the loss is dropped, through the next forward: a quarter of a "
    "step's peak in bench/retention.py.",
    bad="loss.backward(retain_graph=True)\noptimizer.step()",
    good="loss.backward()\noptimizer.step()",
    fix="`del {names}` after the last backward pass; if that is the one at {backward}, take `retain_graph=True` away",
    matches=_is_retained,
)

CREATE_GRAPH = Rule(
    code="LT004",
    name="graph left in .grad (create_graph)",
    what="`backward(create_graph=True)` left gradients that have a graph of their own, alive at the next forward.",
    why="The parameter holds its gradient, whose graph holds the parameter and all activations of the step: a cycle "
    "that Python's garbage collector cannot see.",
    bad="loss.backward(create_graph=True)",
    good="gradients = torch.autograd.grad(loss, parameters, create_graph=True)",
    fix="use `torch.autograd.grad(..., create_graph=True)` at {backward}, or set the `.grad` to None after the step",
    matches=_is_gradient,
)

PARTIAL_BACKWARD = Rule(
    code="LT005",
    name="graph that backward reached only in part",
    what="A backward pass freed a part of the graph: it was given `inputs=`, or another output's branch was not in it.",
    why="What backward does not come to it does not free: 21 % of the peak for an MLP (bench/retention.py).",
    bad="loss.backward(inputs=list(model.head.parameters()))",
    good="loss.backward(inputs=list(model.head.parameters()))\ndel loss",
    fix="`del {names}` after the backward pass at {backward}, or run what needs no gradients under `torch.no_grad()`",
    matches=_is_partial,
)
