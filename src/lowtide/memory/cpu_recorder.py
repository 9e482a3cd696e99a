"""Record CPU memory exactly, from the allocation events of torch's profiler: temporaries inside operators included.

Bytes are those requested from torch's CPU allocator. Not recorded: memory that other libraries take (NumPy, mapped
files, oneDNN's scratch), and tensors that other threads of Python allocate or free, since the profiler follows one
thread and the backward threads that it starts.

Frees are exact too. The profiler reports the free of a block that it saw allocated. For a block that existed before the
recording it reports nothing or a wrong size, because it keeps sizes by address and forgets none that is freed while no
profiler runs (torch 2.13). So its reports of such blocks are ignored, and the storages that exist when the recording
begins are watched through weak references instead. Only the end of such a storage is noticed: if one is resized,
nothing is recorded.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from operator import itemgetter
from time import perf_counter_ns
from typing import Any, Self, cast

import torch
from torch.autograd.profiler import profile

from lowtide._torch.backward import in_backward
from lowtide._torch.cpu_profiler import (
    ALLOCATION,
    COMPILED,
    RecordFunction,
    get_profiler_roots,
    is_profiler_running,
    is_warming_up,
    stop_profiler,
)
from lowtide.errors import RehearsalError
from lowtide.memory import entry_storages as entry
from lowtide.memory.events import Allocate, Busy, Event, EventStream, Free, Mark, Recorder, without_own_work
from lowtide.utils.interrupts import uninterrupted, uninterrupted_enter
from lowtide.utils.stderr_filter import without_noise

NOISE = (
    b"USDT:",
    b"gpuGetDeviceCount failed",
    b"External init callback must run in same thread as registerClient",
    b"Memory block of unknown size was allocated before the profiling started",
)
"""Lines of torch that are kept off the terminal. The profiler prints the first each time it starts or stops (torch
2.13), the second if torch is built for CUDA and there is no GPU, and the third if a process starts its first profiler
in a thread that did not import torch. The allocator prints the fourth at the first block, and then at each thousandth,
that is freed under a profiler without having been allocated under one.
"""
_MARK = "lowtide#"  # first part of the name of each annotation, before its number
_SPARE_BLOCKS = 4000
"""Number of unknown blocks that are freed so that the allocator prints its warning, which is due at every thousandth,
at once. It is above 1,000 because some blocks lie at addresses that an earlier recording saw. Takes 5 ms.
"""

_claim = threading.Lock()
_recording: CpuRecorder | None = None
_unfinished: list[profile] = []
"""Profilers that could not be stopped for lack of memory."""


class CpuRecorder(Recorder):
    """Recorder of CPU allocations in this thread, and in the backward threads it starts, while the `with` block runs.

    If a tensor in `watch` is freed during the recording, its bytes are subtracted from the level. The default is
    all existing tensors, which takes up to 100 ms to find. Garbage is collected first, unless `has_garbage` returns
    False. A mark costs 1.5 us, and the end of the recording about 10 us per allocation or free.

    Entering raises RehearsalError while any profiler runs or warms up, and inside a backward pass.
    """

    device = "cpu"

    def __init__(
        self, *, watch: Iterable[torch.Tensor] | None = None, has_garbage: Callable[[], bool] | None = None
    ) -> None:
        self._to_watch = watch
        self._has_garbage = has_garbage
        self._watched: list[weakref.ref[torch.UntypedStorage]] = []
        self.entry_addresses = {}
        self.entry_bytes = {}
        self._marks: list[Mark | Free] = []
        self._reader = _Reader()
        self._profile: profile | None = None
        self._thread: int | None = None

    @uninterrupted_enter
    def __enter__(self) -> Self:
        global _recording
        if self._thread is not None:
            raise RehearsalError("this recorder was used before. Create a new CpuRecorder().")
        _refuse_backward()
        _finish()
        with _claim:
            if (other := _describe_other_profiler()) is not None:
                raise Busy(
                    f"CPU memory cannot be recorded: {other}, and torch has room for one profiler at a time.\n"
                    "  End it first, start it later, or record outside its with-block."
                )
            _recording = self
        try:
            self._thread = threading.get_ident()
            if self._has_garbage is None or self._has_garbage():
                gc.collect()  # otherwise a collection while recording would lower the level, and the peak with it
            self._has_garbage = None  # it may refer to the program's objects
            self._watch(entry.find_existing_tensors() if self._to_watch is None else self._to_watch)
            self._to_watch = None  # this list may hold the last reference to a tensor
            self._start()
        except BaseException:
            self._release()
            raise
        return self

    @uninterrupted
    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            session = self._stop()
        finally:
            self._release()
        with _garbage_collection_disabled():  # each collection would traverse all events so far
            lost = self._reader.read(*session)
            self._stream = EventStream(without_own_work(self._reader.events), self.device)
        if error is None:  # not raised in place of the user's own exception
            _refuse_lost(lost)

    def mark(self, label: str, data: object = None) -> None:
        """Put a mark between the events so far and the next one. Raises RehearsalError outside the with-block."""
        if self._profile is None:
            raise RehearsalError(f"mark({label!r}): marks can be made only inside the recorder's with block.")
        self._annotate(Mark(label, data))

    def count_bytes_beside(self, addresses: Collection[int], n_bytes: int) -> int:
        """Return the bytes of the storages that existed when the recording began, except those at `addresses`.

        `n_bytes` is not used.
        """
        return sum(n for where, n in self.entry_bytes.items() if where not in addresses)

    @uninterrupted
    def flush(self) -> EventStream:
        """Return the events so far without ending the recording: later events follow these, with nothing lost between.

        Raises RehearsalError inside a backward pass, where torch cannot stop a profiler.
        """
        _refuse_backward()
        with _garbage_collection_disabled():  # between the two profiles nothing may be freed
            session = self._stop()
            self._start()
        with _garbage_collection_disabled():
            lost = self._reader.read(*session)
        _refuse_lost(lost)
        return EventStream(tuple(self._reader.events), self.device)

    def _start(self) -> None:
        with without_noise(2, *NOISE) as held_back:
            _silence_allocator(held_back)
            self._profile = _start_profiler()

    def _stop(self) -> tuple[list[Any], list[Mark | Free]]:
        session, self._profile = cast(profile, self._profile), None
        try:
            with without_noise(2, *NOISE):
                session.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        except MemoryError:  # the step ran out of memory and its frames still hold it all: stop the profiler later
            _unfinished.append(session)
            raise
        return get_profiler_roots(session), self._marks.copy()

    def _release(self) -> None:
        global _recording
        self._watched.clear()
        with _claim:
            _recording = None

    def _watch(self, tensors: Iterable[torch.Tensor]) -> None:
        tensors = list(tensors)
        self.entry_bytes = entry.bytes_of(tensors)
        for block, storage in enumerate(entry.collect_storages(tensors), 1):
            self.entry_addresses[-block] = storage.data_ptr()
            self._watched.append(weakref.ref(storage, partial(self._entry_died, Free(-block, storage.nbytes()))))

    def _entry_died(self, free: Free, _: object) -> None:
        if self._profile is not None:
            self._annotate(free)

    def _annotate(self, mark: Mark | Free) -> None:
        # The profiler orders by time, with a clock that may be coarse (41 ns on some ARM): wait one tick on both sides.
        number = len(self._marks)
        self._marks.append(mark)
        tick = perf_counter_ns()
        while perf_counter_ns() == tick:
            pass
        annotation = RecordFunction(f"{_MARK}{number}")
        annotation.__enter__()
        annotation.__exit__(None, None, None)
        tick = perf_counter_ns()
        while perf_counter_ns() == tick:
            pass


@contextlib.contextmanager
def _garbage_collection_disabled() -> Iterator[None]:
    """Disable Python's garbage collection during the block."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _start_profiler() -> profile:
    """Start and return a session of torch's profiler that records CPU memory."""
    session = profile(profile_memory=True, use_cpu=True)
    try:
        session.__enter__()  # type: ignore[no-untyped-call]
    except BaseException:  # such as the error for a profiler that runs already
        _unfinished.append(session)
        _finish()
        raise
    return session


