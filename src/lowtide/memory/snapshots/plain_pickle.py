"""A pickle reader that makes plain data and nothing else, so that a file from a stranger can do no harm."""

from __future__ import annotations

import io
import mmap
import pickle
from pathlib import Path
from typing import Any, NoReturn

from lowtide.errors import LowtideError
from lowtide.memory.snapshots import pickle_checks as opcodes
from lowtide.memory.untrusted_files import in_one_line


class _Plain(pickle.Unpickler):
    """Builds dicts, lists, tuples, text, numbers, booleans and None; refuses whatever names a class or function."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it points to data outside of it")


def load_plain(path: str | Path) -> Any:
    """The plain data pickled in a file. Raises LowtideError for other files, and for a pickle that holds more."""
    try:
        with Path(path).open("rb") as file:
            _check(file)
            return _Plain(file).load()
    except OSError as error:
        raise LowtideError(f"no snapshot could be read: {error}.") from error
    except Exception as error:  # a broken pickle may raise nearly anything
        raise LowtideError(
            f"{path} is not a memory snapshot: {in_one_line(str(error) or type(error).__name__)}. A snapshot is plain "
            "data, pickled: torch.cuda.memory._dump_snapshot(path) writes one."
        ) from error


def _check(file: io.BufferedReader) -> None:
    """Look through a pickle without reading it into memory of this process's own."""
    if not file.seekable():
        raise ValueError("it is no file that can be read twice")
    if not file.seek(0, io.SEEK_END):
        raise ValueError("it is empty")
    file.seek(0)
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        opcodes.check(mapped)
