"""Render plans as text: a single plan, or the differences of two plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lowtide.planner.folded_decisions import KINDS, fold, join
from lowtide.planner.records import Decided, Plan, Profile
from lowtide.planner.serialization import Record
from lowtide.report.text_table import decisions, format_added_time, format_lever_lines, format_untimed_lines, made_for
from lowtide.units import format_bytes, format_change, format_parts, format_ratio


def show(plan: Plan) -> str:
    """Format a plan in about ten lines: its purpose, its memory and cost, and its decisions block by block."""
    return "\n".join(
        (
            f"{format_change(plan.plain.peak_bytes, plan.predicted.peak_bytes)} peak predicted "
            f"(budget {format_bytes(plan.budget_bytes)}), {extra(plan.predicted.extra_ms, plan.step_ms)}{_bound(plan)}",
            f"  peak{format_parts(plan.predicted.peak_bytes, plan.predicted.parts)}",
            f"  held after forward: {format_change(plan.plain.held_bytes, plan.predicted.held_bytes)}",
            f"for {made_for(plan.fingerprint)}",
            *format_lever_lines(plan),
            decisions(plan),
            *(f"  {line}" for line in blocks(plan)),
            *(["on larger batches:"] if plan.fallback is not None else []),
            *(f"  {line}" for line in (blocks(plan.fallback) if plan.fallback is not None else ())),
            *implementations(plan),
            *(f"note: {note}" for note in plan.notes),
            *format_untimed_lines(plan.step_ms),
        )
    )


def implementations(record: Plan | Profile) -> Iterator[str]:
    """Yield a line for each alternative implementation that recomputes outputs of some kinds of autograd nodes."""
    for name in dict.fromkeys(record.implementations.values()):
        nodes = ", ".join(node for node, its in record.implementations.items() if its == name)
        yield f"outputs of {nodes} are recomputed from {name}: the fastest way that is exact here"


def extra(extra_ms: float, step_ms: float) -> str:
    """Format a plan's extra time: `+4.1 % time`, or milliseconds if the step without a plan was not timed."""
    return f"{format_ratio(extra_ms / step_ms, signed=True)} time" if step_ms else format_added_time(extra_ms, 0)


def _bound(plan: Plan) -> str:
    """Format the least extra time of any plan within this plan's budget; empty if unknown."""
    if not plan.bound_ms:
        return ""
    return f"; no plan takes less than {extra(plan.bound_ms, plan.step_ms)}"


def blocks(decided: Decided) -> Iterator[str]:
    """Yield one line per group of blocks with equal decisions: `transformer.h.{0-7}: recompute ln_1 (2), mlp.act`."""
    for block, made in decided.folded().items():
        kinds = ("recompute", *KINDS)
        parts = [f"{kind} {', '.join(_count_modules(made[kind], _IN_ITSELF[kind]))}" for kind in kinds if kind in made]
        yield f"{block or 'outside blocks'}: {'; '.join(parts)}"


_IN_ITSELF = {
    "recompute": "its own tensors",
    "offload": "its own tensors",
    "replay": "the block",
    "advance": "the block",
}
"""Words for decisions about a block itself, not about modules inside the block, by kind of decision."""


def _count_modules(addresses: Iterable[str], in_itself: str) -> Iterator[str]:
    """Yield the modules of saved tensors' `addresses`, such as `mlp.act (2)` for `mlp.act#0:0` and `mlp.act#0:1`.

    Tensors of the block itself are called `in_itself`. Addresses with `@` are call arguments; they are counted
    together.
    """
    modules = Counter(address.partition("#")[0] or in_itself for address in addresses if "@" not in address)
    yield from (module if n == 1 else f"{module} ({n})" for module, n in modules.items())
    if n := sum("@" in address for address in addresses):
        yield f"{n} arguments of calls" if n > 1 else "an argument of a call"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff(Record):
    """Differences of two plans. All fields are empty if the plans are equal."""

    fingerprint: tuple[str, ...]
    """Differences in words, one for each part of the fingerprint."""
    numbers: dict[str, tuple[float, float]]
    """Budget, predicted peak, extra time and so on, if they differ."""
    only_first: tuple[str, ...]
    """Decisions that only the first plan has: `recompute transformer.h.0.mlp.act#0:0`."""
    only_second: tuple[str, ...]
    larger: bool = False
    """True if the decisions for larger batches differ."""

    @property
    def same(self) -> bool:
        """True if the plans are equal."""
        return not (self.fingerprint or self.numbers or self.only_first or self.only_second or self.larger)