def _silence_allocator(held_back: Callable[[], int]) -> None:
    """Make the allocator print its warning about unknown blocks now, so that it is silent for the next thousand.

    The allocator warns of a block that was allocated before the profiler started and is freed while it runs. A separate
    profiler session triggers this warning with spare storages. The remaining spare storages are freed before the
    recording begins, so that no peak includes them.
    """
    # Storages, not tensors: inspections during the recording look at all tensors that exist.
    spare = [torch.UntypedStorage(1) for _ in range(_SPARE_BLOCKS)]  # type: ignore[no-untyped-call]
    session = _start_profiler()
    try:
        quiet = held_back()
        while spare and held_back() == quiet:
            del spare[-20:]
    finally:
        session.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _finish() -> None:
    """Stop the profilers that could not be stopped when their recording ended."""
    while _unfinished:
        session = _unfinished.pop()
        if is_profiler_running():
            with without_noise(2, *NOISE):
                session.__exit__(None, None, None)  # type: ignore[no-untyped-call]


@atexit.register
def _stop_at_exit() -> None:
    """Stop a profiler that a program leaves running, as an unfinished `measure()` does: torch would crash at exit."""
    if is_profiler_running():
        with without_noise(2, *NOISE), contextlib.suppress(RuntimeError):
            stop_profiler()


