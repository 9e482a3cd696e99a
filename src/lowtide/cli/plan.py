"""`lowtide plan`: make plan files, read them, compare them. Only rehearsing a script needs torch."""

from __future__ import annotations

from pathlib import Path

import click

from lowtide.cli.script_or_profile import (
    OWN_OPTIONS_FIRST,
    ProfileSource,
    lever_option,
    output_option,
    profile_source,
    write,
)
from lowtide.utils.amounts import check_budget

PLAN_FILE = click.Path(exists=True, dir_okay=False)


@click.group("plan")
def plan() -> None:
    """Make, show and compare plan files."""


@plan.command("make", context_settings=OWN_OPTIONS_FIRST)
@click.option(
    "--budget",
    required=True,
    metavar="AMOUNT",
    help='Limit for the peak of a step, counting all memory: "8GiB", "500MB", or "60%" of the peak without Lowtide.',
)
@click.option("--cheap", is_flag=True, help="Recompute no matrix product, convolution or attention.")
@output_option("-o", "to", 'Write the plan to FILE; "-", the default: print it.')
@lever_option
@profile_source("PROFILE|SCRIPT")
def make(budget: str, cheap: bool, to: str | None, levers: tuple[str, ...], source: ProfileSource) -> None:
    """Make a plan for a budget, from a profile or a script.

    PROFILE is a file that `lowtide rehearse --json` wrote; its name ends in .json. A SCRIPT is rehearsed first. With
    --processes N, one process on one GPU or on a CPU makes the plan that each of N processes would make, for
    `torchrun ... lowtide run --plan FILE`. With --device the script takes two steps on fake tensors, and needs no GPU.
    Exit code 1: no plan fits the budget.
    """
    check_budget(budget)
    quiet = to in (None, "-")
    profile = source.profile(quiet=quiet, levers=levers)

    from lowtide.planner import plan as plan_for

    made = plan_for(profile, budget, allow="cheap" if cheap else "all")
    if not quiet:
        click.echo(str(made))
    write(made.to_json(), to or "-")


@plan.command("show")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.argument("file", type=PLAN_FILE)
def show_(file: str, as_json: bool) -> None:
    """Show the budget, memory, cost and decisions of the plan in FILE."""
    from lowtide.planner.records import Plan

    read = Plan.from_json(Path(file))
    click.echo(read.to_json() if as_json else str(read))


@plan.command("diff")
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
@click.argument("first", type=PLAN_FILE)
@click.argument("second", type=PLAN_FILE)
def diff(first: str, second: str, as_json: bool) -> int:
    """List the differences between two plan files. Exit code 1: they differ."""
    from lowtide.planner.records import Plan
    from lowtide.report.plan_text import compare, show_diff

    one, other = Plan.from_json(Path(first)), Plan.from_json(Path(second))
    difference = compare(one, other)
    click.echo(difference.to_json() if as_json else show_diff(one, other))
    return 0 if difference.same else 1
