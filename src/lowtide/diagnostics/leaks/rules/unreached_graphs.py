"""Rules for forward passes whose graph no backward pass reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.diagnostics.leaks.holder_history import History
from lowtide.diagnostics.leaks.retained_object import RetainedObject
from lowtide.diagnostics.leaks.rules.rule_registry import RULES, Rule, rule

if TYPE_CHECKING:
    from lowtide.diagnostics.leaks.call_log import SiteStats


@rule(
    "LT001",
    priority=140,
    name="backward skipped",
    what="No backward pass reached the graph of a training forward, and the graph is still alive at the next forward.",
    why="The whole graph of the skipped step stays in memory through the next forward, so two graphs are alive at "
    "once: 40 % of the peak for an MLP (bench/retention.py).",
    bad="loss = criterion(model(x), y)\nif not loss.isfinite():\n    continue",
    good="loss = criterion(model(x), y)\nif not loss.isfinite():\n    del loss\n    continue",
    fix="release the graph before the loop continues: {release}",
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
    name="graphs of several batches kept for one backward",
    what="The losses of several batches are summed, and a single backward pass goes through all of their graphs.",
    why="The graphs of all batches are in memory at once. A backward pass per batch gives the same gradients, because "
    "they accumulate, and frees each graph before the next forward.",
    bad="total = total + criterion(model(x), y) / n\n...\ntotal.backward()",
    good="(criterion(model(x), y) / n).backward()",
    fix="call `backward()` for each batch right after its forward (`(loss / n).backward()`): gradients accumulate. Use "
    "`loss.detach()` for the total",
)
class OneBackwardForSeveralLosses(Rule):
    """Rule for a sum of several losses with separate graphs, recorded when a backward pass of the sum begins."""


@rule(
    "LT002",
    name="forward that needs torch.no_grad()",
    what="A model is called with gradients enabled, and no backward pass ever reaches a graph made at that line: "
    "evaluation, metrics, a teacher or a reference model.",
    why="Under `torch.no_grad()` each activation is freed as soon as the next layer has read it. Otherwise all of them "
    "stay in memory until the output is freed. `model.eval()` does not change that.",
    bad="model.eval()\ncorrect += (model(x).argmax(1) == y).sum()",
    good="model.eval()\nwith torch.no_grad():\n    correct += (model(x).argmax(1) == y).sum()",
    fix="run the forward at {made} under `torch.no_grad()`",
)
class NoGradMissing(Rule):
    """Rule for forwards that never need a graph, recorded when `lowtide.watch` ends, from counts of calls by line."""
