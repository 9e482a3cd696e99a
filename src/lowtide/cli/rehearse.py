"""`lowtide rehearse`: what the training step of a script needs, from two of its steps."""

from __future__ import annotations

import click

from lowtide.cli.source import OWN_OPTIONS_FIRST, output_option, profile_of, script_arguments, write


@click.command("rehearse", context_settings=OWN_OPTIONS_FIRST)
@click.option("--plain", is_flag=True, help="Run one step more without any plan, for its true peak and time.")
@output_option("--json", "json_to", 'Write the profile to FILE; "-": print that alone.')
@script_arguments()
def rehearse(plain: bool, json_to: str | None, target: str, args: tuple[str, ...], is_module: bool) -> None:
    """What a training step of SCRIPT needs, and how far down plans can go.

    Runs the script, which stays as it is, until its model has been rehearsed, and ends it there: after two steps of
    training, of which the first needs about as much memory as checkpointing every block does, and the second less.
    Options of its own come before SCRIPT; all that follows is the script's.

    The profile is what `lowtide plan make` and `lowtide frontier` work on.
    """
    profile = profile_of(target, args, is_module=is_module, plain=plain, quiet=json_to == "-")
    if json_to != "-":
        from lowtide.report.rehearsed import show

        click.echo(show(profile))
    if json_to is not None:
        write(profile.to_json(), json_to)
