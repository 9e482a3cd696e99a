"""Rules for tensors stored outside variables: on ctx, by hooks, on modules, in buffers."""

from lowtide.diagnostics.leaks.holder_history import History, grows
from lowtide.diagnostics.leaks.retained_object import RetainedObject
from lowtide.diagnostics.leaks.rules.carried_state import is_carried_by_module
from lowtide.diagnostics.leaks.rules.rule_registry import Rule, rule


@rule(
    "LT012",
    priority=70,
    name="tensor kept on ctx",
    what="A custom autograd Function stores a tensor as an attribute of ctx instead of with `ctx.save_for_backward`.",
    why="Backward frees saved tensors but not attributes of ctx, which live as long as the loss: 18 % of the peak for "
    "an MLP (bench/retention.py). If the tensor is the Function's own output, it is never freed at all.",
    bad="ctx.x = x",
    good="ctx.save_for_backward(x)",
    fix="use `ctx.save_for_backward({name})` instead of `ctx.{name} = ...`",
)
class ContextAttribute(Rule):
    """Rule for graphs whose memory is mostly held by attributes of a custom Function's ctx."""

    def matches(self, item: RetainedObject, history: History) -> bool:
        return item.is_held_as("context") and 2 * item.context_bytes >= item.unfreed_bytes


@rule(
    "LT013",
    priority=50,
    name="hook that stores activations",
    what="A module hook stores activations that are still alive at the next step.",
    why="The activations stay in memory through backward and the next forward; in a list, until the run ends.",
    bad="def hook(module, args, output):\n    features.append(output)",
    good="def hook(module, args, output):\n    means.append(output.mean().item())",
    fix="store a number or a small copy, clear the store each step, or remove the hook: `handle.remove()`",
)
class HookStore(Rule):
    """Rule for tensors that a hook of a module keeps alive."""

    is_refuted_by_backward = True

    def matches(self, item: RetainedObject, history: History) -> bool:
        return item.is_held_as("hook") and (item.has_graph or item.is_output or history.has_changed)


@rule(
    "LT014",
    priority=60,
    name="activation kept as a module attribute",
    what="A module's forward assigns an activation to `self`, and the activation is still alive at the next step.",
    why="The module keeps the activation alive, so no `del` in the training loop frees it.",
    bad="self.last_hidden = hidden",
    good="return hidden  # or set self.last_hidden to None after its last use",
    fix="do not assign `self.{name}`, or set it to None after its last use",
)
class ModuleAttribute(Rule):
    """Rule for tensors that an attribute of a module keeps alive, except buffers."""

    fix_of_container = (
        "store less in `self.{name}` (a number, or `.detach().clone()` of a small part), or clear it each step"
    )
    is_refuted_by_backward = True

    def matches(self, item: RetainedObject, history: History) -> bool:
        if item.buffer is not None or not item.is_held_as("module") or is_carried_by_module(item):
            return False
        if item.is_state and not grows(history.entries):
            return False
        return item.has_graph or item.is_output or history.has_changed


@rule(
    "LT020",
    priority=40,
    name="buffer written with a graph",
    what="A value that has a graph, such as a running mean, was assigned to a buffer.",
    why="From the second step on, the buffer keeps the graphs of all previous steps in memory.",
    bad="self.mean = 0.9 * self.mean + 0.1 * hidden.mean(0)",
    good="self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)",
    fix="`.detach()` the value before it is assigned to the buffer `{name}`",
)
class BufferWithGraph(Rule):
    """Rule for a buffer that has a `grad_fn`, and so keeps a graph alive."""

    is_refuted_by_backward = True

    def matches(self, item: RetainedObject, history: History) -> bool:
        return item.buffer is not None and item.has_graph
