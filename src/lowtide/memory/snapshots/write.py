"""Write a timeline as a memory snapshot, which PyTorch's own viewers open.

    python -m torch.cuda._memory_viz trace_plot snapshot.pickle -o plot.html     or drop it on pytorch.org/memory_viz

The simulated allocator decides the address of each block and the segments: the file shows the memory of a CUDA GPU,
also for a stream that was recorded on CPU or rehearsed. Form and limits were read in torch 2.13:
torch/csrc/cuda/Module.cpp, torch/cuda/_memory_viz.py and torch/utils/viz/MemoryViz.js, whose pickle reader knows few
opcodes and no protocol above 4.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.memory.allocator.blocks import Block
from lowtide.memory.allocator.caching import CachingAllocator
from lowtide.memory.allocator.config import UNLIMITED, AllocatorConfig
from lowtide.memory.allocator.expandable_segments import make_allocator
from lowtide.memory.allocator.simulation import freed_from_entry
from lowtide.memory.events import PHASE, Allocate, Free, Label, Mark
from lowtide.memory.snapshots.history import WRITTEN_BY

if TYPE_CHECKING:
    from lowtide.memory.memory_timeline import Timeline

_FORMAT = 1
_PROTOCOL = 4


def write_snapshot(
    timeline: Timeline, path: str | Path, config: AllocatorConfig | None = None, *, at_entry: Iterable[int] = ()
) -> None:
    """Write `timeline` to a file as a memory snapshot, which `make_snapshot` makes from the other arguments."""
    record = make_snapshot(timeline, config, at_entry=at_entry)
    Path(path).write_bytes(pickle.dumps(record, protocol=_PROTOCOL))


def make_snapshot(
    timeline: Timeline, config: AllocatorConfig | None = None, *, at_entry: Iterable[int] = ()
) -> dict[str, Any]:
    """Return `timeline` in the form of `torch.cuda.memory._snapshot()`, for device 0 with allocator `config`.

    `at_entry` are the bytes of blocks that exist all the time; blocks that the timeline frees and did not allocate are
    added to them. Sizes and order are kept, so the snapshot has the same memory curve when it is read back. Phases
    become annotations; other marks and blocks of no bytes are left out, because the format has no place for them. Times
    are event numbers.
    """
    writer = _Writer(config or AllocatorConfig())
    for n_bytes in at_entry:
        if n_bytes:
            writer.allocate(None, n_bytes, "", None)
    for freed in freed_from_entry(timeline.stream):
        if freed.bytes:
            writer.allocate(freed.block, freed.bytes, "", None)
    writer.begin()
    for number, event in enumerate(timeline.stream.events):
        writer.time_us = number
        if type(event) is Mark and event.label == PHASE:
            writer.annotate(str(event.data))
        elif type(event) is Allocate and event.bytes:
            stream = timeline.stream.streams.get(event.block, 0)
            writer.allocate(event.block, event.bytes, event.op, timeline.labels.get(event.block), stream)
        elif type(event) is Free and event.bytes:
            writer.free(event.block)
    return writer.snapshot()


class _Writer:
    def __init__(self, config: AllocatorConfig) -> None:
        self.time_us = 0
        self._config = config
        self._allocator: CachingAllocator = make_allocator(config, on_segment=self._segment)
        self._trace: list[dict[str, Any]] = []
        self._annotations: list[dict[str, Any]] = []
        self._used: dict[Block, dict[str, Any]] = {}
        self._numbered: dict[int, Block] = {}

    def begin(self) -> None:
        """Start the history: blocks allocated before exist at its beginning, and their allocations are left out."""
        # MemoryViz.js fails (`categores`) unless "unknown" is among the categories that it finds.
        self._trace = [{**self._action("snapshot", 0, 0), "frames": [], "category": "unknown"}]

    def allocate(self, number: int | None, n_bytes: int, op: str, label: Label | None, stream: int = 0) -> None:
        block = self._allocator.malloc(n_bytes, stream)
        description = {"frames": _frames(op, label), "category": label.category if label else "unknown"}
        self._trace.append({**self._action("alloc", block.address, n_bytes, stream), **description})
        self._used[block] = description
        if number is not None:
            self._numbered[number] = block

    def free(self, number: int) -> None:
        block = self._numbered.pop(number)
        description = self._used.pop(block)
        for action in ("free_requested", "free_completed"):
            done = self._action(action, block.address, block.requested, block.free.stream)
            self._trace.append({**done, **description})
        self._allocator.free(block)

    def annotate(self, phase: str) -> None:
        self._end_annotation()
        self._annotations.append({"stage": "START", "name": phase, "device": 0, "time_us": self.time_us})

    def snapshot(self) -> dict[str, Any]:
        self.time_us += 1
        self._end_annotation()
        config = self._config
        return {
            "segments": [self._described(blocks) for blocks in self._allocator.segments(self._used)],
            "device_traces": [self._trace],
            "external_annotations": self._annotations,
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": str(config),
                "max_split_size": -1 if config.max_split_size == UNLIMITED else config.max_split_size,
                "garbage_collection_threshold": config.garbage_collection_threshold,
                "expandable_segments": config.expandable_segments,
                "roundup_power2_divisions": {str(2**i): n for i, n in enumerate(config.roundup_power2_divisions)},
            },
            WRITTEN_BY: {"format": _FORMAT},
        }

    def _end_annotation(self) -> None:
        if self._annotations:
            self._annotations.append({**self._annotations[-1], "stage": "END", "time_us": self.time_us})

    def _segment(self, action: str, address: int, n_bytes: int, stream: int) -> None:
        self._trace.append({**self._action(action, address, n_bytes, stream), "frames": []})

    def _action(self, action: str, address: int, n_bytes: int, stream: int = 0) -> dict[str, Any]:
        return {"action": action, "addr": address, "size": n_bytes, "stream": stream, "time_us": self.time_us}

    def _described(self, blocks: list[Block]) -> dict[str, Any]:
        used_bytes = sum(block.size for block in blocks if block.is_used)
        return {
            "device": 0,
            "address": blocks[0].address,
            "total_size": sum(block.size for block in blocks),
            "allocated_size": used_bytes,
            "active_size": used_bytes,
            "requested_size": sum(block.requested for block in blocks if block.is_used),
            "stream": blocks[0].free.stream,
            "segment_type": "small" if blocks[0].free.is_small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": self._config.expandable_segments,
            "frames": [],
            "blocks": [
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested if block.is_used else 0,
                    "state": "active_allocated" if block.is_used else "inactive",
                    **self._used.get(block, {"frames": []}),
                }
                for block in blocks
            ],
        }


def _frames(op: str, label: Label | None) -> list[dict[str, Any]]:
    """Return a stack for viewers to show: the operator, and above it the module. `history.py` reads it back."""
    frames = [{"name": op, "filename": "op", "line": 0}]
    if label is not None:
        frames.append({"name": label.op, "filename": label.module, "line": 0})
    return frames
