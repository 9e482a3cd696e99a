"""Write Lowtide's own lines to stderr or to the program's log, in the middle of the program's output."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Final

from lowtide.utils.interrupts import uninterrupted

LOG: Final = logging.getLogger("lowtide")


def say(text: str) -> None:
    """Write a line to stderr. If stderr is full or closed, write nothing and raise no error."""
    with contextlib.suppress(OSError, ValueError), beside_bars():
        # one write: several processes may share the file, and print writes the newline by itself
        print(f"{speaker()}: {text}\n", end="", file=sys.stderr, flush=True)  # noqa: T201


def tell(text: str) -> None:
    """Log a line under the name "lowtide", or write it to stderr if the program does not show that log."""
    if LOG.isEnabledFor(logging.INFO) and LOG.hasHandlers():
        LOG.info(text)
    else:
        say(text)


def note(text: str) -> None:
    """Log a line under the name "lowtide" and write it nowhere else."""
    LOG.info(text)


def speaker(name: str = "lowtide") -> str:
    """Return `name`, with the rank of this process if it is one of several: "lowtide, rank 3"."""
    return name if rank() is None else f"{name}, rank {rank()}"


shown_bars: Final[list[Callable[[], AbstractContextManager[object]]]] = []
"""Functions that clear one of Lowtide's bars for a block, as long as that bar is shown."""


@contextlib.contextmanager
def beside_bars() -> Iterator[None]:
    """Clear progress bars, Lowtide's and the program's tqdm bars, during the block, to make room for a line on stderr.

    Interrupts are delayed while bars are cleared and redrawn, because tqdm's lock would stay held.
    """
    stack = contextlib.ExitStack()
    try:
        uninterrupted(_clear_bars)(stack)
        yield
    finally:
        uninterrupted(stack.close)()


def _clear_bars(stack: contextlib.ExitStack) -> None:
    """Clear all progress bars; closing `stack` redraws them."""
    if (bars := sys.modules.get("tqdm.std")) is not None:
        stack.enter_context(bars.tqdm.external_write_mode(file=sys.stderr))
    for cleared in shown_bars:
        stack.enter_context(cleared())


def rank() -> int | None:
    """Return the rank of this process (torchrun's RANK), or None if a single process trains."""
    return int(os.environ.get("RANK", "0")) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None
