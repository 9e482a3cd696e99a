"""Keeps the lines that torch's profiler writes to stderr, from C++, off the user's terminal.

The profiler writes a `USDT:` line each time it starts or stops (torch 2.13), and the CPU allocator warns of the first
block, and then of each thousandth, that is freed under a profiler without having been allocated under one.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator

NOISE = (b"USDT:", b"Memory block of unknown size was allocated before the profiling started")


@contextlib.contextmanager
def without_noise() -> Iterator[Callable[[], int]]:
    """Hold back what is written to file descriptor 2 and let it out afterwards, less the lines that are NOISE.

    Gives a function that says how many bytes were held back so far. Where there is no stderr, or no place for a
    temporary file, nothing is held back. For moments only: everything else in the process shares the descriptor.
    """
    with contextlib.ExitStack() as cleanup:
        try:
            stderr = os.dup(2)
            cleanup.callback(os.close, stderr)
            sink = cleanup.enter_context(tempfile.TemporaryFile(buffering=0))
            if sys.stderr is not None:
                sys.stderr.flush()
            os.dup2(sink.fileno(), 2)
        except (OSError, ValueError):  # ValueError: sys.stderr was closed in Python
            yield lambda: 0
            return
        try:
            yield lambda: os.fstat(sink.fileno()).st_size
        finally:
            os.dup2(stderr, 2)
            sink.seek(0)
            lines = sink.read().splitlines(keepends=True)
            others = b"".join(line for line in lines if not any(noise in line for noise in NOISE))
            if others:
                os.write(stderr, others)
