"""Compute the saving of each `del`: the peak without the memory that a function's variables hold around backward.

An inspection (a look) lists the memory that only variables hold, and weak references report when that memory is freed.
Had it been freed at the look, the level in between would have been lower by exactly its bytes; so the peak without it
follows from the timeline. Readers have to judge if their code needs the variable after the look.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from types import FrameType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, UntypedStorage
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide._torch.backward import ENGINE, in_backward
from lowtide._torch.patching import replace_function, this_thread_only
from lowtide._torch.tensors import get_storage_number
from lowtide.errors import RehearsalError
from lowtide.memory.events import Allocate, Event, EventStream, Free, Mark
from lowtide.memory.frame_variables import Held, find_held_memory
from lowtide.memory.memory_timeline import Timeline
from lowtide.units import format_bytes
from lowtide.utils.tables import aligned

Moment: TypeAlias = Literal["before backward", "after backward", "at the end of the step"]

_SURE_LOOKS = 8
"""Number of inspections that are always made: those of a step or two. Further ones are made as time allows."""

_MOST_TIME = 0.25
"""Time that further inspections may take, as a multiple of the rest of the block's time."""

_LABEL = "lowtide.variables"  # labels of the marks for looks, and for the free of memory that a look listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Del:
    """A `del` of variables at one moment: the bytes that it frees, and by how many bytes it lowers the peak."""

    names: tuple[str, ...]
    moment: Moment
    freed_bytes: int
    saved_bytes: int

    def __str__(self) -> str:
        text = f"del {', '.join(self.names)} {self.moment}: {format_bytes(self.freed_bytes)}"
        if not self.freed_bytes:
            return f"{text}, nothing"
        return f"{text}, {format_bytes(self.saved_bytes) if self.saved_bytes else 'nothing'} of the peak"


@dataclass(slots=True, eq=False)
class _Inspection:
    """Memory that only variables hold at one moment: (number, bytes, variables) of each storage."""

    moments: tuple[Moment, ...]
    names: tuple[str, ...]
    held: list[tuple[int, int, frozenset[str]]]
    is_first: bool = False
    position: int = -1
    """Number of events before the inspection."""


