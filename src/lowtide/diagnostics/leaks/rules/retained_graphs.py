"""Rules for graphs that stay in memory after a backward pass went through them."""

from lowtide._torch.tensors import get_storage_number
from lowtide.diagnostics.leaks.holder_history import History
from lowtide.diagnostics.leaks.holders import Holder
from lowtide.diagnostics.leaks.retained_object import RetainedObject
from lowtide.diagnostics.leaks.rules.long_lived_outputs import SHARE
from lowtide.diagnostics.leaks.rules.rule_registry import Rule, rule


@rule(
    "LT003",
    priority=110,
    name="retain_graph keeps the graph",
    what="A backward pass ran with `retain_graph=True` (or `create_graph=True`, which implies it), and no later "
    "backward pass freed the graph.",
    why="All tensors saved for backward stay in memory through the next forward, until the loss is deleted: a quarter "
    "of a step's peak in bench/retention.py.",
    bad="loss.backward(retain_graph=True)\noptimizer.step()",
    good="loss.backward()\noptimizer.step()",
    fix="{release} after the last backward pass; if that is {backward}, remove `retain_graph=True`",
)
class RetainGraph(Rule):
    """Rule for a graph that a backward pass retains on request."""

    fix_of_part = (
        "`.detach()` the tensors in `{name}`, and remove `retain_graph=True` at {backward} if no backward pass follows"
    )
    fix_of_second_order = "{release} after the last backward pass"
    fix_of_earlier_forward = (
        "`.detach()` the result of the forward at {made}, and remove `retain_graph=True` at {backward}: each later "
        "backward pass goes through that forward's graph again"
    )
    fix_of_earlier_steps = (
        "`.detach()` what later steps use of `{names}`, and remove `retain_graph=True` at {backward}: each backward "
        "pass goes through graphs of earlier steps again"
    )
    follows_from = ("LT011", "LT031")

    def choose_fix(self, item: RetainedObject, history: History) -> str:
        """Return the advice for `item`. It differs for graphs of earlier steps, and for `create_graph=True`."""
        if item.is_used_again and not any(b.create_graph for b in item.backwards):
            # The forward of each step needs its graph there; only values for later steps must have none.
            return self.fix_of_earlier_steps if item.calls[0].stats.n_calls > 1 else self.fix_of_earlier_forward
        fix = super().choose_fix(item, history)
        is_needed = fix == self.fix and all(b.create_graph for b in item.backwards if b.retain_graph)
        return self.fix_of_second_order if is_needed else fix

    def matches(self, item: RetainedObject, history: History) -> bool:
        return item.has_graph and any(b.retain_graph for b in item.backwards) and is_sizable(item, history)

    def names_part(self, holder: Holder, history: History) -> bool:
        """Return True if the advice is about one entry, because several steps use the same container."""
        # A container that each step creates can be deleted.
        is_the_same = len(history.held_bytes) > 1 and not history.has_changed
        has_grown = holder.gathers and bool(holder.containers) and history.entries[-1] > history.entries[0]
        return (is_the_same or has_grown) and super().names_part(holder, history)


@rule(
    "LT004",
    priority=30,
    name="graph left in .grad (create_graph)",
    what="`backward(create_graph=True)` left gradients in `.grad` that still have a graph at the next forward.",
    why="The parameter holds its gradient, and the gradient's graph holds the parameter and all activations of the "
    "step: a reference cycle that Python's garbage collector cannot see.",
    bad="loss.backward(create_graph=True)",
    good="gradients = torch.autograd.grad(loss, parameters, create_graph=True)",
    fix="use `torch.autograd.grad(..., create_graph=True)` at {backward}, or set `.grad` to None after the step",
)
class GraphInGradients(Rule):
    """Rule for gradients of parameters if the gradients themselves have a graph (`create_graph=True`)."""

    def matches(self, item: RetainedObject, history: History) -> bool:
        return item.is_of_gradients


@rule(
    "LT005",
    priority=120,
    name="graph only partly freed by backward",
    what="A backward pass freed only part of the graph: it was called with `inputs=`, or the graph has a branch that "
    "leads to another output.",
    why="Backward frees only the nodes it reaches. The others hold 21 % of the peak for an MLP (bench/retention.py).",
    bad="loss.backward(inputs=list(model.head.parameters()))",
    good="loss.backward(inputs=list(model.head.parameters()))\ndel loss",
    fix="{release} after the backward pass at {backward}, or run the unused branch under `torch.no_grad()`",
)
class PartialBackward(Rule):
    """Rule for a graph that a backward pass freed only in part."""

    def matches(self, item: RetainedObject, history: History) -> bool:
        return item.has_graph and bool(item.backwards) and is_sizable(item, history)


def is_sizable(item: RetainedObject, history: History) -> bool:
    """Return True if a large part of a forward's graph is still in memory.

    If two losses run backward in turn, the first one with `retain_graph=True`, the second pass frees all but the end of
    the first loss's graph. Outputs don't count in that case, because they live until their variables are reassigned.
    """
    passes = [call.backwards for call in item.calls if call.backwards]
    in_turns = any(sequence[0].retain_graph and not sequence[-1].retain_graph for sequence in passes)
    if not in_turns:
        return history.held_bytes[-1] >= SHARE * history.largest_graph_bytes
    outputs = {
        get_storage_number(kept) for call in item.calls for memory in call.memory if (kept := memory()) is not None
    }
    held_bytes = sum(n_bytes for number, n_bytes in item.storages.items() if number not in outputs)
    return held_bytes >= 0.5 * history.largest_graph_bytes
