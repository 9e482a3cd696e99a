"""The thread in which steps are detected."""

from __future__ import annotations

import os
import threading
import weakref

from lowtide._torch.compiled_code import never_compiled


class TrainingThread:
    """The thread that trains: the one that creates this object, or one that starts later, whichever trains first."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._others = weakref.WeakSet(t for t in threading.enumerate() if t is not threading.current_thread())
        """Threads that had started before, in which steps are not detected."""

    def begin(self) -> None:
        """Record the current thread as the one that trains."""
        self._thread = threading.current_thread()

    @never_compiled
    def is_here(self) -> bool:
        """Return True if the current thread is the one that trains, or may become that one."""
        current = threading.current_thread()
        if os.getpid() != self._process:
            return False
        return current is self._thread if self._thread is not None else current not in self._others
