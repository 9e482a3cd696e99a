"""Runs a script in this process as `python script.py args` would."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from lowtide.errors import LowtideError


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What to run: a file, or a module of that name (`python -m`), and its arguments."""

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    def __post_init__(self) -> None:
        if not self.is_module and not Path(self.target).is_file():
            raise LowtideError(
                f"{self.target} is not a file. Give the path of a Python script; for a module, use -m {self.target}."
            )

    def run(self) -> int:
        """Run it as the main program; gives its exit code. An exception of its own is shown as Python would show it.

        LowtideError and KeyboardInterrupt pass through.
        """
        with self._as_main():
            try:
                if self.is_module:
                    runpy.run_module(self.target, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(self.target, run_name="__main__")
            except SystemExit as end:
                return _exit_code(end)
            except LowtideError:
                raise
            except Exception as error:
                error.__traceback__ = _its_own(error.__traceback__)
                sys.excepthook(type(error), error, error.__traceback__)
                # Its frames hold what a step needs, as long as somebody has the traceback.
                traceback.clear_frames(error.__traceback__)
                return 1
        return 0

    @contextlib.contextmanager
    def _as_main(self) -> Iterator[None]:
        argv, path = sys.argv, sys.path[:]
        folder = os.getcwd() if self.is_module else os.path.dirname(os.path.abspath(self.target))
        sys.argv = [self.target, *self.args]
        sys.path.insert(0, folder)
        try:
            yield
        finally:
            sys.argv, sys.path[:] = argv, path


def _exit_code(end: SystemExit) -> int:
    """The exit code that Python would end with; a text goes to stderr, as there."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)  # noqa: T201
    return 1


_OURS = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, "<frozen runpy>", runpy.__file__)


def _its_own(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from where the script begins: without our frames and runpy's, as far as they come first."""
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename.startswith(_OURS):
        first = first.tb_next
    return first or trace
