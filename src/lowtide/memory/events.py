"""One event stream for every device, and the timeline computed from it. Pure Python: records can be read without torch.

A stream is what one recording saw, in the order in which it happened: `Allocate`, `Free` and `Mark`. Levels are **bytes
over entry**, the level when the recording began. A `Free` of a block that the stream did not allocate is of one that
existed at entry: it lowers the level by its bytes, below zero if need be. How the sources know of those is said in
`cpu_recorder.py` and `cuda_recorder.py`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeAlias, get_args

import msgspec
from msgspec import convert

from lowtide.errors import LowtideError, RehearsalError
from lowtide.memory.untrusted_files import check_numbers, in_one_line, unpacked

FORMAT = 1

PHASE = "phase"
"""Label of the marks that begin a phase; their data is its name."""

ASIDE = "aside"
"""Label of the marks around what the one who records does himself; their data is whether it begins."""

Category: TypeAlias = Literal[
    "parameters", "gradients", "optimizer state", "buffers", "inputs", "activations", "loss head", "temporaries"
]
CATEGORIES: tuple[Category, ...] = get_args(Category)


class Allocate(NamedTuple):
    """Block number `block` of the stream, never used twice, at `address`; `op` is the innermost operator that asked."""

    block: int
    bytes: int
    address: int
    op: str


class Free(NamedTuple):
    """The end of a block. A number that the stream did not allocate (negative at the source) is a block from entry."""

    block: int
    bytes: int


class Mark(NamedTuple):
    """A point in time between allocations, with whatever its author attached to it."""

    label: str
    data: object


Event: TypeAlias = Allocate | Free | Mark


class Label(NamedTuple):
    """What a block turned out to be. `module` is a module path, or the full name of a parameter or buffer."""

    category: Category
    module: str = ""
    op: str = ""


class Block(NamedTuple):
    """One allocation and its life: alive after the events `born <= index < dies`; `dies` is None if never freed."""

    id: int
    bytes: int
    address: int
    op: str
    born: int
    dies: int | None
    label: Label | None

    @property
    def category(self) -> Category:
        """The label's; a block that nobody labelled is one of the temporaries."""
        return self.label.category if self.label else "temporaries"

    @property
    def name(self) -> str:
        """Where it came from, as far as known: module and operator."""
        module, op = (self.label.module, self.label.op or self.op) if self.label else ("", self.op)
        return " ".join(part for part in (module, op) if part) or "(outside any operator)"


class Phase(NamedTuple):
    """The events `first <= index < stop`, and the highest level over entry that they reach, first at `peak_index`."""

    name: str
    first: int
    stop: int
    peak_bytes: int
    peak_index: int


def without_asides(events: Sequence[Event]) -> tuple[Event, ...]:
    """These without what was allocated and freed again between two marks ASIDE, and without the marks."""
    if not any(isinstance(event, Mark) and event.label == ASIDE for event in events):
        return tuple(events)
    aside = False
    born: set[int] = set()
    gone: set[int] = set()
    for event in events:
        if isinstance(event, Mark) and event.label == ASIDE:
            aside, born = bool(event.data), set()
        elif aside and isinstance(event, Allocate):
            born.add(event.block)
        elif aside and isinstance(event, Free) and event.block in born:
            gone.add(event.block)
    return tuple(
        event for event in events if (event.label != ASIDE if isinstance(event, Mark) else event.block not in gone)
    )


@dataclass(frozen=True, slots=True)
class EventStream:
    """What one recording saw, in order."""

    events: tuple[Event, ...]
    device: str = "cpu"

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def between(self, first: int, stop: int) -> EventStream:
        """The events `first <= index < stop` as a recording of their own: what was alive at `first` is its entry."""
        return EventStream(self.events[first:stop], self.device)

    def to_json(self, path: str | Path | None = None) -> str:
        """As JSON text; also written to `path` if given. Data of a mark that JSON cannot hold becomes its `repr`."""
        rows = [(_LETTERS[type(event)], *event) for event in self.events]
        return _write({"format": FORMAT, "device": self.device, "events": rows}, path)

    @classmethod
    def from_json(cls, source: str | Path) -> EventStream:
        """The stream in `source`: JSON text or the path of a file. Raises LowtideError for anything else."""
        return _stream_from(_read(source, "event stream"))


