"""Rules for state that is passed from step to step together with its graph."""

from lowtide.diagnostics.leaks.holder_history import History
from lowtide.diagnostics.leaks.retained_object import RetainedObject
from lowtide.diagnostics.leaks.rules.rule_registry import Rule, rule


@rule(
    "LT011",
    priority=80,
    name="state carried with its graph",
    what="A tensor passed to the model, such as a recurrent state, still has the graph of the previous step.",
    why="The graph gets one step longer with each step, and so does the time backward takes.",
    bad="output, state = model(x, state)\nloss(output).backward(retain_graph=True)",
    good="output, state = model(x, state.detach())\nloss(output).backward()",
    fix="`{name} = {name}.detach()` before the next forward, and remove `retain_graph` at {backward}",
)
class CarriedState(Rule):
    """Rule for a model's input that is its own earlier output, with a graph that backward has already gone through.

    An output of one model that is passed to another does not match, because the other model's loss needs its graph.
    """

    claims_graph = True
    fix_of_part = (
        "detach each tensor of `{name}` before the next forward (`{name} = tuple(t.detach() for t in {name})`), and "
        "remove `retain_graph` at {backward}"
    )

    fix_of_module_part = (
        "`self.{name} = tuple(t.detach() for t in self.{name})` before the next forward, and remove "
        "`retain_graph` at {backward}"
    )
    fix_of_module = (
        "`self.{name} = self.{name}.detach()` before the next forward, and remove `retain_graph` at {backward}"
    )

    def matches(self, item: RetainedObject, history: History) -> bool:
        return item.has_graph and bool(item.backwards) and self.names_holder(item)

    def names_holder(self, item: RetainedObject) -> bool:
        return item.is_fed_back or is_carried_by_module(item)

    def choose_fix(self, item: RetainedObject, history: History) -> str:
        """Return the advice for `item`. It differs if an attribute of a module holds the state."""
        if item.holder is not None and item.holder.kind == "module":
            return self.fix_of_module_part if item.holder.text.endswith("]") else self.fix_of_module
        return super().choose_fix(item, history)


def is_carried_by_module(item: RetainedObject) -> bool:
    """Return True if an attribute of a module holds a graph of several calls that backward has reached."""
    is_attribute = item.is_held_as("module") and item.buffer is None and not (item.holder and item.holder.gathers)
    return is_attribute and item.goes_through_calls and bool(item.backwards)
