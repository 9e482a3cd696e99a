"""Describe a run in sentences: whether it fits, the peak and its parts, the cost. Pages and terminals share them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from lowtide.report.plan_text import extra
from lowtide.report.run_record import RunRecord
from lowtide.report.step_memory import StepMemory
from lowtide.report.text_table import decisions, format_added_time, format_untimed_lines, listed, made_for
from lowtide.units import format_bytes, format_count

Answer = Literal["yes", "no", "open", "plain"]
"""The step fits, does not fit, may or may not fit because something is unknown, or no budget was given."""

_PARTS = 3
"""Number of parts of a peak that a sentence names."""
_NOUNS = {"recomputed": "recomputed tensors", "left from before": "tensors left from before"}
"""Nouns for categories whose names are not nouns, for use in a sentence."""


def show(run: RunRecord) -> str:
    """Summarize the run in a few lines."""
    return "\n".join(_format_lines(run))


def _format_lines(run: RunRecord) -> Iterator[str]:
    if run.fingerprint is not None:
        yield about(run)
    yield verdict(run)[1]
    memory = run.after or run.before
    if memory is not None:
        yield describe_peak(memory)
    if run.plan is not None:
        yield f"extra time: {format_added_time(run.plan.predicted.extra_ms, run.plan.step_ms)} predicted"
        yield decisions(run.plan)
    if run.proof is not None:
        yield run.proof.text
    for finding in run.findings or ():
        yield f"{finding.code} {finding.name}: {format_bytes(finding.held_bytes)} {finding.unit}".rstrip()
    yield from (f"note: {note}" for note in run.notes)
    if run.plan is not None:
        yield from format_untimed_lines(run.plan.step_ms)


def about(run: RunRecord) -> str:
    """Format the run's model, batch, device and torch version in one line; empty if they are not recorded."""
    return "" if run.fingerprint is None else made_for(run.fingerprint)


def verdict(run: RunRecord) -> tuple[Answer, str]:
    """Return the answer to "does it fit?" and a sentence that states the answer with its numbers."""
    if run.needs:
        return _judge_gpu_needs(run)
    peak_bytes = run.peak_bytes
    if run.plan is None and run.findings is not None and run.before is None:
        n = len(run.findings)
        steps = "" if run.n_steps is None else f" in {run.n_steps} steps"
        if not n:
            return "yes", f"Nothing outlives its step{steps}."
        return "no", f"{format_count(n, 'finding')}{steps}: memory that outlives its step."
    if run.refusal:
        return "no", f"It does not fit: {run.refusal.splitlines()[0]}{_describe_smallest_peak(run)}"
    if peak_bytes is None:
        return "open", "No step was measured."
    budget_bytes = run.budget_bytes
    if budget_bytes is None:
        return "plain", f"A step needs {format_bytes(peak_bytes)} at its peak.{_describe_smallest_peak(run)}"
    is_reserved = run.plan is not None and run.plan.budget_for == "reserved"
    if is_reserved:
        if run.reserved_peak_bytes is None:
            return "open", "No step was measured, and the budget is for what the allocator reserves."
        peak_bytes = run.reserved_peak_bytes
    budget, peak = format_bytes(budget_bytes), format_bytes(peak_bytes)
    if peak == budget and peak_bytes > budget_bytes:
        budget, peak = (f"{format_bytes(n)} ({n:,} B)" for n in (budget_bytes, peak_bytes))
    is_measured = run.proof is not None and run.proof.measured_peak_bytes is not None
    how = "peaks at" if is_measured else "is predicted to peak at"
    peak += " reserved" if is_reserved else ""
    if peak_bytes <= budget_bytes:
        return "yes", f"It fits: the step {how} {peak}, within the budget of {budget}."
    return "no", f"It does not fit: the step {how} {peak}, above the budget of {budget}."


def _describe_smallest_peak(run: RunRecord) -> str:
    """Describe the smallest peak of any plan: `Plans take it down to 300 MiB, for +62 % time.`"""
    points = () if run.frontier is None else run.frontier.points
    if not points or run.frontier is None or points[0].peak_bytes >= run.frontier.plain_bytes:
        return ""
    least = points[0]
    cost = "" if least.extra_ms is None else f", for {extra(least.extra_ms, run.frontier.step_ms)}"
    return f" Plans take it down to {format_bytes(least.peak_bytes, round_up=True)}{cost}."


def _judge_gpu_needs(run: RunRecord) -> tuple[Answer, str]:
    kinds: dict[str, Answer] = {"fits": "yes", "does not fit": "no"}
    answers: dict[str, Answer] = {}
    said = []
    for need in run.needs:
        batch = "The step" if need.batch is None else f"Batch {need.batch}"
        words = {"fits": "fits", "does not fit": "does not fit"}.get(need.verdict, "may or may not fit")
        reserved = format_bytes(need.peak_reserved_bytes)
        said.append(f"{batch} {words} on {need.gpu}: {reserved} reserved, of {format_bytes(need.gpu_bytes)}.")
        answers[need.verdict] = kinds.get(need.verdict, "open")
    for kind in ("does not fit", "unknown", "fits"):
        if kind in answers:
            return answers[kind], " ".join(said)
    return "open", " ".join(said)


def describe_peak(memory: StepMemory) -> str:
    """Describe the peak in one sentence: its size, its moment, and its parts."""
    moment = memory.peak_moment
    phase, module = memory.phase_at(moment), memory.module_at(moment)
    during = f" in {phase}" if phase else ""
    at = f", at {module}" if module else ""
    over = "" if not memory.floor_bytes and "parameters" in memory.bytes else " over the level at entry"
    parts = memory.parts_at(moment)
    freed = -memory.floor_bytes - parts.pop("left from before", 0) if memory.floor_bytes else 0
    less = f", less {format_bytes(freed)} that was there at entry and is freed" if freed else ""
    return f"The peak is {format_bytes(memory.peak_bytes)}{over}{during}{at}: {describe_parts(parts)}{less}."


def describe_parts(parts: Mapping[str, int]) -> str:
    """Describe the largest parts of a total: `412 MiB of activations, 157 MiB of parameters and 80 MiB of everything
    else`.
    """
    largest = sorted(((n, name) for name, n in parts.items() if n > 0), reverse=True)
    named = [f"{format_bytes(n)} of {_NOUNS.get(name, name)}" for n, name in largest[:_PARTS]]
    if rest := sum(n for n, _ in largest[_PARTS:]):
        named.append(f"{format_bytes(rest)} of everything else")
    return listed(named) if named else "nothing beyond what was there"