def running() -> CpuRecorder | None:
    """Return the recorder that records in this thread now, if any."""
    recorder = _recording
    return recorder if recorder is not None and recorder._thread == threading.get_ident() else None


def _describe_other_profiler() -> str | None:
    """Describe the active profiler, which prevents a recording as torch can run only one; None if there is none."""
    if _recording is not None:
        return "Lowtide itself records already"
    if is_profiler_running():
        return "another profiler is running"
    return "another profiler is warming up" if any(map(is_warming_up, entry.find_living_profilers())) else None


def _refuse_backward() -> None:
    if in_backward():
        raise RehearsalError(
            "CPU memory cannot be recorded from inside a backward pass: torch cannot start or stop a profiler there.\n"
            "  Begin and end the recording around the backward."
        )


def _refuse_lost(lost: list[Mark]) -> None:
    if lost:
        raise RehearsalError(
            "a part of this ran in another thread, which torch's profiler does not follow: memory on a CPU is recorded "
            "in the thread that calls Lowtide, and in the backward passes that it starts.\n"
            f"  Call forward and backward in that thread. ({len(lost)} marks are lost, the first {lost[0].label!r}.)"
        )


class _Reader:
    """Reader that turns the profiler's event trees, one per session of a recording, into events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._alive: dict[int, Allocate] = {}  # by address
        self._n_blocks = 0
        self._n_marks = 0

    def read(self, roots: list[Any], marks: list[Mark | Free]) -> list[Mark]:
        """Append the events of one profiler session, and the frees of blocks that existed when the recording began.

        `marks` are all marks of the recording so far. Returns those that the session has not recorded.
        """
        rows = _rows(roots)
        rows.sort(key=itemgetter(0))  # a stable sort: the rows of one thread are in order already
        unseen = dict(enumerate(marks[self._n_marks :], self._n_marks))
        self._n_marks = len(marks)
        for _, n_bytes, address, op in rows:
            if n_bytes > 0:
                if address in self._alive:  # freed in a thread that the profiler does not follow
                    self._free(address)
                block = self._alive[address] = Allocate(self._n_blocks, n_bytes, address, op)
                self._n_blocks += 1
                self.events.append(block)
            elif n_bytes == 0:
                self.events.append(unseen.pop(address))
            elif address in self._alive:
                self._free(address)
        # a block from entry that such a thread has freed
        self.events += [free for free in unseen.values() if type(free) is Free]
        return [mark for mark in unseen.values() if type(mark) is Mark]

    def _free(self, address: int) -> None:
        block = self._alive.pop(address)
        self.events.append(Free(block.block, block.bytes))


def _rows(roots: list[Any]) -> list[tuple[int, int, int, str]]:
    """Return (time, bytes, address, operator) of each allocation and free; (time, 0, number, "") of each annotation."""
    rows: list[tuple[int, int, int, str]] = []
    pending = roots[::-1]
    ops = [""] * len(pending)
    while pending:
        node, op = pending.pop(), ops.pop()
        name = node.name
        if name == ALLOCATION:
            fields = node.extra_fields
            if fields.device.type == "cpu":
                rows.append((node.start_time_ns, fields.alloc_size, fields.ptr, op))
            continue
        if name.startswith(_MARK):
            rows.append((node.start_time_ns, 0, int(name[len(_MARK) :]), ""))
            name = op
        elif name.startswith(COMPILED):
            name = "compiled graph"
        if children := node.children:
            children.reverse()
            pending += children
            ops += [name] * len(children)
    return rows
