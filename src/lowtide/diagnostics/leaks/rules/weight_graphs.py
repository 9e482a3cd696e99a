"""What is computed from a model's weights beside any forward."""

from lowtide.diagnostics.leaks.finding import Past, Rule
from lowtide.diagnostics.leaks.inspection import Survivor


def _is_of_weights(survivor: Survivor, past: Past) -> bool:
    return survivor.has_graph and not survivor.calls and not survivor.backwards


OF_WEIGHTS = Rule(
    code="LT022",
    name="average of weights with a graph",
    what="Something is computed from parameters outside of any forward, with gradients on, and kept: a moving average, "
    "a copy, a norm. No backward pass comes to it.",
    why="It holds the graph that computed it; a moving average holds those of all steps before, with what they saved.",
    bad="for name, parameter in model.named_parameters():\n    ema[name] = 0.99 * ema[name] + 0.01 * parameter",
    good="with torch.no_grad():\n    for name, parameter in model.named_parameters():\n"
    "        ema[name] = 0.99 * ema[name] + 0.01 * parameter",
    fix="compute `{name}` under `torch.no_grad()`",
    matches=_is_of_weights,
)
