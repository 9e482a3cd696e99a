"""Forward passes whose graph no backward pass reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.diagnostics.leaks.holder_history import History
from lowtide.diagnostics.leaks.inspection import RetainedObject
from lowtide.diagnostics.leaks.rules.rule_registry import RULES, Rule, rule

if TYPE_CHECKING:
    from lowtide.diagnostics.leaks.call_log import SiteStats


@rule(
    "LT001",
    priority=140,
    name="backward skipped",
    what="A training forward whose graph no backward pass reached, and which was still alive at the next forward.",
    why="The whole graph of the skipped step lives through the next forward, so two graphs are in memory at once: "
    "40 % of the peak for an MLP (bench/retention.py).",
    bad="loss = criterion(model(x), y)\nif not loss.isfinite():\n    continue",
    good="loss = criterion(model(x), y)\nif not loss.isfinite():\n    del loss\n    continue",
    fix="drop what holds the graph before the loop continues: `del {names}`",
)
class BackwardSkipped(Rule):
    """Rule for a graph that no backward pass has reached."""

    is_refuted_by_backward = True
    explains_missing_backward = True

    def matches(self, item: RetainedObject, history: History) -> bool:
        return item.has_graph and not item.backwards

    def refined(self, stats: SiteStats) -> Rule:
        return self if stats.n_reached else RULES["LT002"]


@rule(
    "LT025",
    name="several graphs until one backward",
    what="Losses of several batches are added up, and one backward pass goes through all of their graphs.",
    why="The graphs of all batches are in memory at once, although the gradients of a sum are the sum of gradients: "
    "backward for each batch frees its graph before the next forward.",
    bad="total = total + criterion(model(x), y) / n\n...\ntotal.backward()",
    good="(criterion(model(x), y) / n).backward()",
    fix="call `backward()` for each batch right after its forward (`(loss / n).backward()`): gradients add up. For the "
    "total, `loss.detach()` is enough",
)
class OneBackwardForSeveralLosses(Rule):
    """Rule for a sum of losses with separate graphs, recorded when backward begins at it."""


@rule(
    "LT002",
    name="forward with gradients that are never needed",
    what="A model is called with gradients on, and no backward pass ever reaches a graph made at that line: "
    "evaluation, metrics, a teacher or a reference model.",
    why="Without gradients each activation is freed as soon as the next layer has read it; with gradients all stay "
    "until the output is dropped. `model.eval()` does not change that.",
    bad="model.eval()\ncorrect += (model(x).argmax(1) == y).sum()",
    good="model.eval()\nwith torch.no_grad():\n    correct += (model(x).argmax(1) == y).sum()",
    fix="put the forward at {made} under `torch.no_grad()`",
)
class NoGradMissing(Rule):
    """Rule for forwards that never need a graph, recorded when the watch ends, from counts of calls by line."""
