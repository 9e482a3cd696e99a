"""Rules for model outputs that stay alive after their last use."""

from lowtide.diagnostics.leaks.holder_history import History
from lowtide.diagnostics.leaks.holders import Holder
from lowtide.diagnostics.leaks.retained_object import RetainedObject
from lowtide.diagnostics.leaks.rules.rule_registry import Rule, rule
from lowtide.diagnostics.leaks.variable_reads import Reads

SHARE = 0.05
"""Outputs with a smaller share of the graph's bytes are not reported."""


@rule(
    "LT006",
    name="output alive during backward",
    what="A variable still holds a model output when backward begins, although backward does not need it.",
    why="Backward begins at the step's memory peak, and the output adds to it: 15 % of the peak for a small GPT-2, "
    "19 % with checkpointing (bench/retention.py).",
    bad="outputs = model(**batch)\noutputs.loss.backward()",
    good="loss = model(**batch).loss\nloss.backward()",
    fix="compute everything that uses `{name}` before backward, then `del {name}`{remedy}",
)
class AliveDuringBackward(Rule):
    """Rule for model outputs that a variable still holds when backward begins, although backward does not need them."""


@rule(
    "LT007",
    priority=170,
    name="output alive through the next step",
    what="An output of one step, detached or not, is still alive when the next step's backward begins.",
    why="Memory peaks near that moment, and the output adds to the peak: 6 % for an MLP (bench/retention.py). "
    "`.detach()` does not free the output's own memory. A variable that the next forward reassigns costs nothing at "
    "the peak.",
    bad="predicted = model(x)\ncriterion(predicted, y).backward()\nlast = predicted.detach()",
    good="predicted = model(x)\ncriterion(predicted, y).backward()\nlast = predicted.mean().item()",
    fix="{release} at the end of the step",
)
class AliveInNextStep(Rule):
    """Rule for a large output without a graph that is not an input of the next step."""

    must_last = True
    ends_without_change = True
    superseded_by = "LT006"
    fix_of_part = "`{part} = None` at the end of the step, or store a number or a small copy there"
    fix_of_container = "clear `{name}` at the end of the step, or store a number or a small copy in it"
    fix_of_context = "store a number or a small copy in the context variable"
    fix_of_function = (
        "delete the function that holds `{name}` at the end of the step, or let it capture a number instead"
    )

    fix_of_last = "set `{names}` to None when the next step begins: code after the loop reads its last value"

    def names_part(self, holder: Holder, history: History) -> bool:
        """Return True if the advice is about the entry or attribute that holds the tensors, not about the variable.

        For a container of several tensors, the advice is to delete all of it.
        """
        return "[..]" not in holder.part and super().names_part(holder, history)

    def choose_fix(self, item: RetainedObject, history: History) -> str:
        """Return the advice for `item`: in most cases, to delete the variable.

        It differs for closures, context variables, and variables that code after the loop reads.
        """
        if item.is_held_as("context variable"):
            return self.fix_of_context
        if item.is_held_as("closure"):
            return self.fix_of_function
        is_last = any(other.reads is Reads.AFTER_THE_LOOP and not other.is_part for other in item.holders)
        return self.fix_of_last if is_last else super().choose_fix(item, history)

    def matches(self, item: RetainedObject, history: History) -> bool:
        is_large = item.held_bytes >= SHARE * history.largest_graph_bytes
        holder = item.holder
        if holder is not None and (holder.is_cache or (holder.is_part and history.n_steps > 1)):
            return False  # kept over the steps on purpose
        if holder is not None and holder.gathers and len(history.held_bytes) == 1:
            return False  # may be a buffer; a list that each step creates holds outputs of one step only
        is_needed = item.is_state or any(h.reads is Reads.NEXT_STEP and not h.is_part for h in item.holders)
        return item.is_output and not item.is_input and not is_needed and is_large
