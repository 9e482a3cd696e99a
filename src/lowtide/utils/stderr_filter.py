"""Keep lines that C++ libraries print unconditionally off the user's terminal."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def without_noise(descriptor: int, *noise: bytes) -> Iterator[Callable[[], int]]:
    """Buffer output to a file descriptor (1 or 2) during the block, then write it out without lines that contain any of
    `noise`.

    Yields a function that returns the number of bytes buffered so far. If the descriptor is closed or no temporary file
    can be created, nothing is buffered. Use it for short blocks only, because output of other threads is buffered too.
    """
    stream = {1: sys.stdout, 2: sys.stderr}[descriptor]
    with contextlib.ExitStack() as cleanup:
        try:
            real = os.dup(descriptor)
            cleanup.callback(os.close, real)
            sink = cleanup.enter_context(tempfile.TemporaryFile(buffering=0))
            _flush(stream)
            os.dup2(sink.fileno(), descriptor)
        except (OSError, ValueError):  # ValueError: the stream was closed in Python
            yield lambda: 0
            return
        try:
            yield lambda: os.fstat(sink.fileno()).st_size
        finally:
            with contextlib.suppress(Exception):  # restore the descriptor in any case
                _flush(stream)
            os.dup2(real, descriptor)
            sink.seek(0)
            lines = sink.read().splitlines(keepends=True)
            others = b"".join(line for line in lines if not any(part in line for part in noise))
            if others:
                with contextlib.suppress(OSError):  # C++ writes nothing either if the file is full
                    os.write(real, others)


def _flush(stream: object) -> None:
    """Flush the Python object `stream` and all output buffers of the C library."""
    flush = getattr(stream, "flush", None)
    if flush is not None:
        flush()
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)
