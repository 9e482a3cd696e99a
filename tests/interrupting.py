"""Interrupts at places of a run that are drawn at random: lines of this package, and calls of whatever it calls."""

from __future__ import annotations

import gc
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import lowtide
from lowtide.memory import entry_storages as entry

PACKAGE = lowtide.__path__[0]
SCANS = entry.__file__
"""Looks at all objects that there are: of a million lines every other would be one of these."""

Place = tuple[CodeType, int]


class Interrupting:
    """Traces what is run in it; at the time that `at` says a real SIGINT comes at that place."""

    def __init__(self, at: tuple[Place, int] | None = None) -> None:
        self.seen: Counter[Place] = Counter()
        self._at = at
        self._callbacks = [*gc.callbacks]

    def __enter__(self) -> Interrupting:
        gc.callbacks.clear()  # Python ignores an interrupt in one of them (hypothesis has one)
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        gc.callbacks[:] = self._callbacks

    def _called(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        self._pass_by(frame)
        file = frame.f_code.co_filename
        return self._line if file.startswith(PACKAGE) and file != SCANS else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        self._pass_by(frame)
        return self._line

    def _pass_by(self, frame: FrameType) -> None:
        place = frame.f_code, frame.f_lineno
        self.seen[place] += 1
        if self._at is not None and self._at == (place, self.seen[place]):
            signal.raise_signal(signal.SIGINT)


def find_places(run: Callable[[], object], seed: int, n: int) -> list[tuple[Place, int]]:
    """`n` places that a run comes by, drawn by `seed`, and at which of the times that it does so."""
    with Interrupting() as traced:
        run()
    draw = random.Random(seed)
    places = sorted(traced.seen, key=lambda place: (place[0].co_filename, place[1], place[0].co_name))
    return [(place, draw.randint(1, traced.seen[place])) for place in draw.choices(places, k=n)]
