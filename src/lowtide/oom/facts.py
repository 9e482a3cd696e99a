"""What is known beside the message: from the traceback in a log, or from the process at the moment when it fails."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lowtide.oom.message import Holder
from lowtide.planner.frozen import Record


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
_PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_CELL = re.compile(r"^(\S+\.py) in (\w+)\(", re.MULTILINE)
_SETTING = re.compile(r"expandable_segments[\"']?\s*[:=]\s*[\"']?(True|False)", re.IGNORECASE)
_TIP = re.compile(r"try setting\s+\S*expandable_segments:True", re.IGNORECASE)


def facts_in(text: str) -> Facts:
    """What a log tells besides its messages. torch's advice to set `expandable_segments` is no sign that it is on."""
    places = [Place(file=m[1], line=int(m[2]), function=m[3]) for m in _PLACE.finditer(text)]
    places += [Place(file=m[1], line=0, function=m[2]) for m in _CELL.finditer(text)]
    settings = [match[1].lower() == "true" for match in _SETTING.finditer(_TIP.sub("", text))]
    return Facts(
        places=tuple(places),
        expandable=settings[-1] if settings else None,
        windows=any(re.match(r"[A-Za-z]:\\", place.file) for place in places),
    )
