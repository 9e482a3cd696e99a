"""State carried from step to step together with its graph."""

from lowtide.diagnostics.leaks.holder_history import History
from lowtide.diagnostics.leaks.inspection import RetainedObject
from lowtide.diagnostics.leaks.rules.rule_registry import Rule, rule


@rule(
    "LT011",
    priority=80,
    name="state carried with its graph",
    what="The model receives a tensor that still has the graph of the previous step: a recurrent state, a memory.",
    why="The graph grows by one step each step, and so does the time of backward.",
    bad="output, state = model(x, state)\nloss(output).backward(retain_graph=True)",
    good="output, state = model(x, state.detach())\nloss(output).backward()",
    fix="`{name} = {name}.detach()` before the next forward, and no `retain_graph` at {backward}",
)
class CarriedState(Rule):
    """Rule for a model input with a graph that a backward pass went through."""

    claims_graph = True
    fix_of_part = (
        "detach each tensor of `{name}` before the next forward (`{name} = tuple(t.detach() for t in {name})`), and no "
        "`retain_graph` at {backward}"
    )

    def matches(self, item: RetainedObject, history: History) -> bool:
        return item.has_graph and item.is_input and bool(item.backwards)

    def names_holder(self, item: RetainedObject) -> bool:
        return item.is_input
