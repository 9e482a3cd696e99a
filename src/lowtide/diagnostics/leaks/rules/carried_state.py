"""State that is carried from step to step with its graph."""

from lowtide.diagnostics.leaks.finding import Past, Rule
from lowtide.diagnostics.leaks.inspection import Survivor


def _is_carried(survivor: Survivor, past: Past) -> bool:
    return survivor.has_graph and survivor.is_input and bool(survivor.backwards)


CARRIED_STATE = Rule(
    code="LT011",
    name="state carried with its graph",
    what="The model is given a tensor that still has the graph of the step before: a recurrent state, a memory.",
    why="The graph grows by one step each step, and so does backward's time.",
    bad="output, state = model(x, state)\nloss(output).backward(retain_graph=True)",
    good="output, state = model(x, state.detach())\nloss(output).backward()",
    fix="`{name} = {name}.detach()` before the next forward, and no `retain_graph` at {backward}",
    matches=_is_carried,
)
