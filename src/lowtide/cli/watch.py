"""`lowtide watch`: run a training script unchanged, and report the memory that it leaves behind."""

from __future__ import annotations

import click

from lowtide.cli.report_option import format_command_line, report_option, write_report
from lowtide.cli.script_or_profile import OWN_OPTIONS_FIRST, output_option, script_arguments, write
from lowtide.utils.messages import speaker


@click.command("watch", context_settings=OWN_OPTIONS_FIRST)
@output_option("--json", "json_to", 'Write the findings to FILE as JSON; "-": to stdout, after the script\'s output.')
@report_option
@script_arguments()
def watch(json_to: str | None, report_to: str | None, target: str, args: tuple[str, ...], is_module: bool) -> int:
    """Run SCRIPT with its ARGS, and report the tensors and graphs that it leaves in memory.

    Each finding states the bytes, the first step, the object that holds them, the line that made the tensors, and the
    fix. Findings go to stderr, even if the script is interrupted. Exit code 1: there are findings; 2: SCRIPT failed.
    """
    from lowtide.diagnostics.leaks.watcher import Watch
    from lowtide.script.runner import INTERRUPTED, Script

    watched = Watch(None, None)
    exit_code = Script(target=target, args=args, is_module=is_module).run(within=watched)
    click.echo(f"\n{speaker('lowtide watch')}: {watched}", err=True)
    if json_to is not None:
        write(watched.to_json(), json_to)
    if report_to is not None:
        write_report(watched.to_record(format_command_line(), subject=target), report_to)
    if exit_code == INTERRUPTED:  # stopped by Ctrl-C
        return exit_code
    if exit_code:
        click.echo(f"the script ended with exit code {exit_code}", err=True)
        return 2
    return 1 if watched.findings else 0
