"""Print a timeline as a few lines of text. Pure Python, like the timeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from lowtide.units import format_bytes, format_count
from lowtide.utils.tables import aligned

if TYPE_CHECKING:
    from lowtide.memory.memory_timeline import Timeline

TOP_BLOCKS = 5


def table(
    timeline: Timeline, *, peak_bytes: int | None = None, entry: Mapping[str, int] | None = None
) -> Iterator[str]:
    """Yield lines of text: the peak and its phase, the memory alive there, the peak of each phase, the largest blocks.

    `entry` is the memory that existed before the recording, in bytes by category; if it is None, levels are those above
    this memory. `peak_bytes` is the peak above this memory; by default the timeline's.
    """
    before = {} if entry is None else entry
    peak = timeline.peak_bytes if peak_bytes is None else peak_bytes
    phase = next((p.name for p in timeline.phases if p.first <= timeline.peak_index < p.stop), None)
    yield (
        f"peak {format_bytes(peak + sum(before.values()))}"
        + (" over entry" if entry is None else "")
        + (f", in phase {phase}" if phase else "")
    )
    groups = timeline.alive_at_peak()
    alive = [(name, n, "there before") for name, n in before.items()]
    for category, blocks in groups.items():
        alive.append((category, sum(block.bytes for block in blocks), format_count(len(blocks), "block")))
    alive.append(("freed since entry", -timeline.freed_from_entry(timeline.peak_index), ""))
    yield from columns("alive at the peak", alive)
    spans: dict[str, list[int]] = {}
    for span in timeline.phases:  # with micro-batches, several of one phase
        spans.setdefault(span.name, []).append(sum(before.values()) + span.peak_bytes)
    peaks = [(name, max(each), f"most of {len(each)}" if len(each) > 1 else "") for name, each in spans.items()]
    yield from columns("most in each phase", peaks)
    large = [block for blocks in groups.values() for block in blocks if block.bytes * 100 >= peak]
    largest = sorted(large, key=lambda block: -block.bytes)[:TOP_BLOCKS]
    yield from columns("largest blocks there", [(block.category, block.bytes, block.name) for block in largest])


def columns(title: str, rows: Iterable[tuple[str, int, str]]) -> Iterator[str]:
    """Yield names, bytes and remarks in columns, without rows of zero bytes; nothing if no row is left."""
    shown = [(name, format_bytes(n_bytes), rest) for name, n_bytes, rest in rows if n_bytes]
    if shown:
        yield f"{title}:"
        yield from (f"  {line}" for line in aligned(shown, left={0, 2}))
