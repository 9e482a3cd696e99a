"""`lowtide watch`: run a training script unchanged, and say what it leaves in memory."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("watch", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--json",
    "json_to",
    type=click.Path(dir_okay=False, writable=True),
    metavar="FILE",
    help="Write what was found to FILE.",
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def watch(json_to: str | None, script: str, arguments: tuple[str, ...]) -> int:
    """Run SCRIPT with its ARGUMENTS, and say what it leaves in memory.

    Finds graphs and tensors that stay although nobody needs them: bytes, since which step, who holds them, which line
    made them, and how to mend it. The findings go to stderr. Exit code 1: there are some; 2: the script failed.
    """
    from lowtide.watching.script import watch_script

    watched, exit_code = watch_script(script, arguments)
    click.echo(f"\nlowtide watch: {watched}", err=True)
    if json_to is not None:
        watched.to_json(Path(json_to))
    if exit_code:
        click.echo(f"the script ended with exit code {exit_code}", err=True)
        return 2
    return 1 if watched.findings else 0
