"""Rule for small views that keep large storages alive."""

from lowtide.diagnostics.leaks.holder_history import History
from lowtide.diagnostics.leaks.retained_object import RetainedObject
from lowtide.diagnostics.leaks.rules.rule_registry import Rule, rule


@rule(
    "LT010",
    priority=150,
    name="view that keeps a large storage",
    what="A slice of an output is kept, and it covers less than half of the storage that it keeps alive.",
    why="A view, even a detached one, keeps the whole storage of the original tensor in memory.",
    bad="predictions.append(logits[:, -1].detach())",
    good="predictions.append(logits[:, -1].detach().clone())",
    fix="store a copy in `{name}` instead of a view: `.detach().clone()`",
)
class PinningView(Rule):
    """Rule for views that cover less than half of an output's storage."""

    def matches(self, item: RetainedObject, history: History) -> bool:
        if item.is_held_as("variable") and item.holder is not None and not item.holder.containers:
            return False  # a variable that the next step assigns again, such as a loss; LT007 if it outlives that
        return not item.has_graph and item.is_view and not item.is_input and item.is_output
