"""What is known beside the message: from the traceback in a log, or from the process at the moment when it fails."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from lowtide.diagnostics.oom.message import Holder
from lowtide.diagnostics.oom.text_stream import LONGEST, Finder
from lowtide.planner.serialization import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(Record):
    """A line of a traceback."""

    file: str
    line: int
    function: str

    @property
    def short(self) -> str:
        """`train.py:42 in step`."""
        name = re.split(r"[/\\]", self.file)[-1]
        return f"{name}:{self.line} in {self.function}" if self.line else f"{name} in {self.function}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts(Record):
    """All of it may be unknown: None, or empty."""

    places: tuple[Place, ...] = ()
    """The traceback, outermost first."""
    expandable: bool | None = None
    """Whether `expandable_segments` was on."""
    windows: bool = False
    inside: str = ""
    """Path of the module whose forward was running."""
    evaluation_bytes: int = 0
    """Held by the graphs of a model in evaluation mode: nobody will call backward on them."""
    evaluation_graphs: int = 0
    """How many these are: more than one where outputs are kept."""
    leftover_graphs: int = 0
    """Graphs of earlier steps that are still alive."""
    leftover_bytes: int = 0
    new_state_bytes: int = 0
    """Optimizer state that does not exist yet."""
    holders: tuple[Holder, ...] = ()
    """Who holds memory, by part of the step and by module, largest first."""
    limit_bytes: int | None = None
    """A limit on this process's memory, and whose it is."""
    limit_name: str = ""
    limit_used_bytes: int = 0
    host_bytes: int | None = None
    """Memory of the machine."""
    host_free_bytes: int | None = None
    smallest_peak_bytes: int | None = None
    """Peak of the step under the most saving plan; from a rehearsal."""
    plain_peak_bytes: int | None = None
    static_bytes: int | None = None
    """What is in memory before the step begins, of which no plan saves anything."""
    notes: tuple[str, ...] = ()

    @property
    def in_optimizer(self) -> bool:
        """Whether an optimizer's step was running."""
        return any(_OPTIMIZER.search(place.file) for place in self.places)

    @property
    def makes_state(self) -> bool:
        """Whether the optimizer was making its state."""
        return any(place.function == "_init_group" for place in self.places)

    @property
    def own_place(self) -> Place | None:
        """The innermost line that is not of an installed package."""
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
"""The first alternative is torch's advice, which is no sign that it is on."""
MOST_PLACES = 1000
"""Lines of tracebacks that are kept, beside earlier ones that tell something by themselves."""


class FactsRead:
    """What a log that comes piece by piece tells besides its messages."""

    def __init__(self) -> None:
        self._window = ""
        self._places = Finder(_PLACE, ('File "',))
        self._cells = Finder(_CELL, (".py in ",))
        self._settings = Finder(_SETTING, ("",))
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
        over = max(0, len(self._window) - LONGEST - 1)  # one more, which tells whether a line begins
        self._window = self._window[over:]
        for finder in (self._places, self._cells, self._settings):
            finder.move_on(over)

    def facts(self) -> Facts:
        places = (*self._found, *self._in_cells)
        is_windows = any(_WINDOWS.match(place.file) for place in places)
        return Facts(places=places, expandable=self._expandable, windows=is_windows)


def _telling(places: list[Place]) -> list[Place]:
    """The last of very many places, and of those before the ones that tell something that no other does."""
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
