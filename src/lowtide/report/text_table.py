"""Format the decisions and the cost of a plan in one line."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lowtide.planner.folded_decisions import ranges
from lowtide.planner.records import Decisions
from lowtide.units import format_bytes, format_count, format_ratio, format_time

if TYPE_CHECKING:
    from lowtide.planner.records import Fingerprint, Plan, Profile


def made_for(fingerprint: Fingerprint) -> str:
    """Format model, batch, device and torch version in one line."""
    return f"{fingerprint.model}, batch {fingerprint.batch}, on {fingerprint.device}, torch {fingerprint.torch}"


def format_lever_lines(plan: Plan | Profile) -> list[str]:
    """Return a line for each lever of a plan. A lever is a change of the step itself that lowers its peak.

    Example: `lever outputs: of the model's outputs ..., 4 MiB less, at no cost`.
    """
    return [
        f"lever {lever.name}: {lever.what}; "
        + (f"{format_bytes(lever.bytes)} less, " if lever.bytes else "")
        + (format_added_time(lever.extra_ms, plan.step_ms) if lever.extra_ms else "at no cost")
        for lever in plan.levers
    ]


def format_added_time(extra_ms: float, step_ms: float) -> str:
    """Format extra time: `+12.5 ms a step (+4.1 %)`. The share is left out if the step without a plan was not timed."""
    share = f" ({format_ratio(extra_ms / step_ms, signed=True)})" if step_ms else ""
    return f"+{format_time(extra_ms)} a step{share}"


def format_untimed_lines(step_ms: float) -> list[str]:
    """Return a note on how to time the step without a plan; an empty list if it was timed (`step_ms` is not 0)."""
    return [] if step_ms else [_UNTIMED]


_UNTIMED = (
    "note: no plain step was timed, so extra times have no shares of it: `lowtide rehearse --plain` times it, on the "
    "device itself and if it fits there"
)


def format_extra_time(plan: Plan) -> str:
    """Format the plan's extra time and its bound: `, +4.1 % time predicted, bound +3.8 %`; empty if unknown."""
    if not plan.step_ms:
        return ""
    extra, bound = (format_ratio(ms / plan.step_ms, signed=True) for ms in (plan.predicted.extra_ms, plan.bound_ms))
    return f", {extra} time predicted" + (f", bound {bound}" if plan.decisions != Decisions() else "")


_OPS = {
    "Addmm": "linear",
    "Bmm": "matrix product",
    "Clone": "copy",
    "Elu": "ELU",
    "Gelu": "GELU",
    "Glu": "GLU",
    "LeakyRelu": "leaky ReLU",
    "MaxPool2DWithIndices": "max pool",
    "Mm": "linear",
    "Mul": "product",
    "Add": "sum",
    "Sub": "difference",
    "Div": "quotient",
    "Pow": "power",
    "PreluKernel": "PReLU",
    "Silu": "SiLU",
    "Relu": "ReLU",
    "Rsqrt": "reciprocal root",
    "Rsub": "difference",
    "SafeSoftmax": "softmax",
    "ToCopy": "cast",
    "UnsafeView": "matrix product",  # torch.matmul's result: a view of the output of bmm or mm
}
"""Usual names for an autograd node's output; other nodes keep their name, in words."""

_WORD_STARTS = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=\d)(?=[A-Z][a-z])|(?<=\dD)(?=[A-Z])")  # pool2D is one word

_MOST_LISTED = 8


def _explain_fit(plan: Plan) -> str:
    """Explain in a few words why a plan fits its budget although it keeps all saved tensors."""
    if plan.levers:
        return "the step fits"
    if plan.graphs and plan.plain.peak_bytes > plan.budget_bytes:
        return "its backward, compiled anew, has fewer temporaries"
    return "the plain step fits"


def decisions(plan: Plan) -> str:
    """List a plan's decisions by kind: `recomputed layer norm (24), GELU (12); replayed transformer.h.{0-3}`.

    Gradients in place, calls that run forward again and offloaded tensors are listed too.
    """
    settings = [] if plan.allows_in_place else ["no gradients in place"]
    if plan.decisions == Decisions():
        return "; ".join([f"everything is kept: {_explain_fit(plan)}", *settings])
    parts = settings
    if plan.in_place:
        parts.append(f"gradients in place: {', '.join(map(operator_name, plan.in_place))}")
    if plan.recompute:
        count = Counter(map(operator_name, plan.recompute.values()))
        most = sorted(count.items(), key=lambda item: (-item[1], item[0]))
        parts.append("recomputed " + ", ".join(f"{op} ({n})" for op, n in most))
    for how, calls in (("replayed", plan.replay), ("run forward again", plan.advance)):
        families = merged(call.rpartition("#")[0] for call in calls)
        rest = len(families) - _MOST_LISTED
        more = [f"and {rest} more"] if rest > 0 else []
        parts += [f"{how} " + ", ".join(families[:_MOST_LISTED] + more)] if families else []
    if plan.offload:
        tensors = format_count(len(plan.offload), "tensor")
        parts.append(f"offloaded {tensors}, {format_bytes(plan.predicted.host_bytes)} on the host")
    return "; ".join(parts)


def merged(paths: Iterable[str]) -> list[str]:
    """Join module paths that differ only in their first number: `h.0.mlp`, `h.1.mlp` -> `h.{0-1}.mlp`."""
    families: dict[str, set[int]] = defaultdict(set)
    plain: list[str] = []
    for path in dict.fromkeys(paths):
        numbers = list(re.finditer(r"(?<![^.])\d+(?![^.])", path))
        if numbers:
            first = numbers[0]
            families[f"{path[: first.start()]}{{}}{path[first.end() :]}"].add(int(first[0]))
        else:
            plain.append(path)
    return plain + [family.replace("{}", ranges(n), 1) for family, n in families.items()]


def operator_name(node: str) -> str:
    """Return an operator's name in words: `NativeLayerNormBackward0` -> `layer norm`."""
    name = re.sub(r"Backward\d+(\+\w+( [\d,]+)?)?$", "", node)
    if "." in name:  # an operator of a compiled graph
        return name.partition(".")[2].strip("_").replace("_", " ")
    if name.startswith("ScaledDotProduct"):  # flash, memory-efficient or another kernel, for any device
        return "attention"
    words = _WORD_STARTS.sub(" ", name.removeprefix("Native")).lower()
    return _OPS.get(name, words)


def listed(words: Sequence[str]) -> str:
    """Join words as an enumeration: `loss, gradients and buffers`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
