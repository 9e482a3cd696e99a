"""Forwards whose graph no backward pass comes to."""

from lowtide.diagnostics.leaks.finding import Past, Rule
from lowtide.diagnostics.leaks.inspection import Survivor


def _is_unreached(survivor: Survivor, past: Past) -> bool:
    return survivor.has_graph and not survivor.backwards


BACKWARD_SKIPPED = Rule(
    code="LT001",
    name="backward skipped",
    what="A training forward whose graph no backward pass came to, and that was still there at the next forward.",
    why="The whole graph of the skipped step lives through the next forward, so two graphs are in memory at once: "
    "40 % of the peak for an MLP (bench/retention.py).",
    bad="loss = criterion(model(x), y)\nif not loss.isfinite():\n    continue",
    good="loss = criterion(model(x), y)\nif not loss.isfinite():\n    del loss\n    continue",
    fix="drop what holds the graph before going on: `del {names}`",
    matches=_is_unreached,
)

NO_GRAD_MISSING = Rule(
    code="LT002",
    name="forward with gradients that are never needed",
    what="A model is called with gradients on, and no backward pass ever comes to a graph made at that line: "
    "evaluation, metrics, a teacher or a reference model.",
    why="Without gradients each activation is freed as soon as the next layer has read it; with them all stay until "
    "the output is dropped. `model.eval()` does not change that.",
    bad="model.eval()\ncorrect += (model(x).argmax(1) == y).sum()",
    good="model.eval()\nwith torch.no_grad():\n    correct += (model(x).argmax(1) == y).sum()",
    fix="put the forward at {made} under `torch.no_grad()`",
)
