"""A page of tables, one for each model, whose lines are printed as they are measured."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from contest import allocator


class Measured(Protocol):
    """Measurements of one way to train a model."""

    @property
    def peak_bytes(self) -> int: ...

    def line(self, plain_bytes: int) -> str:
        """Format the measurements as a line of a table; shares are relative to the plain step's peak."""
        ...


DOCS = Path(__file__).resolve().parents[2] / "docs"


def parse_models(doc: str, models: Sequence[str]) -> list[str] | None:
    """Parse the command line, and return the models that it names; None for all models.

    If the process was started without malloc's settings, which malloc reads only at the start, the script is run again
    in a process that has them.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=models)
    named: list[str] | None = parser.parse_args().models
    if not allocator.in_force():
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=allocator.environment(), check=False).returncode)
    return named


def write(page: str | None, head: Iterable[str], sections: Iterable[Iterable[str]]) -> None:
    """Print the lines of all sections as they are measured, and write them to the page of docs/ if it is named."""
    lines = list(head)
    for line in (line for section in sections for line in section):
        print(line, flush=True)
        lines.append(line)
    if page is not None:
        (DOCS / f"{page}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def make(page: str, title: str, doc: str, models: Sequence[str], section: Callable[[str], Iterable[str]]) -> None:
    """Measure and print the tables of the models that the command line names; if it names none, of all, and write the
    page.
    """
    named = parse_models(doc, models)
    about = head(page, title, doc, f"{torch.get_num_threads()} threads")
    write(None if named else page, about, map(section, named or models))


def rows_of(description: str, columns: Sequence[str], rows: Iterable[Measured]) -> Iterator[str]:
    """Yield a heading and a table, line by line, as the rows are measured; the first row is the plain step."""
    yield from ("", f"## {description}", "", *columns)
    plain_bytes = 0
    for row in rows:
        plain_bytes = plain_bytes or row.peak_bytes
        yield row.line(plain_bytes)


def find_text_after_commands(doc: str) -> list[str]:
    """Return the lines of a script's docstring that follow its commands, which are indented."""
    _, _, text = doc.rpartition("\n    python ")
    return text.partition("\n\n")[2].rstrip().splitlines()


def head(page: str, title: str, doc: str, runs_in: str) -> Iterator[str]:
    """Yield the text before a page's tables: the script's docstring after its commands, and the versions and settings
    used.
    """
    yield f"# {title}"
    yield ""
    yield f"Made by `python bench/{page}.py`."
    yield ""
    yield from find_text_after_commands(doc)
    yield ""
    yield f"torch {torch.__version__}, Python {platform.python_version()}, {runs_in}, with"
    yield " ".join(f"`{key}={value}`" for key, value in allocator.SETTINGS.items()) + "."
