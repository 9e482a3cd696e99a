"""`lowtide frontier`: show the cost of each budget."""

from __future__ import annotations

from pathlib import Path

import click

from lowtide.cli.script_or_profile import OWN_OPTIONS_FIRST, ProfileSource, output_option, profile_source, write
from lowtide.utils.messages import say
from lowtide.utils.optional_deps import require_pictures


@click.command("frontier", context_settings=OWN_OPTIONS_FIRST)
@click.option(
    "--budgets", "n", type=click.IntRange(2), default=24, show_default=True, help="Number of budgets to plan for."
)
@click.option(
    "--beside",
    type=click.Path(exists=True, dir_okay=False),
    help="JSON file with named points of other methods, to show next to the plans.",
)
@output_option("--json", "json_to", 'Write the points to FILE as JSON; "-": print only them.')
@output_option("--picture", "picture_to", "Draw the frontier; FILE ends in .svg, .png or .pdf.")
@profile_source("PROFILE|SCRIPT")
def frontier(n: int, beside: str | None, json_to: str | None, picture_to: str | None, source: ProfileSource) -> None:
    """List the extra time that each budget costs, from the smallest peak that a plan reaches to the plain peak.

    PROFILE is a file that `lowtide rehearse --json` wrote; its name ends in .json. A SCRIPT is rehearsed first, and one
    more step is run to time the plain step.
    """
    from lowtide.planner.budget_frontier import frontier as frontier_of
    from lowtide.planner.budget_frontier import read_points
    from lowtide.report.frontier_table import show

    if picture_to is not None:
        _check_can_draw(picture_to)  # before the work, not after it
    others = () if beside is None else read_points(Path(beside))
    quiet = json_to == "-"
    profile = source.profile(plain=True, quiet=quiet)
    curve = frontier_of(profile, n_budgets=n)
    if not quiet:
        click.echo(show(curve, others))
    if json_to is not None:
        write(curve.to_json(), json_to)
    if picture_to is not None:
        from lowtide.report.frontier_figure import draw, save

        save(draw(curve, others), picture_to)
        say(f"written: {picture_to}")


def _check_can_draw(path: str) -> None:
    """Raise BadParameter for a suffix of no image format, and PackageMissing if packages for plotting are missing."""
    if Path(path).suffix.lower() not in (".svg", ".png", ".pdf"):
        raise click.BadParameter(f"{path} does not end in .svg, .png or .pdf.", param_hint="--picture")
    require_pictures("lowtide frontier --picture")
