"""`lowtide report`: make a page of a run, compare two runs, or export one. Needs no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowtide.cli.report_option import PAGES
from lowtide.cli.script_or_profile import output_option, write
from lowtide.errors import LowtideError
from lowtide.memory.untrusted_files import in_one_line

if TYPE_CHECKING:
    from lowtide.report.run_record import RunRecord

RECORD = click.Path(dir_okay=False, path_type=Path)


def _parse_share(ctx: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    """Parse the option `--fail-above`, `2%` or `0.02`, to a fraction; return None if it is not given.

    Raises BadParameter for any other text.
    """
    if text is None:
        return None
    number, is_percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        share = float(number) / (100 if is_percent else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 100:
        raise click.BadParameter(f"{text!r} is not a share; write it as 2% or 0.02.")
    return share


@click.command("report")
@click.argument("file", type=RECORD)
@click.argument("other", type=RECORD, required=False)
@output_option(
    "-o",
    "to",
    "Write to FILE. Its ending gives the format: .html a page, .json the record, .csv the memory over the step, .sarif "
    'the findings, .perfetto a trace for ui.perfetto.dev. Without it, or with "-": print a summary.',
)
@click.option("--github", is_flag=True, help="Print the findings as annotations of GitHub Actions.")
@click.option(
    "--fail-above",
    callback=_parse_share,
    metavar="SHARE",
    help='With two runs: exit code 1 if the second peak is higher than the first by more than this share, as in "2%".',
)
def report(file: Path, other: Path | None, to: str | None, github: bool, fail_above: float | None) -> int:
    """Write a run, or the changes between two runs, as a page.

    FILE was written by `--report FILE.json` of `lowtide run`, `rehearse`, `estimate`, `watch` or `demo`, by `--json` of
    `rehearse`, `frontier`, `estimate`, `watch` or `demo`, or by `lowtide plan make -o`. Exit code 1: the second peak is
    above the limit of --fail-above; 2: a file is not the record of a run, or the two runs are of different models.
    """
    run = _read(file)
    if other is not None:
        return _compare(run, _read(other), _shorten_names(file, other), to, github, fail_above)
    if fail_above is not None:
        raise click.UsageError("--fail-above needs two runs: lowtide report BEFORE.json AFTER.json.")
    if github:
        from lowtide.report.exports import format_github_annotations

        click.echo(format_github_annotations(run), nl=bool(run.findings))
        return 0
    with _refusing_contradictions(file):
        text = str(run) if to is None or to == "-" else _exporter(to)(run)
    if to is None or to == "-":
        click.echo(text)
    else:
        write(text, to)
    return 0


def _read(file: Path) -> RunRecord:
    from lowtide.cli.demo.results import Comparison
    from lowtide.report.run_files import read_run

    return read_run(file, {"Comparison": lambda path, command: Comparison.from_json(path).to_record(command)})


@contextlib.contextmanager
def _refusing_contradictions(*files: Path | str) -> Iterator[None]:
    """Raise LowtideError, in one line, if parts of a record contradict each other, for example in an edited file."""
    try:
        yield
    except (ArithmeticError, AssertionError, LookupError, ValueError) as error:
        if isinstance(error, LowtideError):
            raise
        named, why = " or ".join(map(str, files)), in_one_line(str(error))
        raise LowtideError(f"{named} is damaged: its parts contradict each other ({why}).") from error


def _shorten_names(file: Path, other: Path) -> tuple[str, str]:
    """Return both paths without the folders that they share, so that they fit above the columns of a table."""
    pairs = zip(file.parent.parts, other.parent.parts, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return str(Path(*file.parts[shared:])), str(Path(*other.parts[shared:]))


def _compare(
    first: RunRecord, second: RunRecord, names: tuple[str, str], to: str | None, github: bool, fail_above: float | None
) -> int:
    from lowtide.report.exports import format_github_annotations
    from lowtide.report.run_comparison import RunComparison

    is_page = to not in (None, "-")
    if is_page and Path(str(to)).suffix.lower() not in PAGES:
        raise click.UsageError(f"{to} does not end in .html: a comparison of two runs is an HTML page.")
    comparison = RunComparison(first, second, names)
    with _refusing_contradictions(*names):
        text, page = str(comparison), comparison.to_html() if is_page else ""
    if github:
        click.echo(format_github_annotations(second, comparison.new_findings), nl=bool(comparison.new_findings))
    else:
        click.echo(text)
    if is_page:
        write(page, str(to))
    change = comparison.peak_change
    return 1 if fail_above is not None and change is not None and change > fail_above else 0


def _exporter(to: str) -> Callable[[RunRecord], str]:
    """Return the function that formats a run for the file name `to`, by its extension."""
    from lowtide.report import exports
    from lowtide.report.page import render_run_page
    from lowtide.report.run_record import RunRecord, with_frontier

    kinds: dict[str, Callable[[RunRecord], str]] = {
        **dict.fromkeys(PAGES, lambda run: render_run_page(with_frontier(run))),
        ".json": RunRecord.to_json,
        ".csv": exports.format_csv,
        ".sarif": exports.sarif,
        ".perfetto": exports.format_perfetto_trace,
    }
    suffix = Path(to).suffix.lower()
    if suffix not in kinds:
        raise LowtideError(f"{to} ends in none of {', '.join(kinds)}: the ending chooses the format.")
    return kinds[suffix]
