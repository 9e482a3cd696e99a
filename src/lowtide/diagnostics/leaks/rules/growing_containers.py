"""Rules for containers and sums that accumulate graphs or outputs from step to step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.diagnostics.leaks.holder_history import GROWTHS, LEAST_GATHERED_BYTES, History, grows
from lowtide.diagnostics.leaks.retained_object import RetainedObject
from lowtide.diagnostics.leaks.rules.rule_registry import RULES, Rule, rule

if TYPE_CHECKING:
    from lowtide.diagnostics.leaks.call_log import SiteStats

CONCATENATIONS = 5
"""Number of consecutive inspections at which a single tensor must have grown to be reported. With batches of several
sizes, an output may grow three times in a row by chance.
"""


def _accumulates(item: RetainedObject) -> bool:
    """Return True if `item` has a graph, and no backward pass through it used `create_graph`, as meta-learning does."""
    return item.has_graph and not any(backward.create_graph for backward in item.backwards)


@rule(
    "LT008",
    priority=100,
    name="list of tensors with graphs",
    what="A list, dict or set holds tensors whose graph has not been freed.",
    why="Each entry keeps the whole graph of its step in memory.",
    bad="losses.append(criterion(model(x), y))",
    good="losses.append(criterion(model(x), y).item())",
    fix="store numbers in `{name}`: `.item()` (`.detach()` frees the graph, but not the value itself)",
)
class ListOfGraphs(Rule):
    """Rule for containers of tensors with graphs of several steps.

    A list that each step creates does not match, because it never has two graphs from one line.
    """

    is_refuted_by_backward = True
    explains_missing_backward = True
    fix_of_values = (
        "store less in `{name}`: a number, or `.detach().cpu()` of the part you need (`.detach()` alone frees the "
        "graph, but not the value's storage)"
    )

    fix_of_terms = "; if the loss is computed from the entries, clear them after its backward pass"

    def fix_unreached(self, fix: str) -> str:
        """Return the advice to run the forward under `torch.no_grad()`, followed by the advice `fix`."""
        return "run the forward at {made} under `torch.no_grad()`, because no backward pass reaches it; and " + fix

    def choose_fix(self, item: RetainedObject, history: History) -> str:
        """Return the advice for `item`: store `.item()` of a scalar, or `.detach().cpu()` of a larger tensor.

        If backward has reached the graph, the entries may be terms of a loss. The advice is then also to clear them
        after the backward pass.
        """
        fix = super().choose_fix(item, history) if item.is_scalar else self.fix_of_values
        return fix + self.fix_of_terms if item.backwards else fix

    def matches(self, item: RetainedObject, history: History) -> bool:
        entries = history.entries
        return _accumulates(item) and entries[-1] > 0 and (history.n_alike > 1 or entries[-1] > entries[0])


@rule(
    "LT009",
    priority=90,
    name="running sum of tensors with graphs",
    what="A running total adds up outputs of several forwards, and no backward pass frees their graphs.",
    why="The sum keeps the graphs of all its terms in memory. After an ordinary `loss.backward()` the same line keeps "
    "only their empty nodes (LT023).",
    bad="total = total + criterion(model(x), y)",
    good="total = total + criterion(model(x), y).detach()",
    fix="add values without a graph to `{name}`: `.detach()` or `.item()`",
)
class RunningSumOfGraphs(Rule):
    """Rule for a sum or running mean whose graph contains several calls from one line.

    Two calls in one step do not match, because they may share a backward pass.
    """

    fix_of_part = "pass `{owner}` values without a graph: `.detach()` or `.item()`"
    is_refuted_by_backward = True
    explains_missing_backward = True

    def matches(self, item: RetainedObject, history: History) -> bool:
        is_over_steps = len(item.steps) > 1 or not item.backwards
        is_sum = item.is_scalar or len(item.steps) >= GROWTHS  # two steps may share an output
        return _accumulates(item) and is_sum and is_over_steps and item.goes_through_calls

    def refined(self, stats: SiteStats) -> Rule:
        """Return rule LT002 (a forward needs no graph) if no backward pass reaches the line's graphs, else this rule.

        Running these forwards under `torch.no_grad()` leaves the sum without a graph.
        """
        return self if stats.n_reached else RULES["LT002"]


@rule(
    "LT021",
    priority=160,
    name="growing list of tensors without a graph",
    what="A list, dict or cache keeps gaining tensors, or new outputs are concatenated to one tensor. They have no "
    "graph, but their own memory adds up.",
    why="Memory grows until it runs out. `.detach()` does not help: the memory is that of the values. A cache with at "
    "most one entry per sample of the data set is not reported.",
    bad="predictions.append(model(x).detach())",
    good="predictions.append(model(x).argmax(-1).cpu())",
    fix="store less in `{name}`: a metric, an index, or a copy on the CPU",
)
class GrowingList(Rule):
    """Rule for a container whose bytes and entries grow over several inspections in a row."""

    subjects = ("tensors", "carried", "gradients", "models", "optimizers", "parameters")
    gathers = True
    ends_without_growth = True
    fix_of_numbers = (
        "store numbers in `{name}`: `.item()` (on a CPU, a loss such as mse_loss keeps the memory of all elements that "
        "it is the mean of)"
    )
    fix_of_cache = "limit the cache of `{name}` (`lru_cache(maxsize=...)`), or call `{name}.cache_clear()` each epoch"

    fix_of_keys = (
        "limit the size of `{name}`, whose keys never repeat: evict the oldest entries, or use keys that repeat"
    )
    fix_of_cycle = (
        "`itertools.cycle` keeps every batch of the first epoch in memory: start a new iteration over the loader each "
        "epoch instead (a generator with `while True: yield from loader`)"
    )

    fix_of_generators = (
        "end the generators that hold `{name}` (`close()`), or do not keep them: one that waits at a `yield` keeps all "
        "its variables"
    )
    fix_of_tee = (
        "`itertools.tee` keeps what one of its iterators has returned until the other has, too: advance both, or make "
        "two iterators of the loader"
    )
    fix_of_gradients = (
        "set `.grad` of the tensors in `{name}` to None after its last use, or compute it with `torch.autograd.grad`, "
        "which stores nothing"
    )

    fix_of_state = (
        "begin each batch or sequence with an empty `{name}` (a new cache), or keep only its newest part: each call "
        "adds to it"
    )
    fix_of_module_state = (
        "set `self.{name}` to None before the next batch, or keep only its newest part: each call adds to it"
    )

    def choose_fix(self, item: RetainedObject, history: History) -> str:
        """Return the advice for `item`, by the kind of its holder and of the objects that it holds."""
        if item.holder is not None and item.holder.is_cycle:
            return self.fix_of_cycle
        if item.holder is not None and item.holder.is_tee:
            return self.fix_of_tee
        if item.is_held_as("generator") and item.holder is not None and not item.holder.containers:
            return self.fix_of_generators
        if item.subject in _FIX_OF_COPIES:
            return _FIX_OF_COPIES[item.subject]
        if item.is_scalar:
            return self.fix_of_numbers
        if item.subject == "gradients":
            return self.fix_of_gradients
        if item.subject == "carried" or (item.is_state and item.is_held_as("module")):
            return self.fix_of_module_state if item.is_held_as("module") else self.fix_of_state
        if item.holder is not None and item.holder.is_cache:
            return self.fix_of_cache
        is_of_data = item.holder is not None and item.holder.is_keyed and not item.calls
        return self.fix_of_keys if is_of_data else super().choose_fix(item, history)

    def matches(self, item: RetainedObject, history: History) -> bool:
        if item.subject in _FIX_OF_COPIES:  # often one for each epoch, so that few inspections see a new one
            return grows(history.held_bytes, 2) and grows(history.entries, 2)
        if item.has_graph or item.is_within_data or not grows(history.held_bytes):
            return False
        if item.subject == "carried":
            return _is_added_to(item, history) or (grows(history.entries, CONCATENATIONS) and not history.has_stopped)
        if item.subject == "gradients":
            return True
        return (grows(history.entries) and not history.has_stopped) or _is_added_to(item, history)


_FIX_OF_COPIES = {
    "models": "do not keep whole models in `{name}`: keep the best one, its `state_dict()` on the CPU, or a "
    "checkpoint file",
    "parameters": "create a new optimizer when parameters are replaced, or remove their group from "
    "`{name}.param_groups` and their entries from `{name}.state`: `add_param_group` only adds",
    "optimizers": "do not keep old optimizers in `{name}`, because each holds its own state: create one optimizer per "
    "model and change its `param_groups`",
}


_NAMED_KINDS = ("variable", "closure", "generator", "class", "context variable")


def _is_added_to(item: RetainedObject, history: History) -> bool:
    """Return True if outputs are concatenated to the tensors of `item`.

    The tensors' bytes then grow at many inspections, while the numbers of tensors and entries stay the same.
    """
    is_joined_state = item.is_state and item.is_held_as("module")
    has_name = item.holder is not None and (item.holder.kind in _NAMED_KINDS or is_joined_state)
    numbers = {*zip(history.entries[-CONCATENATIONS:], history.n_storages[-CONCATENATIONS:], strict=True)}
    is_same_number = has_name and not item.is_output and len(numbers) == 1
    return (
        is_same_number
        and grows(history.held_bytes, CONCATENATIONS)
        and history.held_bytes[-1] >= 2 * history.held_bytes[-CONCATENATIONS]
    )


@rule(
    "LT023",
    priority=155,
    name="graph nodes kept by a running total",
    what=(
        "Losses are added to a total, or kept in a list, after their backward pass. Backward has freed the saved "
        "tensors, but the graph nodes stay alive, and each step adds its own."
    ),
    why="Each node takes 0.6 to 0.9 kB of host memory, regardless of tensor sizes: half a MiB per step for a 12-layer "
    "BERT, gigabytes over a training run. GPU memory does not show it.",
    bad="loss.backward()\ntotal += loss",
    good="loss.backward()\ntotal += loss.detach()",
    fix="add values without a graph to `{name}`: `loss.detach()`, or `loss.item()`",
)
class RunningTotalOfEmptyGraphs(Rule):
    """Rule for autograd nodes of at least three steps that stay alive with almost no saved tensors.

    A container of limited size, such as a deque of the last losses, does not match.
    """

    subjects = ("nodes",)
    unit = "of host memory per step"
    fix_of_container = (
        "add values without a graph to `{name}`: `loss.detach()`, or `loss.item()`; if a backward pass needs "
        "their graphs, empty the container after that pass"
    )

    fix_of_module = "assign values without a graph to `self.{name}`: `.detach()` them first"

    def choose_fix(self, item: RetainedObject, history: History) -> str:
        """Return the advice for `item`: `fix_of_module` for a single value stored on a module, else the usual one."""
        is_value = item.is_held_as("module") and item.holder is not None and not item.holder.gathers
        return self.fix_of_module if is_value else super().choose_fix(item, history)

    def matches(self, item: RetainedObject, history: History) -> bool:
        is_bounded = item.holder is not None and item.holder.gathers and not item.holder.containers
        return history.n_steps >= GROWTHS and not is_bounded and not self.has_ended(history)

    def has_ended(self, history: History) -> bool:
        """Return True if the container is full: it has as many entries as before, and its nodes do not grow."""
        is_full = history.has_stopped and history.entries[-1] == history.entries[-2] > 0
        return is_full and not grows(history.held_bytes, 2)

    def count_reported_bytes(self, history: History) -> int:
        return history.held_bytes[-1] // max(1, history.n_steps)


@rule(
    "LT030",
    priority=165,
    name="evaluation that keeps the outputs of all batches",
    what="An evaluation collects the outputs of all batches, in a list or by concatenation, and computes its metric at "
    "the end.",
    why="The logits of a whole evaluation set are often larger than the model and fill GPU or host memory. "
    "Concatenation needs the old and the new tensor at the same time.",
    bad="for x, y in loader:\n    logits.append(model(x))",
    good="for x, y in loader:\n    predicted.append(model(x).argmax(-1))",
    fix="keep only argmax or the metric of each batch in `{name}`, or move the outputs with `.cpu()` (transformers: "
    "preprocess_logits_for_metrics, eval_accumulation_steps)",
)
class GatheredOutputs(Rule):
    """Rule for a holder whose memory grows over several inspections during an evaluation."""

    subjects = ("evaluation",)
    fix_of_keys_and_values = "call the model with `use_cache=False`, because nothing reads the keys and values; and "

    def choose_fix(self, item: RetainedObject, history: History) -> str:
        """Return the advice for `item`. If the outputs contain a key-value cache, it says first to turn that off."""
        has_cache = item.holder is not None and "past_key_values" in item.holder.text
        return self.fix_of_keys_and_values * has_cache + super().choose_fix(item, history)

    def matches(self, item: RetainedObject, history: History) -> bool:
        is_large = history.held_bytes[-1] >= max(LEAST_GATHERED_BYTES, history.largest_graph_bytes // 4)
        is_cache_of_keys = item.is_held_as("module") and item.is_state
        is_candidate = not item.has_graph and not item.is_input and not is_cache_of_keys
        return is_candidate and is_large and grows(history.held_bytes)


@rule(
    "LT029",
    priority=145,
    name="activations kept on objects",
    what="Activations are stored on objects that outlive the step, such as the items of a data set.",
    why="Each item holds a view, and a view keeps the whole storage behind it alive: after one epoch, the activations "
    "of the entire data set are in memory.",
    bad="for item, row in zip(items, hidden):\n    item.embedding = row",
    good="for item, row in zip(items, hidden):\n    item.embedding = row.detach().cpu()",
    fix="store a separate copy in `{name}` (`.detach().clone()`, or `.cpu()`), or set it to None after the step",
)
class KeptOnObjects(Rule):
    """Rule for objects whose attributes hold outputs of more and more steps, while no container grows."""

    def matches(self, item: RetainedObject, history: History) -> bool:
        is_part = item.holder is not None and item.holder.is_part and not item.has_graph
        if not is_part or not item.is_output or history.n_steps < 2 or not history.entries[-1]:  # 0: a bounded queue
            return False
        return grows(history.held_bytes) and not grows(history.entries)
