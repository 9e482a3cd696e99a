"""Outputs of a model that live longer than their graph needs them."""

from lowtide.diagnostics.leaks.finding import Past, Rule
from lowtide.diagnostics.leaks.inspection import Survivor

SHARE = 0.05
"""Outputs smaller than this share of the graph are not worth a line of code."""


def _is_kept_output(survivor: Survivor, past: Past) -> bool:
    is_large = survivor.held_bytes >= SHARE * past.largest_graph_bytes
    return survivor.is_output and not survivor.is_input and is_large


ALIVE_DURING_BACKWARD = Rule(
    code="LT006",
    name="output alive during backward",
    what="A variable still holds a model's output when backward begins, and the graph itself does not need it.",
    why="Backward begins at the step's peak, and there the output is dead weight: 15 % of the peak for a small "
    "GPT-2, 19 % with checkpointing (bench/retention.py).",
    bad="outputs = model(**batch)\noutputs.loss.backward()",
    good="loss = model(**batch).loss\nloss.backward()",
    fix="drop `{name}` before backward (`loss = model(...).loss`, or `del {name}`); `lowtide.loss_only(model)` does it "
    "for transformers",
)

ALIVE_AT_NEXT_FORWARD = Rule(
    code="LT007",
    name="output alive across the next forward",
    what="An output of one step, with or without `.detach()`, is still held when the next forward begins.",
    why="It lives through the whole next forward, until its variable is assigned again. `.detach()` frees no memory: "
    "the values are the memory.",
    bad="predicted = model(x)\ncriterion(predicted, y).backward()",
    good="predicted = model(x)\ncriterion(predicted, y).backward()\ndel predicted",
    fix="`del {names}` at the end of the step",
    matches=_is_kept_output,
)
