"""`lowtide explain`: find out why memory ran out, from an error message or a log."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TextIO

import click

from lowtide.diagnostics.oom import explain as explain_text
from lowtide.diagnostics.oom.text_stream import PIECE
from lowtide.errors import LowtideError


@click.command("explain")
@click.argument("file", type=click.File(encoding="utf-8", errors="replace"))
@click.option(
    "--alloc-conf",
    metavar="TEXT",
    help="PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF) of the failed run, if the log does not show it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the explanation as JSON.")
def explain(file: TextIO, alloc_conf: str | None, as_json: bool) -> int:
    """Explain the out-of-memory error in FILE, a whole log or only the message; "-" reads stdin.

    Lowtide knows the messages of torch 0.4 to 2.13 for CUDA, ROCm, XPU, MPS and CPU, of Ascend NPUs, and of libraries
    that are used with torch. The command needs neither torch nor a GPU. Exit code 2: FILE has no known message.
    """
    log = _Log(file)
    settings = [] if alloc_conf is None else [f"PYTORCH_ALLOC_CONF={alloc_conf}\n"]
    explanation = explain_text(chain(settings, log.pieces()))
    if explanation is None:
        what = "nothing: it is empty" if log.is_empty else f"other text, lines: {log.n_lines}"
        raise LowtideError(
            "no known out-of-memory message was found.\n  "
            f"Found: {what}.\n  "
            "Give the text of the error, with its traceback if there is one: python train.py 2>&1 | lowtide explain -"
        )
    click.echo(explanation.to_json() if as_json else str(explanation))
    return 0


class _Log:
    """A log file that is read in pieces, with counts of its lines for the error if no known message is found."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.is_empty, self.n_lines = True, 0

    def pieces(self) -> Iterator[str]:
        """Yield the text in pieces, which may end within a line."""
        in_line = False
        while piece := self._read():
            self.is_empty &= piece.isspace()
            lines = piece.splitlines(keepends=True)
            self.n_lines += len(lines) - in_line
            in_line = lines[-1].splitlines() == [lines[-1]]  # no line break at the end
            yield piece

    def _read(self) -> str:
        try:
            return self._file.read(PIECE)
        except OSError as error:
            raise LowtideError(f"{self._file.name} cannot be read to its end: {error.strerror or error}.") from None
