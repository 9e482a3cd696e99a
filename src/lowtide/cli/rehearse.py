"""`lowtide rehearse`: profile the training step of a script."""

from __future__ import annotations

import click

from lowtide.cli.report_option import command_line, report_option, write_report
from lowtide.cli.script_or_profile import (
    OWN_OPTIONS_FIRST,
    in_place_option,
    is_profile,
    output_option,
    processes_option,
    profile_of,
    script_arguments,
    write,
)


@click.command("rehearse", context_settings=OWN_OPTIONS_FIRST)
@click.option("--plain", is_flag=True, help="Run one more step without a plan, to measure its peak and time.")
@in_place_option
@output_option("--json", "json_to", 'Write the profile to FILE as JSON; "-": print only that.')
@report_option
@processes_option
@script_arguments()
def rehearse(
    plain: bool,
    no_in_place: bool,
    processes: int | None,
    rank: int,
    json_to: str | None,
    report_to: str | None,
    target: str,
    args: tuple[str, ...],
    is_module: bool,
) -> int:
    """Profile the training step of SCRIPT: its memory, and the smallest peak of any plan.

    Runs the unchanged script until its model has been rehearsed, and ends it there, after two steps of training. The
    first one needs about as much memory as checkpointing every block does, and the second one less. If batches are of
    several sizes, up to 20 steps are run, until the largest size has come twice; a step may then need as much memory as
    the plain one. So may the steps of a model that is compiled as a whole. Options of this command come before SCRIPT;
    everything after it is passed to the script.

    `lowtide plan make` and `lowtide frontier` read the profile. Exit code 2: the script ended before it was rehearsed.
    """
    if is_profile(target, is_module=is_module) and plain:
        raise click.UsageError(f"{target} is a profile, and --plain needs a script: give the script.")
    profile = profile_of(
        target,
        args,
        is_module=is_module,
        plain=plain,
        quiet=json_to == "-",
        no_in_place=no_in_place,
        n_processes=processes,
        rank=rank,
    )
    if json_to != "-":
        click.echo(str(profile))
    if json_to is not None:
        write(profile.to_json(), json_to)
    if report_to is not None:
        from lowtide.report.run_record import record_of, with_frontier

        write_report(with_frontier(record_of(command_line(), profile=profile)), report_to)
    return 0
