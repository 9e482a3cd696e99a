"""Show a `Comparison` to people: a table, the peaks as bars, each plan's decisions, and the proof."""

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowtide.cli.demo.results import Comparison, Run
from lowtide.report.text_table import decisions
from lowtide.units import format_bytes, format_ratio

_BAR_CELLS = 40


def show(comparison: Comparison, console: Console) -> None:
    """Print the whole comparison; 80 columns are enough."""
    blocks = console.encoding.lower().startswith("utf")
    about = (
        f"{comparison.optimizer}, {comparison.items_per_step:,} {comparison.items} a step, {_steps(comparison)} a run"
    )
    console.print(Text(f"{comparison.description}; {about}."), "", sep="\n")
    console.print(_table(comparison), "", _bars(comparison, "▓█▏" if blocks else "#=|"), "", sep="\n")
    for line in [*_made_again(comparison), "", *_proof(comparison), *_remarks(comparison)]:
        console.print(Text(line))


def _table(comparison: Comparison) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("budget", "predicted", "measured", "time", "recompute", "replay"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("bits", no_wrap=True)
    for run in comparison.runs:
        table.add_row(run.name, *_cells(run))
    return table


def _cells(run: Run) -> Iterator[str | Text]:
    yield _bytes(run.budget_bytes)
    if run.refusal is not None:
        yield Text("none", style="yellow")
        return
    yield _bytes(run.predicted_peak_bytes)
    yield Text(_bytes(run.measured_peak_bytes), style="" if run.within_budget else "bold red")
    if run.kind == "plain":
        return
    yield "" if run.time_ratio is None else format_ratio(run.time_ratio - 1, signed=True)
    yield "" if run.plan is None else str(len(run.plan.recompute))
    yield "blocks" if run.plan is None else str(len(run.plan.replay) + len(run.plan.advance))
    yield Text("equal", style="green") if run.identical else Text("DIFFER", style="bold red")


def _bars(comparison: Comparison, cells: str) -> Table:
    """Draw the measured peaks to scale, each with its budget marked."""
    static_cell, other_cell, budget_cell = tuple(cells)
    plain = comparison.plain.measured_peak_bytes or 1
    largest = max(run.measured_peak_bytes or 0 for run in comparison.runs)
    static = round(_BAR_CELLS * comparison.static.total / largest)
    bars = Table.grid(padding=(0, 2))
    for run in comparison.runs:
        if run.measured_peak_bytes is None:
            continue
        peak = max(static, round(_BAR_CELLS * run.measured_peak_bytes / largest))
        bar = Text(static_cell * static, style="blue").append(other_cell * (peak - static), style="cyan")
        if run.budget_bytes is not None and run.budget_bytes <= largest:
            at = max(peak, round(_BAR_CELLS * run.budget_bytes / largest))
            bar.append(" " * (at - peak) + budget_cell, style="yellow")
        share = format_ratio(run.measured_peak_bytes / plain)
        bars.add_row(run.name, bar, Text(share, justify="right"))
    legend = f"{static_cell} there before the step  {other_cell} added by it  {budget_cell} budget"
    bars.add_row("", Text(legend, style="dim"))
    return bars


def _made_again(comparison: Comparison) -> Iterator[str]:
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
