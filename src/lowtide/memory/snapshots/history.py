"""Rebuild the events on a device from the state at the end of a snapshot and the history before it.

The history is undone from the end to find the blocks at its start; then it is replayed forwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from lowtide.errors import LowtideError
from lowtide.memory.events import CATEGORIES, PHASE, Allocate, Category, Event, EventStream, Free, Label, Mark
from lowtide.memory.snapshots.stack_frames import Frames, operator, place

ANNOTATION = "annotation"
"""Label of the marks where a `record_function` of the recorded program began; their data is its name."""

WRITTEN_BY = "lowtide"
"""Key of the snapshots that Lowtide writes: in them labels and phases are known."""

GROWTH = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
"""Actions of a history that change the memory reserved from the device, and their signs."""

Entry = Mapping[str, Any]
"""One action of a history, or one block of a segment."""


@dataclass(frozen=True, slots=True)
class History:
    """One device's memory from the start of the recording to the snapshot.

    The first `n_entry` events of the stream are the allocations of blocks that existed when the recording began, so
    levels include all memory of the device, in bytes requested. `places` has the line of the user's program that
    requested a block, if its stack was recorded. `reserved` has the bytes held from the device after each event of the
    stream.
    """

    device: int
    stream: EventStream
    labels: dict[int, Label]
    n_entry: int
    places: dict[int, str]
    reserved: tuple[int, ...]
    peak_reserved_bytes: int


class Held(NamedTuple):
    """A block in use: the bytes requested, and the snapshot's record that says most about the block."""

    bytes: int
    source: Entry


def rebuild(
    device: int, segments: Sequence[Entry], actions: Sequence[Entry], annotations: Iterable[Entry], *, is_ours: bool
) -> History:
    """Return the history of one device. Raises LowtideError if the actions do not lead to the segments.

    `is_ours` is True for a snapshot that Lowtide wrote, in which stacks and annotations have a meaning of their own.
    """
    builder = _Builder(sum(segment["total_size"] for segment in segments), actions, is_ours)
    for address, held in sorted(find_held_at_start(segments, actions).items()):
        builder.allocate(address, held.bytes, held.source)
    n_entry = len(builder.events)
    marks = _marks(annotations, device, is_ours)
    for action in actions:
        while marks and marks[-1][0] <= action.get("time_us", 0):
            builder.add(marks.pop()[1])
        kind = action["action"]
        if kind == "alloc":
            builder.allocate(action["addr"], action["size"], action)
        elif kind == "free_completed":
            builder.free(action["addr"])
        elif kind in GROWTH:
            builder.grow(GROWTH[kind] * action["size"])
    for _, mark in reversed(marks):
        builder.add(mark)
    stream = EventStream(tuple(builder.events), f"cuda:{device}")
    return History(
        device, stream, builder.labels, n_entry, builder.places, tuple(builder.curve), builder.peak_reserved_bytes
    )


def find_held_at_start(segments: Sequence[Entry], actions: Sequence[Entry]) -> dict[int, Held]:
    """Return the blocks in use before the first action, by address, found by undoing each action from the end.

    Raises LowtideError if the actions do not lead to the snapshot.
    """
    held = _find_held_at_end(segments)
    for action in reversed(actions):
        if action["action"] == "free_completed":
            held[action["addr"]] = Held(action["size"], {})  # its stack is that of the free, and not informative here
        elif action["action"] == "alloc" and held.pop(action["addr"], None) is None:
            raise LowtideError(
                f"this history does not lead to its snapshot: a block of {action['size']} bytes at "
                f"{action['addr']:#x} was allocated, not freed, and is not there at the end. "
                "Record all actions: torch.cuda.memory._record_memory_history() without skip_actions."
            )
    return held


def _find_held_at_end(segments: Sequence[Entry]) -> dict[int, Held]:
    held = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if str(block["state"]).startswith("active"):  # in use, or freed while a stream still uses it
                held[address] = Held(block.get("requested_size", block["size"]), block)
            address += block["size"]  # older files do not give each block's own address
    return held


class _Builder:
    """Collector of events, and of the bytes held from the device after each event."""

    def __init__(self, reserved_at_end: int, actions: Sequence[Entry], is_ours: bool) -> None:
        self.events: list[Event] = []
        self.curve: list[int] = []
        self.labels: dict[int, Label] = {}
        self.places: dict[int, str] = {}
        self._alive: dict[int, Allocate] = {}
        self._n_blocks = 0
        self._origins: dict[int, tuple[str, str]] = {}
        """Operator and place of each stack, which many blocks may share."""
        self._is_ours = is_ours
        grown = sum(GROWTH[action["action"]] * action["size"] for action in actions if action["action"] in GROWTH)
        self._reserved = self.peak_reserved_bytes = reserved_at_end - grown

    def add(self, event: Event) -> None:
        self.events.append(event)
        self.curve.append(self._reserved)

    def allocate(self, address: int, n_bytes: int, source: Entry) -> None:
        number = self._n_blocks
        self._n_blocks += 1
        frames: Frames = source.get("frames") or ()
        if self._is_ours:
            block = Allocate(number, n_bytes, address, str(frames[0]["name"]) if frames else "")
            if len(frames) > 1 and source.get("category") in CATEGORIES:
                category = cast(Category, source["category"])
                self.labels[number] = Label(category, str(frames[1]["filename"]), str(frames[1]["name"]))
        else:
            op, where = self._says(frames)
            block = Allocate(number, n_bytes, address, op)
            if where:
                self.places[number] = where
        self._alive[address] = block
        self.add(block)

    def _says(self, frames: Frames) -> tuple[str, str]:
        if id(frames) not in self._origins:
            self._origins[id(frames)] = operator(frames), place(frames)
        return self._origins[id(frames)]

    def free(self, address: int) -> None:
        block = self._alive.pop(address)
        self.add(Free(block.block, block.bytes))

    def grow(self, n_bytes: int) -> None:
        self._reserved += n_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self._reserved)


def _marks(annotations: Iterable[Entry], device: int, is_ours: bool) -> list[tuple[int, Mark]]:
    """Return (time, mark) of each annotation that began on the device, the last first; the time is in microseconds."""
    label = PHASE if is_ours else ANNOTATION
    begun = [
        (entry["time_us"], Mark(label, entry["name"]))
        for entry in annotations
        if entry["device"] == device and entry["stage"] == "START"
    ]
    return sorted(begun, key=lambda timed: -timed[0])
