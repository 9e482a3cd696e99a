"""The option `--report FILE` of commands that run something: a page, or the record that pages are made of."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowtide.cli.script_or_profile import check_output_file, write

if TYPE_CHECKING:
    from lowtide.report.run_record import RunRecord

PAGES = (".html", ".htm")


def report_option(body: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--report FILE` to a command."""
    return click.option(
        "--report",
        "report_to",
        type=click.Path(dir_okay=False, writable=True),
        metavar="FILE",
        callback=_checked,
        help="Write a report: a page if FILE ends in .html, or the record for `lowtide report` if it ends in .json.",
    )(body)


def _checked(ctx: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    if path is not None and Path(path).suffix.lower() not in (*PAGES, ".json"):
        raise click.BadParameter(f"{path} ends neither in .html nor in .json.")
    return check_output_file(ctx, parameter, path)


def write_report(run: RunRecord, to: str) -> None:
    """Write a run in the format of the file's extension. Raises LowtideError if writing fails."""
    write(run.to_json() if Path(to).suffix.lower() == ".json" else run.to_html(), to)


def format_command_line() -> str:
    """Return the running command, quoted for a shell."""
    return shlex.join(["lowtide", *(click.get_current_context().find_root().obj or ())])
