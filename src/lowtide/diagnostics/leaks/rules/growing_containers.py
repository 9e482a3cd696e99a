"""Lists and sums that gather graphs or outputs step by step."""

from collections.abc import Sequence
from itertools import pairwise

from lowtide.diagnostics.leaks.finding import Past, Rule
from lowtide.diagnostics.leaks.inspection import Survivor

GROWTHS = 3
"""Inspections in a row at which a list must have grown."""


def _is_list_of_graphs(survivor: Survivor, past: Past) -> bool:
    """A list that is made anew in each step neither grows nor has two graphs of one call."""
    return _is_gathered(survivor) and past.entries[-1] > 0 and (past.n_alike > 1 or past.entries[-1] > past.entries[0])


def _is_sum(survivor: Survivor, past: Past) -> bool:
    """One step may well call a model twice, and then has a backward pass for both."""
    is_over_steps = len(survivor.steps) > 1 or not survivor.backwards
    is_repeated = len(survivor.calls) > len({id(call.stats) for call in survivor.calls})
    return _is_gathered(survivor) and survivor.is_scalar and is_over_steps and is_repeated


def _is_gathered(survivor: Survivor) -> bool:
    """Where gradients have a graph, losses are gathered to be differentiated, as in learning to learn."""
    return survivor.has_graph and not any(backward.create_graph for backward in survivor.backwards)


def _is_growing(survivor: Survivor, past: Past) -> bool:
    return not survivor.has_graph and _grows(past.held_bytes) and _grows(past.entries)


def _grows(sizes: Sequence[int]) -> bool:
    last = sizes[-GROWTHS:]
    return len(last) == GROWTHS and all(a < b for a, b in pairwise(last))


LIST_OF_GRAPHS = Rule(
    code="LT008",
    name="list of tensors that have a graph",
    what="A list, dict or set holds tensors whose graph has not been freed.",
    why="Each entry holds the whole graph of its step.",
    bad="losses.append(criterion(model(x), y))",
    good="losses.append(criterion(model(x), y).item())",
    fix="put numbers in `{name}`: `.item()` (`.detach()` drops the graph, and keeps all memory that the value is in)",
    matches=_is_list_of_graphs,
)

SUM_OF_GRAPHS = Rule(
    code="LT009",
    name="running sum of tensors that have a graph",
    what="A running total was added to over several forwards without a backward pass that frees their graphs.",
    why="The sum's graph is the graphs of all its summands. After an ordinary `loss.backward()` the same line costs "
    "nothing.",
    bad="total = total + criterion(model(x), y)",
    good="total = total + criterion(model(x), y).detach()",
    fix="add numbers to `{name}`: `.detach()` or `.item()`",
    matches=_is_sum,
)

GROWING_LIST = Rule(
    code="LT021",
    name="list that grows by tensors without a graph",
    what="A list, dict or cache holds more and more tensors. They have no graph, and their own memory counts.",
    why="It grows without end. `.detach()` does not help: the values are the memory.",
    bad="predictions.append(model(x).detach())",
    good="predictions.append(model(x).argmax(-1).cpu())",
    fix="put less in `{name}`: a metric, an index, or a copy on the host",
    matches=_is_growing,
)