@dataclass(slots=True)
class DelObserver:
    """Observer of a function's variables, which are inspected at several moments between `begin` and `end`.

    `frame` is the function's frame; without it the moments are only marked. `mark` adds a mark to the recorded events.
    """

    frame: FrameType | None
    mark: Callable[[str, object], None]
    _inspections: list[_Inspection] = field(default_factory=list)
    _alive: dict[int, tuple[weakref.ref[UntypedStorage], int]] = field(default_factory=dict)
    _n_storages: int = 0
    _at_start: dict[str, list[weakref.ref[Tensor]]] = field(default_factory=dict)
    _rebound: set[str] = field(default_factory=set)
    _unsure: set[int] = field(default_factory=set)
    _is_after_backward: bool = False
    _thread: int = field(default_factory=threading.get_ident)
    _undo: list[Callable[[], None]] = field(default_factory=list)
    _began: float = field(default_factory=time.perf_counter)
    _spent: float = 0.0
    _is_partial: bool = False
    """True once an inspection was left out; the savings are unknown then."""
    _is_active: bool = False

    def begin(self) -> None:
        """Inspect leftovers of the previous step, and intercept backward passes and optimizer steps."""
        self._is_active, self._is_partial = True, self.frame is None
        self._inspect("at the end of the step", is_first=True)

        def wrap_engine(engine: Callable[..., Any]) -> Callable[..., Any]:
            def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
                if not self._is_active or threading.get_ident() != self._thread or in_backward():
                    return engine(outputs, *args, **kwargs)
                self._inspect("before backward")
                try:
                    return engine(outputs, *args, **kwargs)
                finally:
                    self._is_after_backward = True

            return run_backward

        hook = register_optimizer_step_pre_hook(this_thread_only(lambda *_: self._inspect_after_backward()))
        self._undo = [replace_function(torch.autograd, ENGINE, wrap_engine), hook.remove]

    def end(self, *, has_failed: bool) -> None:
        """Remove the patches of torch; inspect the variables a last time, unless an exception has ended the block."""
        while self._undo:
            self._undo.pop()()
        if not has_failed:
            moments: tuple[Moment, ...] = ("after backward",) if self._is_after_backward else ()
            self._inspect(*moments, "at the end of the step")
        else:
            self._inspections.clear()
        self.frame, self._is_active = None, False

    def result(self, stream: EventStream) -> tuple[Del, ...]:
        """Return the saving of each `del`, by variable and moment; sets of variables that share memory are included."""
        self._alive.clear()
        if self._is_partial:
            return ()
        positions: dict[object, int] = {}
        events: list[Event] = []
        for event in stream:
            if type(event) is Mark and event.label == _LABEL:
                positions[event.data] = len(events)
            else:
                events.append(event)
        for look in self._inspections:
            look.position = positions[look]
        levels = [0, *Timeline(EventStream(tuple(events), stream.device)).curve]
        ends = {number: positions.get((id(self), number), len(events)) for number in range(self._n_storages)}
        return tuple(self._dels(levels, ends))

    # --- looks ------------------------------------------------------------------------------------------------------

    def _inspect_after_backward(self) -> None:
        """Inspect the variables once backward has returned: until then its frames still refer to the loss."""
        if self._is_after_backward and threading.get_ident() == self._thread:
            self._is_after_backward = False
            self._inspect("after backward")

    def _inspect(self, *moments: Moment, is_first: bool = False) -> None:
        began = time.perf_counter()
        rest = began - self._began - self._spent
        self._is_partial |= len(self._inspections) >= _SURE_LOOKS and self._spent > _MOST_TIME * rest
        if self.frame is None or self._is_partial:
            if "before backward" in moments:  # the blocks alive at this moment are activations
                self.mark(_LABEL, _Inspection(moments, (), []))
            return
        held_memory = find_held_memory(self.frame)
        if is_first:
            self._at_start = {name: [weakref.ref(t) for t in inside] for name, inside in held_memory.tensors.items()}
        self._note_rebound(held_memory)
        held = [(self._number(storage), storage.nbytes(), names) for storage, names in held_memory.storages]
        look = _Inspection(moments, held_memory.names, held, is_first)
        self._inspections.append(look)
        self.mark(_LABEL, look)
        self._spent += time.perf_counter() - began

    def _note_rebound(self, held_memory: Held) -> None:
        for name, before in self._at_start.items():
            now = {id(tensor) for tensor in held_memory.tensors.get(name, ())}
            if not any((tensor := reference()) is not None and id(tensor) in now for reference in before):
                self._rebound.add(name)

    def _number(self, storage: UntypedStorage) -> int:
        key = get_storage_number(storage)
        if key not in self._alive:
            number = self._n_storages
            self._n_storages += 1
            self._alive[key] = weakref.ref(storage, lambda _: self._record_freed(key, number)), number
        return self._alive[key][1]

    def _record_freed(self, key: int, number: int) -> None:
        if self._alive.pop(key, None) is None:
            return
        try:
            if threading.get_ident() != self._thread:
                raise RehearsalError("the profiler does not follow other threads")
            self.mark(_LABEL, (id(self), number))
        except RehearsalError:
            self._unsure.add(number)

    # --- results ----------------------------------------------------------------------------------------------------

    def _dels(self, levels: list[int], ends: dict[int, int]) -> Iterator[Del]:
        moments: tuple[Moment, ...] = ("before backward", "after backward", "at the end of the step")
        for moment in moments:
            looks = [look for look in self._inspections if moment in look.moments]
            names = dict.fromkeys(name for look in looks for name in self._names_of(look))
            together = dict.fromkeys(owners for look in looks for _, _, owners in look.held if len(owners) > 1)
            groups = [frozenset([name]) for name in names] + [owners for owners in together if owners <= names.keys()]
            for group in groups:
                yield self._del(group, moment, looks, levels, ends)

    def _names_of(self, look: _Inspection) -> Iterable[str]:
        """Return the variables in `look`; for the first inspection, only those that the step assigns again."""
        return [name for name in look.names if name in self._rebound] if look.is_first else look.names

    def _del(
        self, group: frozenset[str], moment: Moment, looks: list[_Inspection], levels: list[int], ends: dict[int, int]
    ) -> Del:
        freed_bytes, missing, seen = 0, [0] * (len(levels) + 1), set(self._unsure)
        for look in looks:
            if look.is_first and not group <= self._rebound:
                continue
            freed = [(number, n_bytes) for number, n_bytes, owners in look.held if owners <= group]
            freed_bytes = max(freed_bytes, sum(n_bytes for _, n_bytes in freed))
            first = 0 if look.is_first else look.position + 1  # the level that was reached before the look stays
            for number, n_bytes in freed:
                if number not in seen and first <= ends[number]:
                    missing[first] += n_bytes
                    missing[ends[number] + 1] -= n_bytes
                seen.add(number)
        without = max(level - less for level, less in zip(levels, accumulate(missing), strict=False))
        return Del(
            names=tuple(sorted(group)),
            moment=moment,
            freed_bytes=freed_bytes,
            saved_bytes=max(levels) - without,
        )


def find_living_blocks(stream: EventStream) -> tuple[set[int], list[Allocate]]:
    """Return the numbers of blocks that are alive when a backward pass begins, and the allocations alive at the end."""
    alive: dict[int, Allocate] = {}
    blocks: set[int] = set()
    for event in stream.events:
        if type(event) is Allocate:
            alive[event.block] = event
        elif type(event) is Free:
            alive.pop(event.block, None)
        elif (
            isinstance(event, Mark)
            and isinstance(look := event.data, _Inspection)
            and "before backward" in look.moments
        ):
            blocks.update(alive)
    return blocks, list(alive.values())


def without_marks(stream: EventStream) -> EventStream:
    """Return the stream without the marks that this module adds."""
    events = tuple(event for event in stream if not (type(event) is Mark and event.label == _LABEL))
    return stream if len(events) == len(stream) else EventStream(events, stream.device)


def table(dels: Iterable[Del], peak_bytes: int) -> Iterator[str]:
    """Yield lines of text: each `del` that lowers the peak, best first, then variables that save less than 0.1 %."""
    rows = sorted(dels, key=lambda row: -row.saved_bytes)
    useful = [row for row in rows if row.saved_bytes and row.saved_bytes * 1000 >= peak_bytes]
    if useful:
        yield "what `del` would free, and by how much the peak would be lower:"
    cells = [
        (
            " and ".join(row.names),
            row.moment,
            format_bytes(row.freed_bytes),
            format_bytes(row.saved_bytes),
        )
        for row in useful
    ]
    yield from (f"  {line}" for line in aligned(cells, left={0, 1}))
    others = sorted({name for row in rows for name in row.names} - {n for row in useful for n in row.names})
    if others:
        yield f"no `del` of these lowers the peak by 0.1 %: {', '.join(others)}"
