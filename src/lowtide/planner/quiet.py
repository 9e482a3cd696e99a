"""Keeps a line off the user's terminal that HiGHS prints whatever its options say.

HiGHS 1.8 to 1.12 prints the name of a function when it mends a solution (https://github.com/jump-dev/HiGHS.jl/issues/312).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator

NOISE = b"HighsMipSolverData::transformNewIntegerFeasibleSolution"


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Hold back what is written to file descriptor 1 and let it out afterwards, less the lines that are NOISE.

    Where there is no stdout, or no place for a temporary file, nothing is held back. For moments only: everything else
    in the process shares the descriptor.
    """
    with contextlib.ExitStack() as cleanup:
        try:
            stdout = os.dup(1)
            cleanup.callback(os.close, stdout)
            sink = cleanup.enter_context(tempfile.TemporaryFile(buffering=0))
            if sys.stdout is not None:
                sys.stdout.flush()
            _flush()
            os.dup2(sink.fileno(), 1)
        except (OSError, ValueError):  # ValueError: sys.stdout was closed in Python
            yield
            return
        try:
            yield
        finally:
            _flush()
            os.dup2(stdout, 1)
            sink.seek(0)
            others = b"".join(line for line in sink.read().splitlines(keepends=True) if NOISE not in line)
            if others:
                os.write(stdout, others)


def _flush() -> None:
    """Write out what C has buffered for its files."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)
