"""Read pickles of plain data and nothing else, so that an untrusted file can do no harm."""

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
    """Unpickler of dicts, lists, tuples, text, numbers, booleans and None; refuses names of classes and functions."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it points to data outside it")


def load_plain(path: str | Path) -> Any:
    """Return the plain data pickled in a file. Raises LowtideError for other files and for other contents."""
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
    """Raise ValueError for a pickle that is invalid or would take too much memory; the file is mapped, not read."""
    if not file.seekable():
        raise ValueError("it is no file that can be read twice")
    if not file.seek(0, io.SEEK_END):
        raise ValueError("it is empty")
    file.seek(0)
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        opcodes.check(mapped)