def compare(first: Plan, second: Plan) -> PlanDiff:
    """Return the differences of two plans."""
    one, other = _list_numbers(first), _list_numbers(second)
    mine, theirs = _list_decisions(first), _list_decisions(second)
    return PlanDiff(
        fingerprint=first.fingerprint.differences(second.fingerprint),
        numbers={name: (one[name], other[name]) for name in one if one[name] != other[name]},
        only_first=tuple(line for line in mine if line not in theirs),
        only_second=tuple(line for line in theirs if line not in mine),
        larger=(first.fallback or first).decisions != (second.fallback or second).decisions,
    )


def _list_numbers(plan: Plan) -> dict[str, float]:
    return {
        "budget_bytes": plan.budget_bytes,
        "plain_peak_bytes": plan.plain.peak_bytes,
        "predicted_peak_bytes": plan.predicted.peak_bytes,
        "extra_ms": plan.predicted.extra_ms,
        "extra_flops": plan.predicted.extra_flops,
    }


def _list_decisions(plan: Plan) -> dict[str, None]:
    recomputed = (f"recompute {address}" for address in plan.recompute)
    pulled = (f"lever {lever.name}" for lever in plan.levers)
    replayed, advanced = (f"replay {call}" for call in plan.replay), (f"advance {call}" for call in plan.advance)
    offloaded = (f"offload {address}" for address in plan.offload)
    in_place = (f"gradients in place {node}" for node in plan.in_place)
    other_ways = (f"implementation of {node}: {name}" for node, name in plan.implementations.items())
    return dict.fromkeys([*pulled, *other_ways, *in_place, *recomputed, *replayed, *advanced, *offloaded])


def show_diff(first: Plan, second: Plan) -> str:
    """Format the differences of two plans: numbers first, then `-` and `+` lines for decisions of only one plan."""
    differences = compare(first, second)
    if differences.same:
        return "the plans are the same"
    lines = [*differences.fingerprint]
    for name, (one, other) in differences.numbers.items():
        kind, _, unit = name.rpartition("_")
        words = kind.replace("_", " ")
        if unit == "bytes":
            lines.append(f"{words}: {format_change(int(one), int(other))}")
        elif unit == "ms":
            lines.append(
                f"{words} time: {format_added_time(one, first.step_ms)} -> {format_added_time(other, second.step_ms)}"
            )
        else:
            lines.append(f"{words} FLOPs: {one:.3g} -> {other:.3g}")
    lines += [f"- {line}" for line in _format_decisions(first, differences.only_first)]
    lines += [f"+ {line}" for line in _format_decisions(second, differences.only_second)]
    lines += ["on larger batches they do something else"] if differences.larger else []
    return "\n".join(lines)


def _format_decisions(plan: Plan, only: tuple[str, ...]) -> Iterator[str]:
    mine = set(only)
    yield from (line for line in only if line.startswith(("lever ", "gradients in place ")))
    recompute = {address: node for address, node in plan.recompute.items() if f"recompute {address}" in mine}
    replay = [call for call in plan.replay if f"replay {call}" in mine]
    advance = [call for call in plan.advance if f"advance {call}" in mine]
    offload = [address for address in plan.offload if f"offload {address}" in mine]
    for block, made in fold(recompute, replay, advance, offload).items():
        for kind, below in made.items():
            yield from (f"{kind} {join(block, address)}" for address in below)
