"""Small views that keep large memory."""

from lowtide.diagnostics.leaks.finding import Past, Rule
from lowtide.diagnostics.leaks.inspection import Survivor


def _is_pinning(survivor: Survivor, past: Past) -> bool:
    return not survivor.has_graph and survivor.is_view and not survivor.is_input and survivor.is_output


PINNING_VIEW = Rule(
    code="LT010",
    name="view that keeps a large storage",
    what="A slice of an output is kept; it shows less than half of the memory that it keeps.",
    why="A view, also a detached one, holds all of the memory that it was cut out of.",
    bad="predictions.append(logits[:, -1].detach())",
    good="predictions.append(logits[:, -1].detach().clone())",
    fix="copy what is kept in `{name}`: `.detach().clone()`",
    matches=_is_pinning,
)
