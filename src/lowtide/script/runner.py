"""Run a script in this process as `python script.py args` would."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from lowtide.errors import LowtideError
from lowtide.utils.interrupts import interrupts_delayed, resend_dropped_interrupts

INTERRUPTED = 130
"""The exit code of an interrupted script, as in shells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script file, or the name of a module (`python -m`), and its arguments."""

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False
    _path: str = field(init=False)
    """Absolute path of the file, because a script may change the current folder and be run again."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_path", os.path.abspath(self.target))
        if not self.is_module and not Path(self.target).is_file():
            of_module = "" if self.target.endswith(".py") else f"; for a module, use -m {self.target}"
            raise LowtideError(f"{self.target} is not a file. Give the path of a Python script{of_module}.")

    def run(self, within: AbstractContextManager[object] | None = None) -> int:
        """Run the script as the main program; return its exit code. Print its exceptions as Python would.

        `within` is entered before the script begins and left while its variables still exist. LowtideError passes
        through.
        """
        with interrupts_delayed(), self._as_main() as main, resend_dropped_interrupts(), within or nullcontext():
            try:
                exec(self._code(main), main.__dict__)
            except SystemExit as end:
                return _exit_code(end)
            except LowtideError:
                raise
            except (Exception, KeyboardInterrupt) as error:
                error.__traceback__ = _its_own(error.__traceback__)
                sys.excepthook(type(error), error, error.__traceback__)
                # Its frames hold the step's tensors as long as the traceback is referenced.
                traceback.clear_frames(error.__traceback__)
                return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        return 0

    def _code(self, main: ModuleType) -> CodeType:
        """Return the script's code, and set its origin on `main`."""
        if not self.is_module:
            main.__file__ = self._path
            return compile(Path(self._path).read_bytes(), self._path, "exec", dont_inherit=True)
        spec = self._spec()
        if spec is not None and spec.submodule_search_locations is not None:  # a package is run by its __main__
            spec = importlib.util.find_spec(f"{self.target}.__main__")
        code = spec.loader.get_code(spec.name) if spec is not None and isinstance(spec.loader, InspectLoader) else None
        if spec is None or code is None:
            raise LowtideError(f"there is no module {self.target} to run. Is its folder the current one, or installed?")
        main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
        main.__file__ = spec.origin
        sys.argv[0] = spec.origin or self.target
        return code

    def _spec(self) -> ModuleSpec | None:
        try:
            return importlib.util.find_spec(self.target)
        except ModuleNotFoundError as error:  # nor can its parent package be found
            if error.name is not None and f"{self.target}.".startswith(f"{error.name}."):
                return None
            raise

    @contextlib.contextmanager
    def _as_main(self) -> Iterator[ModuleType]:
        main = ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        _LAST.clear()  # frees the objects that an earlier script left
        before = _Program()
        real = os.path.realpath(self._path)  # Python does not find files beside a link
        folder = os.getcwd() if self.is_module else os.path.dirname(real)
        sys.modules["__main__"], sys.argv = main, [self.target, *self.args]
        sys.path.insert(0, folder)
        try:
            yield main
            # left out if the script was ended early: exit functions must not save a partly trained model
            _LAST.append(_Program())
            atexit.unregister(_restore_last)
            # registered after the exit functions of the script, so it runs before them
            atexit.register(_restore_last)
        finally:
            before.restore()


class _Program:
    """Snapshot of process-wide state that a main program may change."""

    def __init__(self) -> None:
        self._main, self._argv, self._path = sys.modules["__main__"], sys.argv, sys.path[:]
        self._folder: str | None = None
        with contextlib.suppress(OSError):  # the folder was deleted
            self._folder = os.getcwd()

    def restore(self) -> None:
        """Restore the state of the process that the script had changed."""
        sys.modules["__main__"], sys.argv, sys.path[:] = self._main, self._argv, self._path
        with contextlib.suppress(OSError):
            if self._folder is not None:
                os.chdir(self._folder)


_LAST: list[_Program] = []
"""Snapshot of the script that ended last, if any."""


def _restore_last() -> None:
    """Make the script the main module again at exit, before Python calls the exit functions that it registered."""
    for script in _LAST:
        script.restore()


def _exit_code(end: SystemExit) -> int:
    """Return the exit code that Python would end with; print a text to stderr, as Python does."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)  # noqa: T201
    return 1


_OURS = (os.path.dirname(os.path.abspath(__file__)) + os.sep, "<frozen importlib")


def _its_own(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the script's first frame on; None if it never started, as with a syntax error."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    return trace
