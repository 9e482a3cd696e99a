"""Memory of one step at up to `MOST_MOMENTS` moments, predicted from a profile or read from recorded events."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.memory.events import PHASE, Allocate, Free, Mark
from lowtide.memory.memory_timeline import Timeline
from lowtide.planner.inplace_savings import find_prefix_length
from lowtide.planner.planning import get_simulator
from lowtide.planner.records import Decisions, Profile, Static
from lowtide.planner.serialization import Record
from lowtide.planner.simulate.memory_sweep import Sweep
from lowtide.report.text_table import operator_name

MOST_MOMENTS = 400
"""Largest number of moments of a step that are shown. It is more than a screen can resolve."""
NAMED = 8
"""Number of the largest tensors that are named at each moment."""

CATEGORIES = (
    "parameters",
    "optimizer state",
    "gradients",
    "buffers",
    "inputs",
    "other tensors",
    "left from before",
    "margin",
    "gathered parameters",
    "communication buffers",
    "activations",
    "loss head",
    "recomputed",
    "temporaries",
)
"""Categories of memory, in the order in which pictures stack them."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor(Record):
    """A large tensor, alive at moments `first <= moment < stop`."""

    name: str
    """Module and operator: `transformer.h.3.mlp.act GELU`."""
    category: str
    bytes: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Span(Record):
    """A phase of the step: moments `first <= moment < stop`."""

    name: str
    first: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory(Record):
    """Memory of one step at some moments. A long step is cut into equal parts, and the peak of each part is kept."""

    how: Literal["measured", "predicted", "estimated"]
    n_events: int
    """Length of the step: allocations and frees, or positions of a profile."""
    at: tuple[int, ...]
    """Position of each moment in the step, from 0 to `n_events` - 1."""
    bytes: dict[str, tuple[int, ...]]
    """Category -> bytes at each moment."""
    floor_bytes: int = 0
    """Level at which the stack of categories begins. It is negative if levels are relative to the memory at the start
    of the step, and the step frees memory from before.
    """
    modules: tuple[str, ...] = ()
    """Paths of modules, to which `where` refers by index."""
    where: tuple[int, ...] = ()
    """Index in `modules` of the module that runs at each moment, in forward or backward."""
    phases: tuple[Span, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    """The largest tensors alive at each moment, up to NAMED."""

    @property
    def totals(self) -> tuple[int, ...]:
        """Total allocated bytes at each moment of the step."""
        return tuple(self.floor_bytes + sum(column) for column in zip(*self.bytes.values(), strict=True))

    @property
    def peak_moment(self) -> int:
        totals = self.totals
        return totals.index(max(totals))

    @property
    def peak_bytes(self) -> int:
        return max(self.totals)

    def parts_at(self, moment: int) -> dict[str, int]:
        """Return the bytes of each non-empty category at a moment."""
        return {name: column[moment] for name, column in self.bytes.items() if column[moment]}

    def tensors_at(self, moment: int) -> tuple[Tensor, ...]:
        """Return the largest tensors alive at a moment, largest first."""
        alive = (t for t in self.tensors if t.first <= moment < t.stop)
        return tuple(sorted(alive, key=lambda t: -t.bytes))[:NAMED]

    def phase_at(self, moment: int) -> str:
        """Return the name of the phase at a moment; empty outside phases."""
        return next((span.name for span in self.phases if span.first <= moment < span.stop), "")

    def module_at(self, moment: int) -> str:
        """Return the path of the module that runs at a moment; empty if unknown."""
        return self.modules[self.where[moment]] if self.where else ""

    def check(self) -> None:
        """Raise ValueError if the fields contradict each other."""
        n = len(self.at)
        if not n or not self.bytes:
            raise ValueError("a step's memory has no moments")
        if any(len(column) != n for column in self.bytes.values()) or len(self.where) not in (0, n):
            raise ValueError("a step's memory has columns of different lengths")
        if any(not 0 <= module < len(self.modules) for module in self.where):
            raise ValueError("a moment is in a module that is not listed")
        spans = [(span.first, span.stop) for span in self.phases] + [(t.first, t.stop) for t in self.tensors]
        if any(not 0 <= first <= stop <= n for first, stop in spans):
            raise ValueError("a phase or tensor is at moments that there are not")
        if any(category not in CATEGORIES for category in (*self.bytes, *(t.category for t in self.tensors))):
            raise ValueError("a category of memory is not known")
        if any(earlier >= later for earlier, later in pairwise(self.at)):
            raise ValueError("moments are not in order")


def predict_memory(profile: Profile, decisions: Decisions | None = None) -> StepMemory:
    """Predict the memory over the step under the plan's `decisions`; by default, over the step without a plan."""
    own, sweep = sweep_memory(profile, decisions or Decisions())
    columns = _predict_columns(own, sweep)
    total = sum(columns.values())
    assert isinstance(total, np.ndarray)
    starts = sorted((at, name) for name, at in own.phases.items())
    moments = _choose_moments(total, [at for at, _ in starts])
    modules, where = _find_modules(own)
    tensors = _list_tensors(own, sweep)
    return StepMemory(
        how="predicted",
        n_events=len(total),
        at=tuple(moments.tolist()),
        bytes={name: tuple(columns[name][moments].tolist()) for name in CATEGORIES if np.any(columns.get(name, 0))},
        modules=modules,
        where=tuple(where[moments].tolist()),
        phases=_make_spans(starts, moments, len(total)),
        tensors=_make_largest_tensors(*tensors, moments),
    )


def sweep_memory(profile: Profile, decisions: Decisions) -> tuple[Profile, Sweep]:
    """Compute the memory over the step under the plan's `decisions`.

    Returns the profile adjusted for gradients in place, and the `Sweep`, which holds the bytes.
    """
    n = find_prefix_length(profile, decisions.in_place) if decisions.in_place else 0
    simulator = get_simulator(profile, offload=bool(decisions.offload), in_place=n)
    return simulator.profile, simulator.sweep(simulator.choice(replace(decisions, in_place=frozenset())))


def read_recorded_memory(
    timeline: Timeline, how: Literal["measured", "estimated"], static: Static | None = None
) -> StepMemory:
    """Convert a recorded timeline to the memory of a step.

    `static` is the memory from before the step. If it is None, levels are relative to the start of the step. A million
    events take about 2 seconds and 500 MB.
    """
    events = timeline.stream.events or (Mark("", None),)
    read = _read_events(timeline, events)
    columns = {
        name: np.cumsum(np.where(read.category == number, read.change, 0))
        for number, name in enumerate(CATEGORIES)
        if (read.category == number).any()
    }
    freed = np.cumsum(np.where(read.category == -1, -read.change, 0))
    floor = _add_entry(columns, freed, static)
    total = sum(columns.values()) + floor + np.zeros(len(events), np.int64)
    moments = _choose_moments(total, [at for at, _ in read.phases])
    allocated = np.flatnonzero(read.freed_at)
    order = allocated[np.argsort(-read.change[allocated], kind="stable")]
    chosen = _choose_tensors(order, order, read.freed_at[order], moments)
    tensors = tuple(
        Tensor(
            name=_format_block_name(timeline, events, int(i)),
            category=CATEGORIES[read.category[i]],
            bytes=int(read.change[i]),
            first=first,
            stop=stop,
        )
        for i, first, stop in chosen
    )
    before = np.searchsorted(allocated, moments, side="right") - 1
    paths = [_find_module(timeline, events, int(allocated[k])) if k >= 0 else "" for k in before]
    modules = tuple(dict.fromkeys(paths))
    return StepMemory(
        how=how,
        n_events=len(events),
        at=tuple(moments.tolist()),
        bytes={name: tuple(columns[name][moments].tolist()) for name in CATEGORIES if np.any(columns.get(name, 0))}
        or {"temporaries": (0,) * len(moments)},
        floor_bytes=floor,
        modules=modules,
        where=tuple(map(modules.index, paths)),
        phases=_make_spans(read.phases, moments, len(events)),
        tensors=tensors,
    )


# --- events


class _EventColumns(NamedTuple):
    """The events of a timeline as columns with one entry per event."""

    category: npt.NDArray[np.int8]
    """Index in CATEGORIES of the block that is allocated or freed; -1 for other events, and for blocks from before."""
    change: Ints
    """Bytes allocated; negative for bytes freed."""
    freed_at: Ints
    """Index of the event that frees each allocation, or the number of events if none does; 0 for other events."""
    phases: list[tuple[int, str]]
    """Index of the event at which each phase begins, and the phase's name."""


def _read_events(timeline: Timeline, events: Sequence[object]) -> _EventColumns:
    """Read the events of `timeline` into columns."""
    kinds = {name: number for number, name in enumerate(CATEGORIES)}
    category_of = [kinds[label.category] for label in timeline.labels.values()]
    labelled = dict(zip(timeline.labels, category_of, strict=True))
    allocated_at: dict[int, int] = {}
    n = len(events)
    read = _EventColumns(np.full(n, -1, np.int8), np.zeros(n, np.int64), np.zeros(n, np.int64), [])
    category, change, freed_at, phases = read
    temporaries = kinds["temporaries"]
    for i, event in enumerate(events):
        if type(event) is Allocate:
            allocated_at[event.block] = i
            category[i], change[i], freed_at[i] = labelled.get(event.block, temporaries), event.bytes, n
        elif type(event) is Free:
            change[i] = -event.bytes
            if (start := allocated_at.get(event.block)) is not None:
                category[i], freed_at[start] = category[start], i
        elif type(event) is Mark and event.label == PHASE:
            phases.append((i, str(event.data)))
    return read


# --- columns


def _predict_columns(profile: Profile, sweep: Sweep) -> dict[str, Ints]:
    """Predict the bytes of each category at each position; their sum at the peak is the predicted peak."""
    static, n = profile.static, len(profile.base_bytes)
    gradients = np.array(profile.gradient_bytes, np.int64)
    temporaries = np.array(profile.base_bytes, np.int64) - gradients
    freed = np.maximum(0, -temporaries)  # part of the memory that existed at entry
    columns = {name: np.full(n, amount, np.int64) for name, amount in _map_entry_bytes(static).items()}
    columns["gradients"] += gradients - freed
    columns["temporaries"] = temporaries + freed
    columns["recomputed"] = _sum_alive(sweep.copies.start, sweep.copies.end, sweep.copies.bytes, n)
    for category in ("activations", "loss head"):
        rows = [i for i, storage in enumerate(profile.storages) if storage.category == category]
        first = np.array([min(profile.storages[i].allocated_at, n) for i in rows], np.int64)
        amounts = np.array([profile.storages[i].bytes for i in rows], np.int64)
        columns[category] = _sum_alive(first, sweep.ends[rows], amounts, n)
    return columns


def _sum_alive(first: Ints, stop: Ints, amounts: Ints, n: int) -> Ints:
    """Return the sum of the amounts that are alive at each of `n` positions: those with `first <= position < stop`."""
    changes = np.zeros(n + 1, np.int64)
    np.add.at(changes, first, amounts)
    np.subtract.at(changes, np.maximum(first, stop), amounts)
    total: Ints = changes.cumsum()[:-1]
    return total


def _map_entry_bytes(static: Static) -> dict[str, int]:
    """Return the memory at the start of the step, by category."""
    return {
        "parameters": static.parameters,
        "optimizer state": static.optimizer,
        "gradients": static.gradients,
        "buffers": static.buffers,
        "inputs": static.inputs,
        "other tensors": static.others,
        "left from before": static.carried_over,
        "margin": static.margin,
    }


def _add_entry(columns: dict[str, Ints], freed: Ints, static: Static | None) -> int:
    """Add the memory from before the step to `columns`, minus the bytes `freed` by each event.

    Returns the level at which the stack of categories begins: 0, or a negative number if `static` is None and memory
    from before was freed.
    """
    if static is None:
        most = int(freed.max())
        if most > 0:
            columns["left from before"] = columns.get("left from before", 0) + most - freed
        return -max(most, 0)
    for name in ("gradients", "left from before", "inputs", "other tensors", "optimizer state", "parameters"):
        amount = _map_entry_bytes(static)[name]
        taken = np.minimum(freed, amount)
        freed = freed - taken
        columns[name] = columns.get(name, 0) + amount - taken
    columns["buffers"] = columns.get("buffers", 0) + static.buffers - freed
    columns["margin"] = columns.get("margin", 0) + np.full_like(freed, static.margin)
    return 0


# --- moments


def _choose_moments(total: Ints, starts: Sequence[int]) -> Ints:
    """Choose the moments to keep: the peak of each of MOST_MOMENTS equal parts, and the beginnings of phases."""
    n = len(total)
    if n <= MOST_MOMENTS:
        return np.arange(n)
    edges = np.linspace(0, n, MOST_MOMENTS + 1).astype(np.int64)
    highest = [first + int(total[first:stop].argmax()) for first, stop in pairwise(edges)]
    return np.unique(np.array([*highest, int(total.argmax()), *(at for at in starts if at < n)], np.int64))


def _make_spans(starts: Sequence[tuple[int, str]], moments: Ints, n: int) -> tuple[Span, ...]:
    edges = [
        (name, int(np.searchsorted(moments, at)), int(np.searchsorted(moments, stop)))
        for (at, name), (stop, _) in pairwise([*starts, (n, "")])
    ]
    return tuple(Span(name=name, first=first, stop=stop) for name, first, stop in edges if first < stop)


# --- tensors


def _choose_tensors(order: Ints, starts: Ints, stops: Ints, moments: Ints) -> list[tuple[int, int, int]]:
    """Choose the tensors that are among the NAMED largest at some moment. Return (index, first, stop) for each.

    A tensor is alive at the moments `first <= moment < stop`. `order` holds the tensors' indices, largest first;
    `starts` and `stops` are their lifetimes in that order.
    """
    first, stop = np.searchsorted(moments, starts), np.searchsorted(moments, stops)
    count = np.zeros(len(moments), np.int64)
    chosen: list[tuple[int, int, int]] = []
    for row in np.flatnonzero(first < stop).tolist():  # the other tensors live between two kept moments
        start, end = int(first[row]), int(stop[row])
        alive = count[start:end]
        if alive.min() < NAMED:
            alive += 1
            chosen.append((int(order[row]), start, end))
    return chosen


def _make_largest_tensors(
    names: Sequence[tuple[str, str]], first: Ints, stop: Ints, amounts: Ints, moments: Ints
) -> tuple[Tensor, ...]:
    order = np.argsort(-amounts, kind="stable")
    return tuple(
        Tensor(name=names[row][0], category=names[row][1], bytes=int(amounts[row]), first=start, stop=end)
        for row, start, end in _choose_tensors(order, first[order], stop[order], moments)
    )


def _list_tensors(profile: Profile, sweep: Sweep) -> tuple[list[tuple[str, str]], Ints, Ints, Ints]:
    """List all storages, then all recomputed tensors: names with categories, starts, ends and bytes.

    A tensor is alive from its start until before its end, both counted in positions of the step.
    """
    labels: dict[int, str] = {}
    for slot in profile.slots:
        labels.setdefault(slot.value, put_in_words(slot.label))
    names = [(put_in_words(storage.label) or "(outside modules)", storage.category) for storage in profile.storages]
    n_values = len(profile.values)
    for node in sweep.copies.node.tolist():
        if node < n_values:
            name = labels.get(node) or operator_name(profile.values[node].node) or "(between modules)"
            names.append((name, "recomputed"))
        else:
            names.append((profile.calls[node - n_values].id.partition("#")[0] or "the model", "recomputed"))
    n = len(profile.base_bytes)
    first = np.array([min(storage.allocated_at, n) for storage in profile.storages], np.int64)
    amounts = np.array([storage.bytes for storage in profile.storages], np.int64)
    copies = sweep.copies
    return (
        names,
        np.concatenate((first, copies.start)),
        np.concatenate((sweep.ends, copies.end)),
        np.concatenate((amounts, copies.bytes)),
    )


def put_in_words(label: str) -> str:
    """Replace the autograd node in a label by words: `h.0.act: GeluBackward0 [8, 9]` -> `h.0.act: GELU [8, 9]`."""
    return re.sub(r"\b\w+Backward\d+(?:\+\w+)?", lambda node: operator_name(node[0]), label)


def _find_modules(profile: Profile) -> tuple[tuple[str, ...], Ints]:
    """Return module paths, and for each position of the step the index of the module that runs there."""
    n = len(profile.base_bytes)
    names: dict[str, int] = {"": 0}
    where = np.zeros(n, np.int64)
    for call in profile.calls:  # inner calls come later
        where[call.enter : call.exit] = names.setdefault(call.id.partition("#")[0], len(names))
    backward = profile.phases.get("backward", n)
    after = profile.phases.get("after backward", n)
    read = {slot.need: slot for slot in profile.slots if slot.need is not None and backward <= slot.need < n}
    here = 0
    for at in range(backward, n):
        if at >= after:
            here = 0
        elif at in read:
            here = names.setdefault(profile.calls[read[at].call].id.partition("#")[0], len(names))
        where[at] = here
    return tuple(names), where


def _format_block_name(timeline: Timeline, events: Sequence[object], index: int) -> str:
    event = events[index]
    assert isinstance(event, Allocate)
    label = timeline.labels.get(event.block)
    parts = (label.module, label.op or event.op) if label else ("", event.op)
    return " ".join(filter(None, parts)) or "(outside any operator)"


def _find_module(timeline: Timeline, events: Sequence[object], index: int) -> str:
    event = events[index]
    assert isinstance(event, Allocate)
    label = timeline.labels.get(event.block)
    return (label.module if label else "") or event.op


def map_moments_by_phase(memory: StepMemory, others: Mapping[str, tuple[int, int]]) -> tuple[float, ...]:
    """Map each moment of a step to a position on the axis of another step, phase by phase.

    Args:
        memory: The step to map.
        others: Phase -> positions in the other step at which the phase begins and ends.
    """
    places = np.array(memory.at, np.float64)
    for span in memory.phases:
        if span.name in others:
            first, stop = others[span.name]
            own = memory.at[span.first], memory.at[span.stop] if span.stop < len(memory.at) else memory.n_events
            scale = (stop - first) / max(own[1] - own[0], 1)
            rows = slice(span.first, span.stop)
            places[rows] = first + (np.array(memory.at[rows]) - own[0]) * scale
    return tuple(places.tolist())