class Timeline:
    """What is in memory after each event of a stream, its peak and what the peak is made of; `print` it for a table.

    `labels` maps block numbers to what the blocks are, as far as anybody knows.
    """

    def __init__(self, stream: EventStream, labels: Mapping[int, Label] | None = None) -> None:
        self.stream = stream
        self.labels = dict(labels or {})
        self.curve: tuple[int, ...] = tuple(accumulate(map(_bytes_added, stream.events)))
        """Level over entry after each event, bytes."""
        self.peak_bytes: int = max((0, *self.curve))
        """The highest level over entry; 0 if it never rose above entry."""
        self.peak_index: int = self.curve.index(self.peak_bytes) if self.peak_bytes else -1
        """The first event after which the level is the peak; -1, before all events, if it never rose above entry."""

    def __repr__(self) -> str:
        return f"Timeline(peak_bytes={self.peak_bytes}, {len(self.stream)} events)"

    def __str__(self) -> str:
        from lowtide.memory.timeline_table import table  # made when somebody looks

        return "\n".join(table(self))

    @cached_property
    def blocks(self) -> dict[int, Block]:
        """Every block that the stream allocated, by number, in the order of allocation."""
        dies = {event.block: i for i, event in enumerate(self.stream) if type(event) is Free}
        return {
            event.block: Block(*event, born=i, dies=dies.get(event.block), label=self.labels.get(event.block))
            for i, event in enumerate(self.stream)
            if type(event) is Allocate
        }

    def alive_at(self, index: int) -> tuple[Block, ...]:
        """The blocks allocated since entry and alive after event `index`, largest first."""
        alive = (b for b in self.blocks.values() if b.born <= index and (b.dies is None or index < b.dies))
        return tuple(sorted(alive, key=lambda block: -block.bytes))

    def alive_at_peak(self) -> dict[Category, tuple[Block, ...]]:
        """The same at the peak, by category, in the order of CATEGORIES; categories without a block are left out."""
        alive = self.alive_at(self.peak_index)
        groups = {category: tuple(b for b in alive if b.category == category) for category in CATEGORIES}
        return {category: blocks for category, blocks in groups.items() if blocks}

    def freed_from_entry(self, index: int) -> int:
        """Bytes that existed at entry and are gone after event `index`: level = bytes alive - these."""
        seen = self.stream.events[: index + 1]
        return sum(event.bytes for event in seen if type(event) is Free and event.block not in self.blocks)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """From each mark labelled PHASE to the next, with the peak of each; nothing for what came before the first."""
        starts = [(i, e.data) for i, e in enumerate(self.stream) if type(e) is Mark and e.label == PHASE]
        stops = [first for first, _ in starts[1:]] + [len(self.stream)]
        phases = []
        for (first, name), stop in zip(starts, stops, strict=False):
            levels = self.curve[first:stop]
            phases.append(Phase(str(name), first, stop, max(levels), first + levels.index(max(levels))))
        return tuple(phases)

    def to_snapshot(self, path: str | Path, *, at_entry: Iterable[int] = ()) -> None:
        """Write a memory snapshot, which PyTorch's viewer opens: pytorch.org/memory_viz, torch.cuda._memory_viz.

        Blocks lie where the simulated allocator of a CUDA card puts them. `at_entry` are the bytes of what was there
        before and stays.
        """
        from lowtide.memory.snapshots.write import write_snapshot

        write_snapshot(self, path, at_entry=at_entry)

    @classmethod
    def from_snapshot(cls, path: str | Path, device: int | None = None) -> Timeline:
        """What a file of `torch.cuda.memory._dump_snapshot` recorded: levels are all that the device held, in bytes.

        Only plain data is read from the file, so it may come from anybody. `device` may be left out where there is one.
        Raises LowtideError for a file that is no snapshot, or has no history of that device.
        """
        from lowtide.memory.snapshots.read import Snapshot

        return Snapshot.read(path).history(device).timeline

    def to_json(self, path: str | Path | None = None) -> str:
        """As JSON text: the stream and the labels, of which all else follows; also written to `path` if given."""
        return _write({"labels": self.labels, "stream": json.loads(self.stream.to_json())}, path)

    @classmethod
    def from_json(cls, source: str | Path) -> Timeline:
        """The timeline in `source`: JSON text or the path of a file. Raises LowtideError for anything else."""
        record = _read(source, "timeline")
        try:
            labels = {int(block): convert(label, Label) for block, label in record["labels"].items()}
            stream = record["stream"]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise LowtideError(f"this is not a timeline of format {FORMAT}: {in_one_line(repr(error))}.") from error
        return cls(_stream_from(stream), labels)


