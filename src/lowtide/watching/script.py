"""Runs a script under the watch, as the main program."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from lowtide.errors import LowtideError
from lowtide.watching.watch import Watch


def watch_script(path: str, arguments: Sequence[str]) -> tuple[Watch, int]:
    """Run the script at `path` as `python path arguments` would, and watch it. Gives the watch and its exit code.

    An exception of the script's is shown as Python would show it. Raises LowtideError if there is no such file.
    """
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise LowtideError(f"{path} cannot be read: {error.strerror}. Give the path of a Python script.") from error
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__)
    before = sys.modules["__main__"], sys.argv, sys.path[:]
    watched = Watch(None, None)
    sys.modules["__main__"], sys.argv = main, [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        with watched:  # its last look comes before the script's variables are gone
            exit_code = _run(source, path, main)
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = before
    return watched, exit_code


def _run(source: bytes, path: str, main: ModuleType) -> int:
    try:
        exec(compile(source, path, "exec"), main.__dict__)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        shown = error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
        sys.stderr.write("".join(traceback.format_exception(shown)))
        return 1
    return 0
