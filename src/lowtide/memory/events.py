"""One event stream for every device. Pure Python: records can be read without torch.

A stream holds the events of one recording in order: `Allocate`, `Free` and `Mark`. Levels are **bytes over entry**:
above the level when the recording began (at entry). A `Free` of a block that the stream did not allocate is of a block
that existed at entry: it lowers the level by its bytes, below zero if need be. `cpu_recorder.py` and `cuda_recorder.py`
say how they detect such frees.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias, TypeVar, get_args

import msgspec
from msgspec import convert

from lowtide.errors import LowtideError, RehearsalError
from lowtide.memory.untrusted_files import check_numbers, in_one_line, unpacked

T = TypeVar("T")

FORMAT = 1

PHASE = "phase"
"""Label of the marks that begin a phase; their data is its name."""

OWN_WORK = "own work"
"""Label of the marks around the recording program's own work; their data is True at its beginning."""

Category: TypeAlias = Literal[
    "parameters",
    "gradients",
    "optimizer state",
    "buffers",
    "inputs",
    "gathered parameters",
    "communication buffers",
    "activations",
    "loss head",
    "temporaries",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)


class Allocate(NamedTuple):
    """Allocation of block number `block`, a number never used twice, at `address` by the innermost operator `op`."""

    block: int
    bytes: int
    address: int
    op: str


class Free(NamedTuple):
    """Free of a block. If the stream did not allocate the block, it existed when the recording began."""

    block: int
    bytes: int


class Mark(NamedTuple):
    """Mark between two events, with a label and any data."""

    label: str
    data: object


Event: TypeAlias = Allocate | Free | Mark


class Label(NamedTuple):
    """Identity of a block: its category, the module or tensor that it belongs to, and the operator that allocated it.

    `module` is a module path, or the full name of a parameter or buffer.
    """

    category: Category
    module: str = ""
    op: str = ""


def without_own_work(events: Sequence[Event]) -> tuple[Event, ...]:
    """Return the events without OWN_WORK marks, and without temporary blocks of the work between two such marks.

    The work is the recording program's own; its temporary blocks are both allocated and freed between the marks.
    """
    if not any(isinstance(event, Mark) and event.label == OWN_WORK for event in events):
        return tuple(events)
    is_own = False
    allocated: set[int] = set()
    excluded: set[int] = set()
    for event in events:
        if isinstance(event, Mark) and event.label == OWN_WORK:
            is_own, allocated = bool(event.data), set()
        elif is_own and isinstance(event, Allocate):
            allocated.add(event.block)
        elif is_own and isinstance(event, Free) and event.block in allocated:
            excluded.add(event.block)
    return tuple(
        event
        for event in events
        if (event.label != OWN_WORK if isinstance(event, Mark) else event.block not in excluded)
    )


@dataclass(frozen=True, slots=True)
class EventStream:
    """Events of one recording, in order."""

    events: tuple[Event, ...]
    device: str = "cpu"
    streams: Mapping[int, int] = field(default_factory=dict)
    """CUDA stream of each block that is not on the default one, by block: the number only distinguishes streams."""

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def between(self, first: int, stop: int) -> EventStream:
        """Return the events `first <= index < stop` as a recording; the blocks alive at `first` existed when
        it began.
        """
        return EventStream(self.events[first:stop], self.device, self.streams)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return JSON text; also write it to `path` if given. Mark data that JSON cannot hold becomes its `repr`."""
        rows = [(_LETTERS[type(event)], *event) for event in self.events]
        streams = {"streams": sorted(self.streams.items())} if self.streams else {}
        return write_json({"format": FORMAT, "device": self.device, "events": rows, **streams}, path)

    @classmethod
    def from_json(cls, source: str | Path) -> EventStream:
        """Return the stream in `source`: JSON text or the path of a file. Raises LowtideError for anything else."""
        return parse_stream(read_json(source, "event stream"))


class Busy(RehearsalError):
    """Error for a recording that can't begin while another one is running."""


class Recorder(ABC):
    """Base class of recorders of one device's events: `CpuRecorder`, `CudaRecorder` and `StorageLedger`.

    A recorder records while its `with` block runs; `stream` is available after the block.
    """

    device: str
    entry_addresses: dict[int, int]
    """Addresses of blocks that existed when the recording began, at least of those that were freed, by block number."""
    entry_bytes: dict[int, int]
    """Requested bytes of each block that existed when the recording began, by its address."""
    _stream: EventStream | None = None

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None: ...

    @abstractmethod
    def mark(self, label: str, data: object = None) -> None:
        """Put a mark between the allocations made so far and the next one."""

    def count_bytes_beside(self, addresses: Collection[int], n_bytes: int) -> int:
        """Return the bytes that were in memory when the recording began, without the blocks at `addresses`.

        `n_bytes` is the size of these blocks in all. A recorder that does not know the bytes in memory returns 0.
        """
        return 0

    def phase(self, name: str) -> None:
        """Begin a phase of the step, such as "forward". `Timeline.phases` gives the peak of each phase."""
        self.mark(PHASE, name)

    @property
    def stream(self) -> EventStream:
        """Return the recorded events. Raises RehearsalError before the block has ended."""
        if self._stream is None:
            raise RehearsalError("the stream of a recorder is complete only when its with block has ended.")
        return self._stream


_LETTERS: dict[type, str] = {Allocate: "a", Free: "f", Mark: "m"}
_KINDS: dict[str, type[Event]] = {"a": Allocate, "f": Free, "m": Mark}


def compute_peaks_between(stream: EventStream, begins: type, ends: type[T]) -> Iterator[tuple[T, int]]:
    """Yield (data, peak bytes) for each mark whose data is of type `ends`.

    The peak is the most bytes held since the last mark with data of type `begins`, above the level at that mark.
    """
    level = start = peak = 0
    for event in stream.events:
        level += count_added_bytes(event)
        peak = max(peak, level)
        if type(event) is Mark and isinstance(event.data, begins):
            start = peak = level
        elif type(event) is Mark and isinstance(event.data, ends):
            yield event.data, peak - start


def count_added_bytes(event: Event) -> int:
    if type(event) is Allocate:
        return event.bytes
    return -event.bytes if type(event) is Free else 0


def write_json(record: Mapping[str, object], path: str | Path | None) -> str:
    text = json.dumps(record, default=repr)
    if path is not None:
        Path(path).write_text(text + "\n", encoding="utf-8")
    return text


def read_json(source: str | Path, kind: str) -> dict[str, Any]:
    is_text = isinstance(source, str) and source.lstrip().startswith("{")
    try:
        record = msgspec.json.decode(str(source).encode() if is_text else unpacked(Path(source)))
        check_numbers(record)
    except (OSError, ValueError, RecursionError) as error:
        why = in_one_line(str(error))
        raise LowtideError(f"no {kind} could be read: {why}. Give JSON text or the path of a file.") from error
    if not isinstance(record, dict):
        raise LowtideError(f"this is not a {kind}: a JSON object was expected, found {type(record).__name__}.")
    return record


def parse_stream(record: Mapping[str, Any]) -> EventStream:
    try:
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']} found")
        events = tuple(convert(row, _KINDS[letter]) for letter, *row in record["events"])
        streams = dict(convert(record.get("streams", []), list[tuple[int, int]]))
        return EventStream(events, convert(record["device"], str), streams)
    except (KeyError, TypeError, ValueError) as error:
        raise LowtideError(f"this is not an event stream of format {FORMAT}: {in_one_line(repr(error))}.") from error
