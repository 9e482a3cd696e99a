"""Lines of this package's own, on stderr or to the program's log, in the middle of what the program writes."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from contextlib import AbstractContextManager
from typing import Final

LOG: Final = logging.getLogger("lowtide")


def say(text: str) -> None:
    """Write a line on stderr; a program whose stderr is full or closed goes on."""
    with contextlib.suppress(OSError, ValueError), beside_bars():
        print(f"{speaker()}: {text}", file=sys.stderr, flush=True)  # noqa: T201


def tell(text: str) -> None:
    """Log a line under the name "lowtide", or write it on stderr where the program looks at no such log."""
    if LOG.isEnabledFor(logging.INFO) and LOG.hasHandlers():
        LOG.info(text)
    else:
        say(text)


def note(text: str) -> None:
    """Log a line under the name "lowtide", and write it nowhere else."""
    LOG.info(text)


def speaker(name: str = "lowtide") -> str:
    """Return the name, with the number of this process where it is one of several."""
    return name if rank() is None else f"{name}, rank {rank()}"


def beside_bars() -> AbstractContextManager[None]:
    """A block that writes to stderr. Progress bars of the program's, by tqdm, end no line: they make room meanwhile."""
    bars = sys.modules.get("tqdm.std")
    return contextlib.nullcontext() if bars is None else bars.tqdm.external_write_mode(file=sys.stderr)


def rank() -> int | None:
    """The number of this process among several that train together, as torchrun tells it; None for a single one."""
    return int(os.environ.get("RANK", "0")) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None
