"""Record CUDA memory from the history that torch's caching allocator keeps.

Bytes are those requested (`requested_bytes` of `torch.cuda.memory_stats`); the allocator rounds each request up, and
`measure.py` reports the rounded peak beside this one. A block counts until its free is *completed*: until the streams
that use it are done with it and its memory can be allocated again. The allocator knows the blocks that existed before,
so their frees are exact. Operators are not in the history: `op` is the innermost Python function, empty for allocations
of the backward threads.

The workspace of matrix products (cuBLAS, 8 MiB, or 32 MiB from compute capability 9 on, for each thread that computes)
is allocated at the first product of a process and kept. A recording begins without such a workspace, so each recording
that has products contains its allocation.

A mark is exact within its thread: it is a text attached to all that the thread allocates and frees from then on. The
allocator keeps one such text per thread, and backward runs in its own threads. Between threads marks are placed by
time, to the microsecond; switching to another thread takes several.

The fields of the history were read in the sources of torch 2.13, and `parse_trace` is tested on a trace written by hand
in the same form.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import torch

from lowtide._torch.cuda_history import (
    drop_workspaces,
    history_is_on,
    requested_bytes,
    set_metadata,
    snapshot,
    start_history,
    stop_history,
)
from lowtide.errors import RehearsalError
from lowtide.memory.events import Allocate, Busy, Event, EventStream, Free, Mark, Recorder, without_own_work

T = TypeVar("T")

UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""Environment variable that turns the caching allocator off if it is set to any value (CUDACachingAllocator.cpp)."""


class PlacedMark(NamedTuple):
    """A mark, its thread and its time in microseconds since the epoch, as in the allocator's own times."""

    mark: Mark
    thread: int
    time_us: float


class CudaRecorder(Recorder):
    """Recorder of the allocations of one CUDA device, by any thread and stream, while the `with` block runs.

    Entering raises RehearsalError if there is no such device, or while other code records the allocator's history:
    torch keeps one history, and a recording ends it.
    """

    def __init__(self, device: torch.device | str | int = "cuda") -> None:
        self._asked = device
        self._index = 0
        self._key = ""
        self.entry_addresses = {}
        self.entry_bytes = {}
        self._n_entry_bytes = 0
        self._marks: list[PlacedMark] = []
        self._is_recording = False

    def __enter__(self) -> Self:
        if self._key:
            raise RehearsalError("this recorder was used before. Create a new CudaRecorder().")
        self._index = find_cuda_index(self._asked)
        self.device = f"cuda:{self._index}"
        torch.cuda.init()  # type: ignore[no-untyped-call]  # CUDA may be unused so far
        if UNCACHED in os.environ:
            raise RehearsalError(
                f"CUDA memory cannot be recorded: {UNCACHED} is set, with which torch's allocator keeps no record of "
                "its allocations. Unset it."
            )
        if _ask_allocator(history_is_on):
            raise Busy(
                "CUDA memory cannot be recorded: the allocator's history is being recorded already.\n"
                "  End that first: torch.cuda.memory._record_memory_history(None)."
            )
        self._key = f"lowtide {time.time_ns()}"  # tells this recording's texts from those of others
        gc.collect()  # as on the CPU: a collection while recording would lower the level, and the peak with it
        _complete_frees(self.device)
        self._n_entry_bytes = torch.cuda.memory_stats(self._index)["requested_bytes.all.current"]
        self.entry_bytes = requested_bytes(self._index)
        _ask_allocator(start_history)
        self._is_recording = True
        self._attach(0)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_recording = False
        try:
            trace = snapshot()["device_traces"][self._index]
        finally:
            stop_history()  # after the snapshot, because this drops the history
            set_metadata("")
        events = parse_trace(trace, self._marks, self._key, self.entry_addresses)
        self._stream = EventStream(without_own_work(events), self.device)

    def mark(self, label: str, data: object = None) -> None:
        """Put a mark between the events so far and the next one. Raises RehearsalError outside the with-block."""
        if not self._is_recording:
            raise RehearsalError(f"mark({label!r}): marks can be made only inside the recorder's with block.")
        self._marks.append(PlacedMark(Mark(label, data), threading.get_ident(), time.time_ns() / 1000))
        self._attach(len(self._marks))

    def count_bytes_beside(self, addresses: Collection[int], n_bytes: int) -> int:
        """Return the allocated bytes when the recording began, less `n_bytes`, at least 0. `addresses` is not used."""
        return max(0, self._n_entry_bytes - n_bytes)

    def _attach(self, n_marks: int) -> None:
        set_metadata(f"{self._key} {threading.get_ident()} {n_marks}")


