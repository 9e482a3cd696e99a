"""Places beside variables where tensors are put and stay: ctx, hooks, modules, buffers."""

from lowtide.diagnostics.leaks.finding import Past, Rule
from lowtide.diagnostics.leaks.inspection import Survivor


def _holder_is(kind: str, survivor: Survivor) -> bool:
    return survivor.holder is not None and survivor.holder.kind == kind


def _is_context(survivor: Survivor, past: Past) -> bool:
    return _holder_is("context", survivor) and 2 * survivor.context_bytes >= survivor.unfreed_bytes


def _is_hook(survivor: Survivor, past: Past) -> bool:
    return _holder_is("hook", survivor) and (survivor.has_graph or survivor.is_output or past.has_changed)


def _is_attribute(survivor: Survivor, past: Past) -> bool:
    if survivor.buffer is not None or not _holder_is("module", survivor):
        return False
    return survivor.has_graph or survivor.is_output or past.has_changed


def _is_buffer(survivor: Survivor, past: Past) -> bool:
    return survivor.buffer is not None and survivor.has_graph


CONTEXT_ATTRIBUTE = Rule(
    code="LT012",
    name="tensor kept on ctx",
    what="A custom autograd Function keeps a tensor as an attribute of ctx instead of `ctx.save_for_backward`.",
    why="Backward frees what was saved, but not attributes: they live as long as the loss, 18 % of the peak for an "
    "MLP (bench/retention.py). If the tensor is the Function's own output, it is never freed at all.",
    bad="ctx.x = x",
    good="ctx.save_for_backward(x)",
    fix="`ctx.save_for_backward({name})` instead of `ctx.{name} = ...`",
    matches=_is_context,
)

HOOK = Rule(
    code="LT013",
    name="hook that stores activations",
    what="A module's hook puts activations somewhere, and they are still there at the next step.",
    why="They live through backward and the next forward; in a list, for ever.",
    bad="def hook(module, args, output):\n    features.append(output)",
    good="def hook(module, args, output):\n    means.append(output.mean().item())",
    fix="store something small, clear it each step, or remove the hook: `handle.remove()`",
    matches=_is_hook,
)

MODULE_ATTRIBUTE = Rule(
    code="LT014",
    name="activation kept as a module attribute",
    what="A module's forward assigns an activation to an attribute, and it is still there at the next step.",
    why="No `del` in the training loop frees it.",
    bad="self.last_hidden = hidden",
    good="return hidden  # or reset self.last_hidden to None after its use",
    fix="do not keep `self.{name}`, or set it to None after its use",
    matches=_is_attribute,
)

BUFFER = Rule(
    code="LT020",
    name="buffer written with a graph",
    what="A buffer was given a value that has a graph: a running mean, a bias correction.",
    why="The first step is fine; from the second on the buffer holds the graphs of all steps before.",
    bad="self.mean = 0.9 * self.mean + 0.1 * hidden.mean(0)",
    good="self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)",
    fix="detach what is written to the buffer `{name}`",
    matches=_is_buffer,
)
