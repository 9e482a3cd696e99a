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

        The context manager `within` is entered before the script begins and left while its variables still exist.
        LowtideError is raised, not printed.
        """
        with interrupts_delayed(), self._as_main() as main, resend_dropped_interrupts(), within or nullcontext():
            try:
                exec(self._code(main), main.__dict__)
            except SystemExit as end:
                return _find_exit_code(end)
            except LowtideError:
                raise
            except (Exception, KeyboardInterrupt) as error:
                traces = _drop_own_frames(error)
                sys.excepthook(type(error), error, error.__traceback__)
                for trace in traces:  # their frames hold the step's tensors as long as a traceback refers to them
                    traceback.clear_frames(trace)
                return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        return 0

    def _code(self, main: ModuleType) -> CodeType:
        """Return the script's compiled code; set the file and import attributes of `main`, its `__main__` module."""
        if not self.is_module:
            main.__file__ = self._path
            return compile(Path(self._path).read_bytes(), self._path, "exec", dont_inherit=True)
        spec = self._spec()
        if spec is not None and spec.submodule_search_locations is not None:  # a package is run by its __main__
            spec = importlib.util.find_spec(f"{self.target}.__main__")
        code = spec.loader.get_code(spec.name) if spec is not None and isinstance(spec.loader, InspectLoader) else None
        if spec is None or code is None:
            raise LowtideError(
                f"there is no module {self.target} to run. Run this in the folder that contains it, or install it."
            )
        main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
        main.__file__ = spec.origin
        sys.argv[0] = spec.origin or self.target
        return code

    def _spec(self) -> ModuleSpec | None:
        try:
            return importlib.util.find_spec(self.target)
        except ModuleNotFoundError as error:  # its parent package can't be found either
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


def _find_exit_code(end: SystemExit) -> int:
    """Return the exit code that Python would end with; print the text of `end`, if any, to stderr as Python does."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)  # noqa: T201
    return 1


_OWN_FOLDER = str(Path(__file__).parents[1]) + os.sep
_OURS = (str(Path(__file__).parent) + os.sep, "<frozen importlib")


def _drop_own_frames(error: BaseException) -> list[TracebackType]:
    """Remove Lowtide's frames from the tracebacks of `error` and of its causes; return the tracebacks as they were."""
    traces: list[TracebackType] = []
    pending: list[BaseException | None] = [error]
    visited: set[int] = set()
    while pending:
        each = pending.pop()
        if each is None or id(each) in visited:
            continue
        visited.add(id(each))
        pending += [
            each.__cause__,
            each.__context__,
            *(each.exceptions if isinstance(each, BaseExceptionGroup) else ()),
        ]
        if each.__traceback__ is not None:
            traces.append(each.__traceback__)
            each.__traceback__ = _keep_script_frames(each.__traceback__)
    return traces


def _keep_script_frames(trace: TracebackType) -> TracebackType | None:
    """Return `trace` from the script's first frame on, without Lowtide's frames unless one of them raised the error.

    Return None if the script never started, as after a syntax error.
    """
    entries = list(_entries(trace))
    first = next((n for n, entry in enumerate(entries) if not _is_in(entry, *_OURS)), len(entries))
    entries = entries[first:]
    drops = bool(entries) and not _is_in(entries[-1], _OWN_FOLDER)
    shown: TracebackType | None = None
    handled = False  # by torch's call of Lowtide's `__torch_function__`, which calls the same function again
    for entry in reversed(entries):
        if drops and _is_in(entry, _OWN_FOLDER):
            handled = False
        elif drops and entry.tb_frame.f_globals.get("__name__") == "torch.overrides":
            handled = True
        elif handled and shown is not None and entry.tb_frame.f_code is shown.tb_frame.f_code:
            handled = False
        else:
            shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shown


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_in(entry: TracebackType, *folders: str) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(folders)
