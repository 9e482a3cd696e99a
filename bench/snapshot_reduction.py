"""Reduction of a memory snapshot to an allocator trace: sizes, order and streams, which are safe to publish.

The simulated allocator is compared with such traces. Left out are stack frames, names of files, addresses (their order
stays) and times.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from allocator_traces import FORMAT

from lowtide.memory.allocator.block_sizes import SMALL_SEGMENT, SMALL_SIZE, round_size
from lowtide.memory.allocator.config import AllocatorConfig
from lowtide.memory.memory_timeline import Timeline
from lowtide.memory.snapshots.history import GROWTH, Entry, Held, find_held_at_start
from lowtide.memory.snapshots.read import Snapshot


class _Base(NamedTuple):
    """A segment: its first address, its bytes, its stream and its pool."""

    address: int
    bytes: int
    stream: int
    is_small: bool


def reduce_snapshot(snapshot: Snapshot, device: int | None = None, *, name: str, **about: Any) -> dict[str, Any]:
    """Reduce the snapshot of a device to a trace: a record for JSON, which `Trace.from_record` reads.

    `about` is added to the record. Blocks that existed at the start and are gone at the end have no size in a snapshot.
    It is deduced: the requested size, rounded, and in the large pool the gap to the next block if that is too small to
    be a block of its own. `expected` has the numbers that the snapshot contains: requested and reserved bytes
    throughout, and the end. Add the peak of allocated bytes from `torch.cuda.memory_stats`. The beginnings of
    expandable segments are not recorded either: with them `initial` has no segments, and a replay is exact only if the
    recording began with empty memory. Raises LowtideError as `Snapshot.history` does.
    """
    history = snapshot.history(device)
    segments = snapshot.segments(history.device)
    traces = snapshot.record.get("device_traces", [])
    actions = traces[history.device] if history.device < len(traces) else []
    settings = snapshot.settings or AllocatorConfig()
    bases = [] if settings.expandable_segments else _find_segments_at_start(segments, actions)
    reserved_at_start = sum(segment["total_size"] for segment in segments)
    reserved_at_start -= sum(GROWTH.get(action["action"], 0) * action["size"] for action in actions)
    held_at = find_held_at_start(segments, actions)
    held = _held(bases, held_at, segments, settings)
    steps = _Steps(actions, bases, reserved_at_start, {address: n for n, address in enumerate(sorted(held_at))})
    steps.run()
    curve = Timeline(history.stream, history.labels).curve
    at_start = curve[history.n_entry - 1] if history.n_entry else 0
    return {
        "format": FORMAT,
        "name": name,
        "allocator_settings": {"text": str(settings), "known": snapshot.settings is not None},
        "streams": max(len(steps.streams), 1),
        "initial": {
            "segments": [
                [i, base.bytes, steps.stream(base.stream), int(base.is_small), steps.ranks[i]]
                for i, base in enumerate(bases)
            ],
            "blocks": [[number, *row] for number, row in enumerate(held)],
        },
        "segment_addr_rank": steps.ranks,
        "events": steps.events,
        "expected": {
            "initial_reserved": reserved_at_start,
            "peak_reserved": history.peak_reserved_bytes,
            "final_reserved": sum(segment["total_size"] for segment in segments),
            "reserved_after_segment_event": steps.reserved,
            "initial_requested": at_start,
            "peak_requested": max(at_start, *curve[history.n_entry :]) if len(curve) > history.n_entry else at_start,
            "final_requested": curve[-1] if curve else 0,
            "final_allocated": sum(_sum_active_bytes(segment) for segment in segments),
        },
        **about,
    }


@dataclass(slots=True)
class _Steps:
    """A pass over the actions of a history that numbers blocks and segments, and collects the trace's events."""

    actions: Sequence[Entry]
    bases: Sequence[_Base]
    level: int  # bytes reserved
    blocks: dict[int, int]  # number of each block in use, by address
    events: list[list[Any]] = field(default_factory=list)
    reserved: list[list[int]] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    streams: dict[int, int] = field(default_factory=lambda: {0: 0})

    def stream(self, handle: int) -> int:
        """Return the number of a stream. Streams are numbered in the order of their use; 0 is the default stream."""
        return self.streams.setdefault(handle, len(self.streams))

    def run(self) -> None:
        addresses = [base.address for base in self.bases]
        addresses += [a["addr"] for a in self.actions if GROWTH.get(a["action"]) == 1]
        order = {address: rank for rank, address in enumerate(sorted(set(addresses)))}
        self.ranks = [order[address] for address in addresses]
        segments = {base.address: number for number, base in enumerate(self.bases)}
        n_segments, n_blocks = len(self.bases), len(self.blocks)
        for action in self.actions:
            kind = action["action"]
            growth = GROWTH.get(kind, 0)
            if growth == 1:
                kind, segments[action["addr"]], n_segments = "segment_alloc", n_segments, n_segments + 1
            if growth:
                self.level += growth * action["size"]
                self.reserved.append([len(self.events), self.level])
                number = segments.get(action["addr"], -1)  # -1: pages from the middle of an expandable segment
                kind = kind if growth == 1 else "segment_free"
            elif kind == "alloc":
                number = self.blocks[action["addr"]] = n_blocks
                n_blocks += 1
            elif kind == "free_completed":
                kind, number = "free", self.blocks.pop(action["addr"])
            else:
                continue
            self.events.append([kind, number, action["size"], self.stream(action["stream"])])


def _find_segments_at_start(segments: Sequence[Entry], actions: Sequence[Entry]) -> list[_Base]:
    found = {
        s["address"]: _Base(s["address"], s["total_size"], s["stream"], s["segment_type"] == "small") for s in segments
    }
    for action in reversed(actions):
        if action["action"] == "segment_alloc":
            del found[action["addr"]]
        elif action["action"] == "segment_free":
            size = action["size"]
            found[action["addr"]] = _Base(action["addr"], size, action["stream"], size == SMALL_SEGMENT)
    return [found[address] for address in sorted(found)]


def _held(
    bases: Sequence[_Base], held: Mapping[int, Held], segments: Sequence[Entry], settings: AllocatorConfig
) -> list[tuple[int, int, int, int, int]]:
    """Return a row for each block in use at the start, by address.

    A row has the segment's number, offset, size, requested bytes, and 1 if the size is deduced. Without segments,
    number and offset are -1 and 0.
    """
    if not bases:
        return [
            (-1, 0, round_size(block.bytes, settings), block.bytes, int(not block.source))
            for _, block in sorted(held.items())
        ]
    size_at = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            size_at[address] = block["size"]
            address += block["size"]
    starts = [base.address for base in bases]
    addresses = sorted(held)
    rows = []
    for position, address in enumerate(addresses):
        number = bisect_right(starts, address) - 1
        base = bases[number]
        end = base.address + base.bytes
        following = addresses[position + 1] if position + 1 < len(addresses) else end
        is_known = bool(held[address].source)  # then the block still exists at the end
        size = size_at[address] if is_known else round_size(held[address].bytes, settings)
        gap = min(following, end) - address - size
        slack = SMALL_SIZE if size < settings.max_split_size else settings.max_non_split_rounding
        if not is_known and not base.is_small and gap <= slack:
            size += gap
        rows.append((number, address - base.address, size, held[address].bytes, int(not is_known)))
    return rows


def _sum_active_bytes(segment: Entry) -> int:
    return sum(block["size"] for block in segment["blocks"] if str(block["state"]).startswith("active"))
