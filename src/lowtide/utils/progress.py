"""Progress of work that takes seconds: a bar on stderr while a stage runs, and one line when it is over.

The bar is rich's on a terminal and tqdm's in a notebook. If stderr is a pipe or a file, there is no bar, and the line
goes only to the log named "lowtide", at INFO. The beginning of a stage is logged at DEBUG.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, Self

from lowtide.units import format_time
from lowtide.utils.interrupts import uninterrupted, uninterrupted_enter
from lowtide.utils.messages import LOG, rank, say, shown_bars

REFRESH_S = 0.1
"""Minimum seconds between two updates of a bar."""


class Bar(Protocol):
    """A progress bar for a stage."""

    def show(self, n_done: int, total: int | None) -> None: ...

    def close(self) -> None: ...


class _Stages(threading.local):
    """The stages in progress in this thread, the innermost last."""

    def __init__(self) -> None:
        self.open: list[Stage] = []
        self.are_shown = False


_here = _Stages()


@contextmanager
def showing(are_shown: bool) -> Iterator[None]:
    """Show progress bars of the stages that this thread begins in the block; hide them if `are_shown` is False."""
    before, _here.are_shown = _here.are_shown, are_shown
    try:
        yield
    finally:
        _here.are_shown = before


class Stage:
    """A part of Lowtide's work whose progress bar is shown while its `with` block runs. A nested stage's bar replaces
    the outer one's.

    Interrupts are delayed while the bar is shown, drawn or hidden: rich and tqdm would leave it half begun or half
    ended.
    """

    def __init__(self, doing: str, total: int | None = None) -> None:
        """Prepare a stage.

        Args:
            doing: The work in words, as in "verifying".
            total: The number of expected calls of `advance`; None if unknown.
        """
        self.result = ""
        """The line written at the end, without the time; nothing is written if it is empty."""
        self._doing, self._total, self._n_done = doing, total, 0
        self._is_shown = False
        self._bar: Bar | None = None
        self._shown_at = 0.0

    @uninterrupted_enter
    def __enter__(self) -> Self:
        LOG.debug("%s", self._doing)
        self._open = _here.open  # the stages of this thread; the stage may end in another one
        if self._open:
            self._open[-1]._hide()
        self._open.append(self)
        self._is_shown, self._began = _here.are_shown, time.monotonic()
        self._show()
        return self

    @uninterrupted
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._hide()
        self._open.remove(self)
        if error is None and self.result:
            self._tell(f"{self.result}, {format_time((time.monotonic() - self._began) * 1000)}")
        if self._open:
            self._open[-1]._show()

    def advance(self) -> None:
        """Advance the stage's progress bar by one."""
        self._n_done += 1
        if self._bar is not None and (now := time.monotonic()) - self._shown_at > REFRESH_S:
            self._shown_at = now
            self._draw()

    def _tell(self, line: str) -> None:
        """Write the line to stderr if bars are shown and the program does not show Lowtide's log; otherwise log it."""
        if (
            self._is_shown
            and _choose_bar_class() is not None
            and not (LOG.isEnabledFor(logging.INFO) and LOG.hasHandlers())
        ):
            say(line)
        else:
            LOG.info(line)

    def _show(self) -> None:
        if self._is_shown and (screen := _choose_bar_class()) is not None:
            self._bar = screen(self._doing)
            self._draw()

    @uninterrupted
    def _draw(self) -> None:
        with suppress(OSError, ValueError):  # stderr is full or closed
            if self._bar is not None:
                self._bar.show(self._n_done, None if self._total is None else max(self._total, self._n_done))

    def _hide(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            with suppress(OSError, ValueError):
                bar.close()


def advance() -> None:
    """Advance the progress bar of this thread's innermost stage by one. Do nothing if no stage is in progress."""
    if _here.open:
        _here.open[-1].advance()


def _choose_bar_class() -> Callable[[str], Bar] | None:
    """Return the class of progress bars for this process's notebook or terminal, or None if it has neither."""
    if rank():
        return None
    if _is_notebook():
        return _NotebookBar
    is_terminal = sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
    return _TerminalBar if is_terminal and not _has_bars() else None


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def _has_bars() -> bool:
    """Return True if the program shows tqdm bars, which would interleave with Lowtide's bar."""
    bars = sys.modules.get("tqdm.std")
    return bars is not None and bool(getattr(bars.tqdm, "_instances", ()))


class _TerminalBar:
    """A progress bar in the last line of a terminal. It is drawn without a thread, because a thread could disturb
    measurements of the work.
    """

    def __init__(self, doing: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("lowtide: {task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task(doing, total=None)
        self._progress.start()
        shown_bars.append(self._cleared)

    @contextmanager
    def _cleared(self) -> Iterator[None]:
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()

    def show(self, n_done: int, total: int | None) -> None:
        self._progress.update(self._task, completed=n_done, total=total, refresh=True)

    def close(self) -> None:
        shown_bars.remove(self._cleared)
        self._progress.stop()


class _NotebookBar:
    """A progress bar in the output of a notebook cell; it shows nothing if tqdm is not installed."""

    def __init__(self, doing: str) -> None:
        self._bar: Any = None
        with suppress(ImportError):
            self._bar = importlib.import_module("tqdm.auto").tqdm(desc=f"lowtide: {doing}", leave=False)

    def show(self, n_done: int, total: int | None) -> None:
        if self._bar is not None:
            self._bar.total, self._bar.n = total, n_done
            self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
