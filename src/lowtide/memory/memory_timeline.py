"""Memory after each event of a stream: levels, blocks, phases and the peak. Pure Python, like the stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from msgspec import convert

from lowtide.errors import LowtideError
from lowtide.memory.events import (
    CATEGORIES,
    FORMAT,
    PHASE,
    Allocate,
    Category,
    EventStream,
    Free,
    Label,
    Mark,
    count_added_bytes,
    parse_stream,
    read_json,
    write_json,
)
from lowtide.memory.snapshots.read import Snapshot
from lowtide.memory.snapshots.write import write_snapshot
from lowtide.memory.timeline_table import table
from lowtide.memory.untrusted_files import in_one_line
from lowtide.utils.rendering import Displayed


class Block(NamedTuple):
    """One allocation: alive after the events `allocated_at <= index < freed_at`; `freed_at` is None if never freed."""

    id: int
    bytes: int
    address: int
    op: str
    allocated_at: int
    freed_at: int | None
    label: Label | None

    @property
    def category(self) -> Category:
        """The label's category; a block without a label is one of the temporaries."""
        return self.label.category if self.label else "temporaries"

    @property
    def name(self) -> str:
        """Origin of the block, if known: module and operator."""
        module, op = (self.label.module, self.label.op or self.op) if self.label else ("", self.op)
        return " ".join(part for part in (module, op) if part) or "(outside any operator)"


class Phase(NamedTuple):
    """The events `first <= index < stop` of a phase. `peak_bytes` is the highest level, above the level at the
    start.
    """

    name: str
    first: int
    stop: int
    peak_bytes: int
    peak_index: int


class Timeline(Displayed):
    """Memory after each event of a stream, its peak and the peak's parts; `print` it for a table.

    `labels` maps block numbers to the identity of the blocks, if known.
    """

    def __init__(self, stream: EventStream, labels: Mapping[int, Label] | None = None) -> None:
        self.stream = stream
        self.labels = dict(labels or {})
        self.curve: tuple[int, ...] = tuple(accumulate(map(count_added_bytes, stream.events)))
        """Level after each event in bytes, above the level when the recording began."""
        self.peak_bytes: int = max((0, *self.curve))
        """The highest level in bytes, above the level when the recording began; 0 if it never rose above that level."""
        self.peak_index: int = self.curve.index(self.peak_bytes) if self.peak_bytes else -1
        """The first event after which the level is the peak; -1, before all events, if it never rose above entry."""

    def __repr__(self) -> str:
        return f"Timeline(peak_bytes={self.peak_bytes}, {len(self.stream)} events)"

    def __str__(self) -> str:
        return "\n".join(table(self))

    @cached_property
    def blocks(self) -> dict[int, Block]:
        """Every block that the stream allocated, by number, in the order of allocation."""
        freed_at = {event.block: i for i, event in enumerate(self.stream) if type(event) is Free}
        return {
            event.block: Block(
                *event, allocated_at=i, freed_at=freed_at.get(event.block), label=self.labels.get(event.block)
            )
            for i, event in enumerate(self.stream)
            if type(event) is Allocate
        }

    def alive_at(self, index: int) -> tuple[Block, ...]:
        """Return the blocks that the recording allocated and that are alive after event `index`, largest first."""
        alive = (
            b for b in self.blocks.values() if b.allocated_at <= index and (b.freed_at is None or index < b.freed_at)
        )
        return tuple(sorted(alive, key=lambda block: -block.bytes))

    def alive_at_peak(self) -> dict[Category, tuple[Block, ...]]:
        """Return the blocks alive at the peak, by category, in the order of CATEGORIES, without empty categories."""
        alive = self.alive_at(self.peak_index)
        groups = {category: tuple(b for b in alive if b.category == category) for category in CATEGORIES}
        return {category: blocks for category, blocks in groups.items() if blocks}

    def freed_from_entry(self, index: int) -> int:
        """Return the bytes of blocks freed up to event `index` that existed when the recording began.

        The level is the bytes of blocks alive that the stream allocated, less these.
        """
        events = self.stream.events[: index + 1]
        return sum(event.bytes for event in events if type(event) is Free and event.block not in self.blocks)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Spans from each mark labelled PHASE to the next, with peaks; events before the first mark are left out."""
        starts = [(i, e.data) for i, e in enumerate(self.stream) if type(e) is Mark and e.label == PHASE]
        stops = [first for first, _ in starts[1:]] + [len(self.stream)]
        phases = []
        for (first, name), stop in zip(starts, stops, strict=False):
            levels = self.curve[first:stop]
            phases.append(Phase(str(name), first, stop, max(levels), first + levels.index(max(levels))))
        return tuple(phases)

    def to_snapshot(self, path: str | Path, *, at_entry: Iterable[int] = ()) -> None:
        """Write a memory snapshot, which PyTorch's viewer opens: pytorch.org/memory_viz, torch.cuda._memory_viz.

        Blocks lie at the addresses of the simulated GPU allocator. `at_entry` are the bytes of the blocks that existed
        before and stay.
        """
        write_snapshot(self, path, at_entry=at_entry)

    @classmethod
    def from_snapshot(cls, path: str | Path, device: int | None = None) -> Timeline:
        """Return the timeline in a file of `torch.cuda.memory._dump_snapshot`; levels are all bytes held on the device.

        Only plain data is read from the file, so it may be untrusted. `device` may be left out if the file has only
        one. Raises LowtideError for a file that is no snapshot, or has no history of that device.
        """
        history = Snapshot.read(path).history(device)
        return cls(history.stream, history.labels)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return JSON text of the stream and the labels, which determine all else; also write it to `path` if given."""
        return write_json({"labels": self.labels, "stream": json.loads(self.stream.to_json())}, path)

    @classmethod
    def from_json(cls, source: str | Path) -> Timeline:
        """Return the timeline in `source`: JSON text or the path of a file. Raises LowtideError for anything else."""
        record = read_json(source, "timeline")
        try:
            labels = {int(block): convert(label, Label) for block, label in record["labels"].items()}
            stream = record["stream"]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise LowtideError(f"this is not a timeline of format {FORMAT}: {in_one_line(repr(error))}.") from error
        return cls(parse_stream(stream), labels)
