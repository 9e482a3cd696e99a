"""Rule for values computed from a model's weights outside any forward pass."""

from lowtide.diagnostics.leaks.holder_history import History
from lowtide.diagnostics.leaks.retained_object import RetainedObject
from lowtide.diagnostics.leaks.rules.rule_registry import Rule, rule


@rule(
    "LT022",
    priority=130,
    name="average of weights with a graph",
    what="A moving average, copy or norm of parameters is computed outside any forward, with gradients enabled, and "
    "kept. No backward pass reaches its graph.",
    why="The value keeps its graph in memory; a moving average keeps the graphs of all earlier steps.",
    bad="for name, parameter in model.named_parameters():\n    ema[name] = 0.99 * ema[name] + 0.01 * parameter",
    good="with torch.no_grad():\n    for name, parameter in model.named_parameters():\n"
    "        ema[name] = 0.99 * ema[name] + 0.01 * parameter",
    fix="compute `{name}` under `torch.no_grad()`",
)
class WeightAverage(Rule):
    """Rule for averages of weights that have a graph, such as an EMA that is updated without `torch.no_grad()`.

    No model call created the graph, and no backward pass reaches it.
    """

    def matches(self, item: RetainedObject, history: History) -> bool:
        is_outside = item.has_model or len(item.steps) > 1  # without a model every graph is made outside its calls
        return is_outside and item.has_graph and not item.calls and not item.backwards and not item.is_older
