"""Facts besides the message: from the traceback in a log, or from the process at the moment of failure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from lowtide.diagnostics.oom.message import Holder
from lowtide.diagnostics.oom.text_stream import LONGEST, PatternFinder
from lowtide.planner.serialization import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(Record):
    """A line of a traceback."""

    file: str
    line: int
    function: str

    @property
    def short(self) -> str:
        """Text such as `train.py:42 in step`."""
        name = re.split(r"[/\\]", self.file)[-1]
        return f"{name}:{self.line} in {self.function}" if self.line else f"{name} in {self.function}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts(Record):
    """Facts about the failed process. Each may be unknown: None, or empty."""

    places: tuple[Place, ...] = ()
    """Lines of the traceback, outermost first."""
    expandable: bool | None = None
    """True if `expandable_segments` was on."""
    windows: bool = False
    inside: str = ""
    """Path of the module whose forward was running."""
    evaluation_bytes: int = 0
    """Bytes held by graphs of a model in evaluation mode, which no backward pass will reach."""
    evaluation_graphs: int = 0
    """Number of these graphs: more than one if outputs are kept."""
    leftover_graphs: int = 0
    """Graphs of earlier steps that are still alive."""
    leftover_bytes: int = 0
    new_state_bytes: int = 0
    """Optimizer state that does not exist yet."""
    holders: tuple[Holder, ...] = ()
    """Largest holders of memory, by part of the step and by module."""
    limit_bytes: int | None = None
    """A limit on this process's memory; `limit_name` says which."""
    limit_name: str = ""
    limit_used_bytes: int = 0
    host_bytes: int | None = None
    """Main memory of the machine."""
    host_free_bytes: int | None = None
    smallest_peak_bytes: int | None = None
    """Peak of the step under the plan that saves most; from a rehearsal."""
    plain_peak_bytes: int | None = None
    static_bytes: int | None = None
    """Memory in use before the step begins, which no plan lowers."""
    notes: tuple[str, ...] = ()

    @property
    def in_optimizer(self) -> bool:
        """True if an optimizer's step was running."""
        return any(_OPTIMIZER.search(place.file) for place in self.places)

    @property
    def makes_state(self) -> bool:
        """True if the optimizer was creating its state."""
        return any(place.function == "_init_group" for place in self.places)

    @property
    def own_place(self) -> Place | None:
        """Innermost line outside installed packages."""
        own = [place for place in self.places if not _INSTALLED.search(place.file)]
        return own[-1] if own else None


_OPTIMIZER = re.compile(r"[/\\]optim[/\\]|optimizer")
_INSTALLED = re.compile(r"(?:site|dist)-packages|[/\\]lib[/\\]python3|<frozen|<__array_function__|lowtide[/\\]oom[/\\]")
_WINDOWS = re.compile(r"[A-Za-z]:\\")
_PLACE = re.compile(r'File "([^"]{1,4000})", line (\d{1,9}), in (\S{1,500})')
_CELL = re.compile(r"^(\S{1,4000}\.py) in (\w{1,500})\(", re.MULTILINE)
_SETTING = re.compile(
    r"try setting\s{1,20}\S{0,200}expandable_segments:True"
    r"|expandable_segments[\"']?\s{0,20}[:=]\s{0,20}[\"']?(True|False)",
    re.IGNORECASE,
)
"""The first alternative is torch's advice, which does not mean that the setting is on."""
MOST_PLACES = 1000
"""Traceback lines that are kept, besides earlier ones that carry a fact by themselves."""


class FactReader:
    """Reader of the facts in a log that comes in pieces."""

    def __init__(self) -> None:
        self._window = ""
        self._places = PatternFinder(_PLACE, ('File "',))
        self._cells = PatternFinder(_CELL, (".py in ",))
        self._settings = PatternFinder(_SETTING, ("",))
        self._found: list[Place] = []
        self._in_cells: list[Place] = []
        self._expandable: bool | None = None

    def read(self, piece: str, *, is_last: bool) -> None:
        self._window += piece
        for m in self._places.found(self._window, is_last=is_last):
            self._found.append(Place(file=m[1], line=int(m[2]), function=m[3]))
            self._found = _telling(self._found)
        for m in self._cells.found(self._window, is_last=is_last):
            self._in_cells.append(Place(file=m[1], line=0, function=m[2]))
            self._in_cells = _telling(self._in_cells)
        for m in self._settings.found(self._window, is_last=is_last):
            self._expandable = m[1].lower() == "true" if m[1] else self._expandable
        over = max(0, len(self._window) - LONGEST - 1)  # one more, to know where a line begins
        self._window = self._window[over:]
        for finder in (self._places, self._cells, self._settings):
            finder.move_on(over)

    def facts(self) -> Facts:
        places = (*self._found, *self._in_cells)
        is_windows = any(_WINDOWS.match(place.file) for place in places)
        return Facts(places=places, expandable=self._expandable, windows=is_windows)


def _telling(places: list[Place]) -> list[Place]:
    """Return the last of very many places, and earlier ones that carry a fact of their own."""
    if len(places) < 2 * MOST_PLACES:
        return places
    before, last = places[:-MOST_PLACES], places[-MOST_PLACES:]
    tell: tuple[Callable[[Place], object], ...] = (
        lambda place: _OPTIMIZER.search(place.file),
        lambda place: place.function == "_init_group",
        lambda place: _WINDOWS.match(place.file),
    )
    told = [next((n for n, place in enumerate(before) if tells(place)), -1) for tells in tell]
    own = max((n for n, place in enumerate(before) if not _INSTALLED.search(place.file)), default=-1)
    return [*(before[n] for n in sorted({*told, own} - {-1})), *last]
