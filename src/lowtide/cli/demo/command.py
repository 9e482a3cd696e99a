"""`lowtide demo`: train a real model on real text, and compare memory and results before and after."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from lowtide.cli.report_option import format_command_line, report_option, write_report
from lowtide.cli.script_or_profile import output_option, write
from lowtide.utils.amounts import check_budget

if TYPE_CHECKING:
    from rich.progress import Progress

    from lowtide.cli.demo.results import Comparison

MODELS = ("gpt2", "bert", "llama", "resnet")
BUDGETS = ("70 %", "50 %", "35 %")


@click.command("demo")
@click.option("--model", type=click.Choice(MODELS), default="gpt2", show_default=True, help="The model to train.")
@click.option(
    "--budget",
    "budgets",
    multiple=True,
    metavar="AMOUNT",
    help='Limit for the peak of a step, counting all memory: "700MB", "0.5GiB" or "60%" of the plain peak. May be '
    f"given several times.  [default: {', '.join(BUDGETS)}]",
)
@click.option("--steps", type=click.IntRange(1), metavar="N", default=2, show_default=True, help="Steps of each run.")
@click.option("--layers", type=click.IntRange(1), metavar="N", help="Blocks of the model (resnet: of each stage).")
@click.option("--batch-size", type=click.IntRange(1), metavar="N", help="Rows of a batch.")
@click.option("--length", type=click.IntRange(8), metavar="N", help="Tokens of a row (resnet: pixels of a side).")
@output_option("--json", "json_to", 'Write all results to FILE as JSON; "-": print only that.')
@report_option
def demo(
    model: str,
    budgets: tuple[str, ...],
    steps: int,
    layers: int | None,
    batch_size: int | None,
    length: int | None,
    json_to: str | None,
    report_to: str | None,
) -> int:
    """Train a real model on real text, and compare its memory and results before and after.

    Trains the model plainly, then within each budget, then with every block checkpointed, and compares peaks, times and
    results. Takes about two minutes on two cores, and downloads nothing. Exit code 1: a run exceeded its budget, its
    results differed, or no plan fits a --budget.
    """
    for budget in budgets:
        check_budget(budget)

    from lowtide.cli.demo.compare import compare
    from lowtide.cli.demo.workloads import workload

    with _progress(quiet=json_to == "-") as progress:
        bar = progress.add_task(f"building {model}", total=None)

        def watch(doing: str, done: int, total: int) -> None:
            progress.update(bar, description=doing, completed=done, total=total)

        try:
            work, plain = (workload(model, layers=layers, batch_size=batch_size, length=length) for _ in range(2))
        except ValueError as error:  # a size that this model or its data does not have
            raise click.UsageError(f"{error}.") from error
        comparison = compare(work, plain, budgets or BUDGETS, steps=steps, watch=watch)
    _report(comparison, json_to)
    if report_to is not None:
        write_report(comparison.to_record(format_command_line()), report_to)
    return 1 if comparison.wrong or (budgets and comparison.unreached) else 0


def _progress(*, quiet: bool) -> Progress:
    """Build a progress bar on stderr, which is removed at the end, and disabled without a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        refresh_per_second=4,
        disable=quiet or not console.is_terminal,
    )


def _report(comparison: Comparison, json_to: str | None) -> None:
    if json_to == "-":
        write(comparison.to_json(), json_to)
        return
    from lowtide.cli.demo.results_table import show

    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    click.echo(show(comparison, in_unicode=encoding.lower().startswith("utf")))
    if json_to is not None:
        write(comparison.to_json(), json_to)
