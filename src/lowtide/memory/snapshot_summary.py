"""Summarize a memory snapshot: the peak, the blocks alive at the peak, and the use of reserved memory at the end."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from lowtide.memory.allocator.config import AllocatorConfig
from lowtide.memory.allocator.simulation import simulate
from lowtide.memory.events import Mark
from lowtide.memory.memory_timeline import Block, Timeline
from lowtide.memory.snapshots.history import ANNOTATION, History
from lowtide.memory.snapshots.read import Snapshot

BEFORE = "(before the recording)"
"""Origin of blocks whose allocation was not recorded."""


class Share(NamedTuple):
    """Blocks of one origin that are alive at the peak."""

    name: str
    bytes: int
    n_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """State of the allocator when the snapshot was taken: `reserved = requested + rounding + idle_in_use +
    idle_segments` bytes.

    Idle memory in segments that are in use cannot be given back to the device: fragmentation. Whole idle segments are
    given back when the device runs out, or by `torch.cuda.empty_cache()`.
    """

    requested_bytes: int
    rounding_bytes: int
    idle_in_use_bytes: int
    idle_segments_bytes: int
    largest_idle_bytes: int
    n_segments: int

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved from the device."""
        return self.requested_bytes + self.rounding_bytes + self.idle_in_use_bytes + self.idle_segments_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Summary of one device in a snapshot. `peak_bytes` is the peak of requested bytes while the history was recorded.

    `categories` is empty if the blocks have no labels. `under` maps each other allocator setting that was given to the
    peak of reserved bytes that the simulated allocator reaches for the same requests, all on one stream.
    """

    device: int
    settings: str | None
    n_events: int
    peak_bytes: int
    peak_during: str | None
    reserved_at_peak_bytes: int
    peak_reserved_bytes: int
    categories: tuple[Share, ...]
    origins: tuple[Share, ...]
    at_end: State
    under: Mapping[str, int]

    def to_json(self) -> str:
        """Return the summary as JSON text."""
        return json.dumps(asdict(self))


def summarize(snapshot: Snapshot, device: int | None = None, others: Iterable[AllocatorConfig] = ()) -> Summary:
    """Summarize one device, by default the only one; simulate its requests under the settings `others`, too.

    Raises LowtideError if the snapshot has no history of the device.
    """
    history = snapshot.history(device)
    timeline = Timeline(history.stream, history.labels)
    at_peak = timeline.alive_at(timeline.peak_index)
    settings = snapshot.settings
    return Summary(
        device=history.device,
        settings=None if settings is None else str(settings),
        n_events=len(timeline.stream) - history.n_entry,
        peak_bytes=timeline.peak_bytes,
        peak_during=_during(timeline),
        reserved_at_peak_bytes=history.reserved[timeline.peak_index] if history.reserved else 0,
        peak_reserved_bytes=history.peak_reserved_bytes,
        categories=_shares((block.category, block) for block in at_peak) if timeline.labels else (),
        origins=_shares((_origin(block, history), block) for block in at_peak),
        at_end=_state(snapshot.segments(history.device)),
        under={str(config): simulate(timeline.stream, config).peak_reserved_bytes for config in others},
    )


def _during(timeline: Timeline) -> str | None:
    """Return the name of the phase at the peak, or else of the last annotation that began before the peak."""
    phase = next((p.name for p in timeline.phases if p.first <= timeline.peak_index < p.stop), None)
    if phase is not None:
        return phase
    before = timeline.stream.events[: timeline.peak_index + 1]
    names = [str(event.data) for event in before if type(event) is Mark and event.label == ANNOTATION]
    return names[-1] if names else None


def _origin(block: Block, history: History) -> str:
    where = history.places.get(block.id)
    if where:
        return f"{where}, {block.op}" if block.op and not where.endswith(f" {block.op}") else where
    is_unknown = block.allocated_at < history.n_entry and not block.op and block.label is None
    return BEFORE if is_unknown else block.name


def _shares(blocks: Iterable[tuple[str, Block]]) -> tuple[Share, ...]:
    grouped: defaultdict[str, list[int]] = defaultdict(list)
    for name, block in blocks:
        grouped[name].append(block.bytes)
    shares = (Share(name, sum(sizes), len(sizes)) for name, sizes in grouped.items())
    return tuple(sorted(shares, key=lambda share: -share.bytes))


def _state(segments: Iterable[Mapping[str, Any]]) -> State:
    requested = rounding = in_use = idle = largest = n_segments = 0
    for segment in segments:
        n_segments += 1
        used = [block for block in segment["blocks"] if str(block["state"]).startswith("active")]
        unused = [block["size"] for block in segment["blocks"] if not str(block["state"]).startswith("active")]
        wanted = sum(block.get("requested_size", block["size"]) for block in used)
        requested += wanted
        rounding += sum(block["size"] for block in used) - wanted
        largest = max(largest, *unused, 0)
        if used:
            in_use += sum(unused)
        else:
            idle += sum(unused)
    return State(
        requested_bytes=requested,
        rounding_bytes=rounding,
        idle_in_use_bytes=in_use,
        idle_segments_bytes=idle,
        largest_idle_bytes=largest,
        n_segments=n_segments,
    )
