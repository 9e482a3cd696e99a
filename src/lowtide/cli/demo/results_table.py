"""Show a `Comparison` to people: a table, the peaks as bars, each plan's decisions, and the proof."""

import textwrap
from collections.abc import Iterator

from lowtide.cli.demo.results import Comparison, Run
from lowtide.report.text_table import decisions
from lowtide.units import format_bytes, format_ratio
from lowtide.utils.tables import Table, aligned

WIDTH = 80
_BAR_CELLS = 40


def show(comparison: Comparison, *, in_unicode: bool = True) -> str:
    """Return the whole comparison as text of 80 columns."""
    about = (
        f"{comparison.optimizer}, {comparison.items_per_step:,} {comparison.items} a step, {_steps(comparison)} a run"
    )
    said = [*_describe_decisions(comparison), "", *_proof(comparison), *_remarks(comparison)]
    return "\n".join(
        [
            *_wrapped(f"{comparison.description}; {about}."),
            "",
            *_table(comparison).lines(),
            "",
            *_bars(comparison, "▓█▏" if in_unicode else "#=|"),
            "",
            *(line for paragraph in said for line in _wrapped(paragraph)),
        ]
    )


def _wrapped(paragraph: str) -> list[str]:
    return textwrap.wrap(paragraph, WIDTH, break_on_hyphens=False) or [""]


def _table(comparison: Comparison) -> Table:
    headings = ("", "budget", "predicted", "measured", "time", "recompute", "replay", "bits")
    rows = [(run.name, *_cells(run)) for run in comparison.runs]
    return Table(headings=headings, rows=[(*row, *[""] * (len(headings) - len(row))) for row in rows])


def _cells(run: Run) -> Iterator[str]:
    yield _bytes(run.budget_bytes)
    if run.refusal is not None:
        yield "none"
        return
    yield _bytes(run.predicted_peak_bytes)
    yield _bytes(run.measured_peak_bytes) + ("" if run.within_budget else " !")
    if run.kind == "plain":
        return
    yield "" if run.time_ratio is None else format_ratio(run.time_ratio - 1, signed=True)
    yield "" if run.plan is None else str(len(run.plan.recompute))
    yield "blocks" if run.plan is None else str(len(run.plan.replay) + len(run.plan.advance))
    yield "equal" if run.identical else "DIFFER"


def _bars(comparison: Comparison, cells: str) -> Iterator[str]:
    """Yield the measured peaks as bars to scale, each with its budget marked."""
    static_cell, other_cell, budget_cell = tuple(cells)
    plain = comparison.plain.measured_peak_bytes or 1
    largest = max(run.measured_peak_bytes or 0 for run in comparison.runs)
    static = round(_BAR_CELLS * comparison.static.total / largest)
    rows = []
    for run in comparison.runs:
        if run.measured_peak_bytes is None:
            continue
        peak = max(static, round(_BAR_CELLS * run.measured_peak_bytes / largest))
        bar = static_cell * static + other_cell * (peak - static)
        if run.budget_bytes is not None and run.budget_bytes <= largest:
            at = max(peak, round(_BAR_CELLS * run.budget_bytes / largest))
            bar += " " * (at - peak) + budget_cell
        rows.append((run.name, bar, format_ratio(run.measured_peak_bytes / plain)))
    yield from aligned(rows, {0, 1})
    yield f"{static_cell} there before the step  {other_cell} added by it  {budget_cell} budget"


def _describe_decisions(comparison: Comparison) -> Iterator[str]:
    for run in comparison.runs:
        if run.plan is not None:
            yield f"{run.name}: {decisions(run.plan)}."
        elif run.refusal is not None:
            yield f"{run.name}: {run.refusal}."
        elif run.kind == "checkpoint":
            yield f"{run.name}: every block runs twice, by transformers' own switch."


def _proof(comparison: Comparison) -> Iterator[str]:
    judged = [run for run in comparison.runs if run.same is not None]
    for run in comparison.wrong:
        if not run.identical:
            yield f"{run.name}: NOT the plain loop's bits: {'; '.join(run.differences[:3])}."
        if not run.within_budget:
            yield f"{run.name}: the measured peak is ABOVE the budget."
    for run in judged:
        if run.drifted:
            yield f"{run.name}: {len(run.drifted)} tensors were not what the plan expects, and were kept."
    same = [run.name for run in judged if run.identical]
    if same:
        yield (
            f"Proven here for {', '.join(same)}: over {_steps(comparison)} every loss and every gradient is the plain "
            "loop's, bit by bit, and so are parameters, buffers, optimizer state and random numbers after the last. "
            "Peaks are exact, from the allocator's own events, and count what is there before the step."
        )


def _remarks(comparison: Comparison) -> Iterator[str]:
    yield "Time: the fastest step beside the fastest plain one; the two loops took turns, step by step."
    yield from (f"Note: {note}." for note in comparison.notes)


def _steps(comparison: Comparison) -> str:
    return "1 step" if comparison.steps == 1 else f"{comparison.steps} steps"


def _bytes(n_bytes: int | None) -> str:
    return "" if n_bytes is None else format_bytes(n_bytes)