class Busy(RehearsalError):
    """Somebody else records already what only one can record at a time."""


class Recorder(ABC):
    """Records the events of one device while a `with` block runs; `stream` is there once the block has ended."""

    device: str
    entry_addresses: dict[int, int]
    """Blocks from entry, at least those that were freed, by their number in the stream: where they were."""

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def mark(self, label: str, data: object = None) -> None:
        """Put a mark exactly here, between the allocations made so far and the next one."""

    def beside_bytes(self, addresses: Collection[int], n_bytes: int) -> int:
        """The bytes that were in memory at entry beside blocks at these `addresses`, which have `n_bytes` together.

        None where a recorder does not look at that.
        """
        return 0

    def phase(self, name: str) -> None:
        """Begin a phase of the step, such as "forward": `Timeline.phases` gives each one's peak."""
        self.mark(PHASE, name)

    @property
    @abstractmethod
    def stream(self) -> EventStream:
        """What was recorded. Raises RehearsalError before the block has ended."""


_LETTERS: dict[type, str] = {Allocate: "a", Free: "f", Mark: "m"}
_KINDS: dict[str, type[Event]] = {"a": Allocate, "f": Free, "m": Mark}


def most_between(stream: EventStream, begins: str, ends: str) -> Iterator[tuple[object, int]]:
    """From each mark `begins` to the next mark `ends`: what that says, and the most that was allocated in between."""
    level = start = peak = 0
    for event in stream.events:
        level += _bytes_added(event)
        peak = max(peak, level)
        if type(event) is Mark and event.label == begins:
            start = peak = level
        elif type(event) is Mark and event.label == ends:
            yield event.data, peak - start


def _bytes_added(event: Event) -> int:
    if type(event) is Allocate:
        return event.bytes
    return -event.bytes if type(event) is Free else 0


def _write(record: Mapping[str, object], path: str | Path | None) -> str:
    text = json.dumps(record, default=repr)
    if path is not None:
        Path(path).write_text(text + "\n", encoding="utf-8")
    return text


def _read(source: str | Path, what: str) -> dict[str, Any]:
    is_text = isinstance(source, str) and source.lstrip().startswith("{")
    try:
        record = msgspec.json.decode(str(source).encode() if is_text else unpacked(Path(source)))
        check_numbers(record)
    except (OSError, ValueError, RecursionError) as error:
        why = in_one_line(str(error))
        raise LowtideError(f"no {what} could be read: {why}. Give JSON text or the path of a file.") from error
    if not isinstance(record, dict):
        raise LowtideError(f"this is not a {what}: a JSON object was expected, found {type(record).__name__}.")
    return record


def _stream_from(record: Mapping[str, Any]) -> EventStream:
    try:
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']} found")
        events = tuple(convert(row, _KINDS[letter]) for letter, *row in record["events"])
        return EventStream(events, convert(record["device"], str))
    except (KeyError, TypeError, ValueError) as error:
        raise LowtideError(f"this is not an event stream of format {FORMAT}: {in_one_line(repr(error))}.") from error
