"""A page of tables, one for each model, that are written as they are measured."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from contest import allocator

DOCS = Path(__file__).resolve().parents[2] / "docs"


def models_asked(doc: str, models: Sequence[str]) -> list[str] | None:
    """Those that the command line names; None for all of them.

    The script is started anew where malloc's settings are not in force: it reads them when a process starts.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=models)
    named: list[str] | None = parser.parse_args().models
    if not allocator.in_force():
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=allocator.environment(), check=False).returncode)
    return named


def write(page: str | None, head: Iterable[str], sections: Iterable[Iterable[str]]) -> None:
    """Print the lines of all sections as they are measured, and put them on a page of the documents if it is named."""
    lines = list(head)
    for line in (line for section in sections for line in section):
        print(line, flush=True)
        lines.append(line)
    if page is not None:
        (DOCS / f"{page}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def head(page: str, title: str, doc: str, runs_in: str) -> Iterator[str]:
    """What a page says before its tables: the last paragraph of its script's own words, and what it ran on."""
    yield f"# {title}"
    yield ""
    yield f"`python bench/{page}.py`. " + " ".join(doc.split("\n\n")[-1].split())
    yield ""
    yield f"torch {torch.__version__}, Python {platform.python_version()}, {runs_in}, with"
    yield " ".join(f"`{key}={value}`" for key, value in allocator.SETTINGS.items()) + "."