def _ask_allocator(call: Callable[[], T]) -> T:
    """Return the result of `call`. Raises RehearsalError if torch's allocator in use does not keep a history."""
    try:
        return call()
    except RuntimeError as error:
        raise RehearsalError(
            f"CUDA memory cannot be recorded: {str(error).partition(chr(10))[0]}\n"
            "  torch's own allocator keeps a history (backend:native in PYTORCH_ALLOC_CONF); others may not."
        ) from error


def _complete_frees(device: str) -> None:
    """Drop cuBLAS workspaces and complete pending frees, so that neither frees memory during the recording."""
    drop_workspaces()
    torch.cuda.synchronize(device)
    torch.empty(1, device=device)  # an allocation completes the frees that waited for another stream


def find_cuda_index(device: torch.device | str | int) -> int:
    """Return the index of a CUDA device. Raises RehearsalError for other devices and if CUDA is missing."""
    cuda_device = torch.device(device)
    n_devices = torch.cuda.device_count()
    if cuda_device.type != "cuda" or (cuda_device.index or 0) >= n_devices:
        raise RehearsalError(
            f"the memory of {cuda_device} cannot be recorded: torch finds {n_devices} CUDA devices here."
        )
    return torch.cuda.current_device() if str(cuda_device) == "cuda" else cuda_device.index


def parse_trace(
    trace: Iterable[Mapping[str, Any]],
    marks: Sequence[PlacedMark],
    key: str,
    entry_addresses: dict[int, int] | None = None,
) -> tuple[Event, ...]:
    """Return the events in one list of a snapshot's "device_traces", with `marks` put in their places.

    `key` begins the texts that the recording attached; the rest is "<thread> <marks made so far>". Actions on segments,
    snapshots and failed allocations move no block and are ignored. `entry_addresses` gets the address of each freed
    block that existed when the recording began, by the block's number.
    """
    events: list[Event] = []
    alive: dict[int, Allocate] = {}
    n_blocks = n_entry = n_placed = 0
    for action in trace:
        kind = action["action"]
        if kind not in ("alloc", "free_completed"):
            continue
        reached = _count_marks_before(action, marks, n_placed, key)
        events += [placed.mark for placed in marks[n_placed:reached]]
        n_placed = reached
        address, n_bytes = action["addr"], action["size"]
        if kind == "alloc":
            alive[address] = block = Allocate(n_blocks, n_bytes, address, _function(action))
            n_blocks += 1
            events.append(block)
        elif address in alive:
            block = alive.pop(address)
            events.append(Free(block.block, block.bytes))
        else:
            n_entry += 1
            events.append(Free(-n_entry, n_bytes))
            if entry_addresses is not None:
                entry_addresses[-n_entry] = address
    return (*events, *(placed.mark for placed in marks[n_placed:]))


def _count_marks_before(action: Mapping[str, Any], marks: Sequence[PlacedMark], n_placed: int, key: str) -> int:
    """Count the marks that were made before `action`, given that the first `n_placed` were."""
    text = action.get("user_metadata") or ""
    thread, n_made = -1, n_placed
    if text.startswith(key):
        thread, n_made = map(int, text.removeprefix(key).split())
    reached = max(n_placed, n_made)
    # The marks of this thread are all counted by now; another thread may have made more.
    while reached < len(marks) and marks[reached].thread != thread and marks[reached].time_us <= action["time_us"]:
        reached += 1
    return reached


def _function(action: Mapping[str, Any]) -> str:
    frames = action.get("frames") or [{}]
    return str(frames[0].get("name", ""))
