"""`lowtide rehearse`: profile the training step of a script."""

from __future__ import annotations

import click

from lowtide.cli.report_option import format_command_line, report_option, write_report
from lowtide.cli.script_or_profile import OWN_OPTIONS_FIRST, ProfileSource, output_option, profile_source, write


@click.command("rehearse", context_settings=OWN_OPTIONS_FIRST)
@click.option(
    "--plain",
    is_flag=True,
    help="Run one more step without a plan, to measure its peak and time: extra times then have shares.",
)
@output_option("--json", "json_to", 'Write the profile to FILE as JSON; "-": print only that.')
@report_option
@profile_source("SCRIPT")
def rehearse(plain: bool, json_to: str | None, report_to: str | None, source: ProfileSource) -> int:
    """Profile the training step of SCRIPT: its memory, and the smallest peak of any plan.

    Runs the unchanged script for two training steps, and then ends it. The first step needs about as much memory as
    checkpointing every block, the second one less. If batch sizes vary, up to 20 steps run, or fewer if the largest
    size comes twice earlier; such a step may need as much memory as without Lowtide. So may the steps of a model that
    is compiled as a whole. Options of this command come before SCRIPT; everything after it is passed to the script.

    `lowtide plan make` and `lowtide frontier` read the profile. Exit code 2: the script ended before it was rehearsed.
    """
    if source.is_profile and plain:
        raise click.UsageError(f"{source.target} is a profile, and --plain needs a script: give the script.")
    profile = source.profile(plain=plain, quiet=json_to == "-")
    if json_to != "-":
        click.echo(str(profile))
    if json_to is not None:
        write(profile.to_json(), json_to)
    if report_to is not None:
        from lowtide.report.run_record import build_record, with_frontier

        write_report(with_frontier(build_record(format_command_line(), profile=profile)), report_to)
    return 0
