"""Profile of a compiled step, from its joint graphs and its recording.

The profile takes values, slots and costs from the joint graphs, where the profile of an eager step takes them from
autograd's graph, so the same planner plans both. All graphs share the step's one axis of positions: each stretch of
events outside compiled code is a position, and so is each call inside compiled code. `joint_memory.py` computes the
bytes at positions inside compiled code. Recorded allocations that no value accounts for count where they were. If the
plain step's measured peak inside compiled code is still above the computed peak, the difference counts everywhere.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from lowtide._torch.joint_graph import JointGraph, JointNode
from lowtide.errors import RehearsalError
from lowtide.memory.events import Allocate, Event, EventStream, Free, Mark, count_added_bytes
from lowtide.planner.records import Call, Fingerprint, Profile, Slot, Static, Storage, Value
from lowtide.profiler.joint_memory import (
    GraphHalf,
    compute_backward_half,
    compute_forward_half,
    read_scratch_bytes,
    unmodelled,
    upstream,
    written,
)
from lowtide.runtime.joint_slots import SMALL, JointSlots, Recomputed

CALL = "compiled call"
"""Label of the marks at calls of compiled graphs; their data are the arguments that `watched_calls` notes."""

BYTES_PER_FLOP = 12.0
"""Number of FLOPs that take as long as writing a byte in a separate kernel; in a fused kernel a byte counts a quarter.
"""


def assembled(graphs: Sequence[JointSlots], stream: EventStream, step_ms: float) -> Profile:
    """Return the profile of a recorded step, except its fingerprint and static memory.

    Raises RehearsalError for a step that can't be planned.
    """
    if not graphs:
        raise RehearsalError(
            "inductor compiled nothing that is differentiated in this step, and only inductor lets Lowtide choose what "
            'to save for backward. Compile with backend="inductor" (the default), or give the model as it was before '
            "torch.compile. If inductor is its backend, torch runs the code as in eager mode: TORCH_LOGS=graph_breaks "
            "says where it stops, such as at a break inside a loop."
        )
    if sends := next((node.target for graph in graphs for node in graph.joint.nodes if _sends(node)), None):
        raise RehearsalError(
            f"compiled code sends to other processes ({sends}), and the order of those operations is not known. "
            "Compile repeated blocks instead, each in place: `block.compile()`."
        )
    calls = [call for call in _calls(stream) if call.backward is not None]
    if not calls:
        raise RehearsalError(
            "the step ran no backward through compiled code: call loss.backward() inside it, and not under compiled "
            "autograd, which compiles backward once more."
        )
    if any(call.graph >= len(graphs) for call in calls):
        raise RehearsalError(
            "the step runs code that was compiled before the rehearsal, so its saved tensors were not observed. "
            "Rehearse in a new process, before the step is first called."
        )
    ran: dict[tuple[int, tuple[int, ...]], int] = {}
    """Graphs that ran, each at one size, in order."""
    calls = [replace(call, graph=ran.setdefault((call.graph, call.sizes), len(ran))) for call in calls]
    first = {call.graph: call for call in reversed(calls)}
    graphs = _make_addresses_unique(graphs)
    both = [
        _Graph.of(graphs[n].at(sizes), (_within(stream, first[at].forward), _within(stream, first[at].backward)))
        for at, (n, sizes) in enumerate(ran)
    ]
    return _merge_positions(_Records(both, calls, stream, step_ms).profile())


def _make_addresses_unique(graphs: Sequence[JointSlots]) -> list[JointSlots]:
    """Return `graphs` with unambiguous addresses: a graph that shares an address with another one gets its hash added
    to all of its addresses.
    """
    of_key: dict[str, set[str]] = {}
    for graph in graphs:
        of_key.setdefault(graph.joint.key, set()).update(slot.address for slot in graph.slots)
    n_graphs = Counter(address for addresses in of_key.values() for address in addresses)
    shared = {key for key, addresses in of_key.items() if any(n_graphs[address] > 1 for address in addresses)}
    return [graph.named() if graph.joint.key in shared else graph for graph in graphs]


def _within(stream: EventStream, span: tuple[int, int] | None) -> Sequence[Event]:
    begin, end = span or (0, 0)
    return stream.events[begin : end + 1]


def _sends(node: JointNode) -> bool:
    return node.target.startswith(("_c10d_functional", "c10d_functional", "_dtensor", "c10d"))


@dataclass(slots=True)
class _GraphCall:
    """One call of a joint graph: the first and last events, in the stream, of its forward and, if that ran, its
    backward.
    """

    graph: int
    forward: tuple[int, int]
    sizes: tuple[int, ...]
    backward: tuple[int, int] | None = None


def _calls(stream: EventStream) -> list[_GraphCall]:
    calls, entered = list[_GraphCall](), list[int]()
    for at, event in enumerate(stream.events):
        if not (type(event) is Mark and event.label == CALL and isinstance(event.data, tuple)):
            continue
        what, graph, is_backward, sizes = event.data
        if what == "enter":
            entered.append(at)
            continue
        span = (entered.pop(), at)
        if not is_backward:
            calls.append(_GraphCall(graph, span, sizes))
            continue
        waiting = [call for call in calls if call.graph == graph and call.backward is None]
        if not waiting:
            raise RehearsalError(
                "backward runs through compiled code more than once (retain_graph=True): what it recomputes is freed "
                "after the first pass.\n  Add up the losses, and call backward once."
            )
        waiting[-1].backward = span  # backward runs through the last forward first
    return calls


def compute_peak_with_calls(stream: EventStream, calls: EventStream) -> int | None:
    """Return the peak of a recorded step if its compiled calls allocated what they did in the recording `calls`.

    Args:
        stream: The step, with loss, optimizer and all else outside compiled code.
        calls: A recording of the same compiled calls under another partition. It may have fewer calls of a kind, in
            another order, and may hold their arguments for longer than the step.

    Returns:
        Bytes beyond those that exist when the step begins; None if other calls ran.
    """
    of_kind: dict[object, list[tuple[int, int]]] = {}
    for kind, begin, end in reversed(_find_compiled_calls(calls)):
        of_kind.setdefault(kind, []).append((begin, end))
    own, own_of_calls = _find_allocated_inside(stream), _find_allocated_inside(calls)
    events, done = list[Event](), 0
    for kind, enter, leave in _find_compiled_calls(stream):
        if kind not in of_kind:
            return None
        begin, end = of_kind[kind].pop() if len(of_kind[kind]) > 1 else of_kind[kind][0]
        freed = Counter(event.bytes for event in _select_frees_of_others(stream.events[enter:leave], own))
        events += [*stream.events[done:enter], *_with_frees(calls.events[begin:end], own_of_calls, freed)]
        done = leave
    return max(accumulate(map(count_added_bytes, [*events, *stream.events[done:]])))


def count_held_after_calls(stream: EventStream) -> Counter[int]:
    """Count, by size, the blocks that compiled calls allocated and no compiled call freed: the program holds them."""
    spans = [stream.events[enter:leave] for _, enter, leave in _find_compiled_calls(stream)]
    own = {event.block: event.bytes for events in spans for event in events if type(event) is Allocate}
    freed = {event.block for events in spans for event in events if type(event) is Free}
    return Counter(n_bytes for block, n_bytes in own.items() if block not in freed)


def _find_allocated_inside(stream: EventStream) -> set[int]:
    """Return the numbers of the blocks that compiled calls allocated."""
    events = (event for _, enter, leave in _find_compiled_calls(stream) for event in stream.events[enter:leave])
    return {event.block for event in events if type(event) is Allocate}


def _select_frees_of_others(events: Sequence[Event], own: Collection[int]) -> Iterator[Free]:
    """Yield the frees of blocks that no compiled call allocated, such as the batch, which backward may hold last."""
    return (event for event in events if type(event) is Free and event.block not in own)


def _with_frees(events: Sequence[Event], own: Collection[int], freed: Counter[int]) -> Iterator[Event]:
    """Yield the `events` of a compiled call, changed to free as many blocks of other code as `freed` counts by size.

    Further frees of such blocks are left out, and missing ones added at the end. `own` has the blocks that compiled
    calls allocated.
    """
    for event in events:
        if type(event) is Free and event.block not in own:
            if not freed[event.bytes]:
                continue
            freed[event.bytes] -= 1
        yield event
    yield from (Free(-1, n_bytes) for n_bytes in freed.elements())


def _find_compiled_calls(stream: EventStream) -> list[tuple[object, int, int]]:
    """Return, for each compiled call in order: the tuple of its graph's number, direction and sizes; the index of its
    first event; the index after its last event.

    Graphs are numbered by their first calls in the stream, because other graphs may have run before the recording.
    """
    numbers: dict[int, int] = {}
    marks = [(at, event.data) for at, event in enumerate(stream.events) if type(event) is Mark and event.label == CALL]
    spans = list[tuple[object, int, int]]()
    for (enter, data), (leave, _) in zip(marks[::2], marks[1::2], strict=True):  # no compiled call is inside another
        assert isinstance(data, tuple)
        _, graph, *rest = data
        spans.append(((numbers.setdefault(graph, len(numbers)), *rest), enter, leave))
    return spans


@dataclass(frozen=True, slots=True)
class _Graph:
    """A joint graph under two partitions, torch's own and one that saves all slots: each as forward and backward."""

    slots: JointSlots
    plain: tuple[GraphHalf, GraphHalf]
    saved: tuple[GraphHalf, GraphHalf]
    unsaved: GraphHalf
    """Forward with no slot saved."""
    units: list[float]
    """Cost of each node, in FLOPs of a matrix product."""
    scratch: dict[int, int]
    """Scratch memory of extern kernels, by node."""
    more_bytes: tuple[dict[int, int], dict[int, int]]
    """For each half, the recorded bytes that none of its values accounts for, by node; -1 for the half's end."""

    @classmethod
    def of(cls, slots: JointSlots, recorded: tuple[Sequence[Event], Sequence[Event]]) -> _Graph:
        joint, as_torch, saved, apart = slots.joint, slots.as_torch(), slots.without(()), slots.kept_apart
        scratch = read_scratch_bytes(joint, as_torch, recorded)
        plain = compute_forward_half(joint, as_torch, scratch), compute_backward_half(joint, as_torch, scratch)
        return cls(
            slots,
            plain,
            (compute_forward_half(joint, saved, scratch, apart), compute_backward_half(joint, saved, scratch, apart)),
            compute_forward_half(joint, Recomputed(frozenset(), frozenset()), kept_apart=apart),
            [_units(node) for node in joint.nodes],
            scratch,
            (_explained(joint, plain[0], recorded[0]), _explained(joint, plain[1], recorded[1])),
        )

    @property
    def plain_bytes(self) -> int:
        """Bytes that torch's own partition saves, except inputs and outputs."""
        return sum(self.slots.joint.nodes[root].bytes for root in self.slots.roots)

    def saved_bytes(self, phase: int, at: int) -> int:
        """Return the bytes of slots that backward reads, held at node `at` of forward (`phase` 0) or backward (1)."""
        half, nodes = self.saved[phase], self.slots.joint.nodes
        read = [slot.node for slot in self.slots.slots if slot.node in self.saved[1].last]
        read = [node for node in read if nodes[node].kind != "input"]
        return sum(nodes[n].bytes for n in read if (at <= half.last[n] if phase else at >= half.allocated_at[n]))


def _explained(joint: JointGraph, half: GraphHalf, events: Sequence[Event]) -> dict[int, int]:
    """Return the `unmodelled` bytes of half a graph, by node, if they can explain the recorded peak; zeros otherwise.

    The recorded peak must be clearly larger than the modelled one, and no smaller than the modelled peak with these
    bytes.
    """
    more_bytes = unmodelled(joint, half, events)
    recorded_bytes = max(accumulate(map(count_added_bytes, events)), default=0)
    with_more_bytes = max(map(sum, zip(half.levels, more_bytes.values(), strict=True)))
    if max(half.levels) + recorded_bytes // SMALL < recorded_bytes >= with_more_bytes:
        return more_bytes
    return dict.fromkeys(more_bytes, 0)


def _with_more(half: GraphHalf, more_bytes: dict[int, int]) -> list[int]:
    """Return the bytes in memory at each position of half a graph, with the unmodelled bytes `more_bytes` (by value)
    added.

    A value that is not in `more_bytes` gets the unmodelled bytes of the value before it.
    """
    levels, own = list[int](), 0
    for value, level in zip((*half.order, -1), half.levels, strict=True):
        own = more_bytes.get(value, own)
        levels.append(level + own)
    return levels


def _units(node: JointNode) -> float:
    if node.kind in ("view", "input"):
        return 0.0
    return node.flops + BYTES_PER_FLOP * node.bytes * (0.25 if node.kind == "pointwise" else 1.25)


class _Records:
    """Builder of a profile's records, with a position for each call inside compiled code."""

    def __init__(
        self, graphs: Sequence[_Graph], calls: Sequence[_GraphCall], stream: EventStream, step_ms: float
    ) -> None:
        self._graphs, self._calls, self._step_ms = graphs, calls, step_ms
        self._ms_per_unit = step_ms / (sum(sum(graphs[call.graph].units) for call in calls) or 1.0)
        self._base: list[int] = []
        """For each position the bytes that no slot holds."""
        self._live_bytes: list[int] = []
        """For each call, the bytes of the step in memory when its forward begins, except those that slots hold."""
        self._at: dict[tuple[int, int], int] = {}
        """First position of each call of a graph, by its number and 0 for forward or 1 for backward."""
        self._put_on_axis(stream)
        self._storages: list[Storage] = []
        self._values: list[Value] = []
        self._slots: list[Slot] = []
        for number, call in enumerate(calls):
            self._add(number, graphs[call.graph])

    def profile(self) -> Profile:
        spans = range(len(self._calls))
        forward_ends = [self._end(number, 0) for number in spans]
        return Profile(
            fingerprint=Fingerprint(torch="", model="", batch="", device=""),
            static=Static(),
            base_bytes=tuple(self._base),
            gradient_bytes=(0,) * len(self._base),
            phases={
                "forward": min(self._at[number, 0] for number in spans),
                "backward": min(self._at[number, 1] for number in spans),
                "after backward": max(self._end(number, 1) for number in spans),
            },
            storages=tuple(self._storages),
            values=tuple(self._values),
            slots=tuple(self._slots),
            calls=tuple(
                Call(
                    id=f"compiled graph {call.graph}#{number}",
                    cls="",
                    parent=None,
                    enter=self._at[number, 0],
                    exit=forward_ends[number],
                    refused="it is part of compiled code",
                )
                for number, call in enumerate(self._calls)
            ),
            step_ms=self._step_ms,
            measured_plain_peak_bytes=None,
            graphs=tuple(dict.fromkeys(graph.slots.joint.key for graph in self._graphs)),
        )

    def _end(self, number: int, phase: int) -> int:
        return self._at[number, phase] + len(self._graphs[self._calls[number].graph].saved[phase].levels)

    def _put_on_axis(self, stream: EventStream) -> None:
        levels = list(accumulate(map(count_added_bytes, stream.events)))
        spans = [(call.forward, number, 0) for number, call in enumerate(self._calls)]
        spans += [(call.backward, number, 1) for number, call in enumerate(self._calls) if call.backward]
        held = done = 0
        live_bytes = self._live_bytes = [0] * len(self._calls)
        for (enter, leave), number, phase in sorted(spans):
            graph = self._graphs[self._calls[number].graph]
            self._base.append(max(levels[done : enter + 1]) - held)
            self._at[number, phase] = len(self._base)
            below = levels[enter] - held
            if not phase:
                live_bytes[number] = below
            # scratch memory, the same for all positions. Where inductor's order saves bytes, plans may still need them
            rise = max(levels[enter : leave + 1]) - levels[enter]
            below += max(0, rise - max(_with_more(graph.plain[phase], graph.more_bytes[phase])))
            below += graph.saved_bytes(1, 0) if phase else 0
            inside = _with_more(graph.saved[phase], graph.more_bytes[phase])
            self._base += [below + level - graph.saved_bytes(phase, at) for at, level in enumerate(inside)]
            held += -graph.plain_bytes if phase else graph.plain_bytes
            done = leave
        self._base.append(max(levels[done:]) - held)

    def _add(self, number: int, graph: _Graph) -> None:
        """Add the storages, values and slots of call `number`, a call of `graph`."""
        joint, slots = graph.slots.joint, {slot.node: slot for slot in graph.slots.slots}
        order = sorted({*upstream(joint, slots), *slots})  # inputs among the slots come first
        made, index = written(joint, order, {*slots, *graph.slots.kept_apart}), dict[int, int]()
        for node in order:
            value, slot = joint.nodes[node], slots.get(node)
            index[node] = len(self._values)
            self._values.append(
                Value(
                    storage=None if slot is None else len(self._storages),
                    bytes=value.bytes if node in made else 0,
                    node=value.target,
                    recipe=None if slot is not None and slot.is_kept else value.target,
                    operands=tuple(index[arg] for arg in value.args if arg in index),
                    cost_ms=graph.units[node] * self._ms_per_unit,
                    flops=value.flops,
                    expensive=bool(value.flops),
                    transient_bytes=graph.scratch.get(node, 0),
                )
            )
            if slot is not None:
                self._storages.append(self._make_storage(number, graph, node))
        backward, reads = self._at[number, 1], graph.saved[1]
        for node, slot in slots.items():
            is_read = node in reads.first
            self._slots.append(
                Slot(
                    address=slot.address,
                    value=index[node],
                    storage=self._values[index[node]].storage,
                    call=number,
                    label=joint.nodes[node].module,
                    need=backward + reads.demanded[node] if is_read else None,
                    release=backward + max(reads.first[node], reads.last[node]) + 1 if is_read else 0,
                )
            )

    def _make_storage(self, number: int, graph: _Graph, node: int) -> Storage:
        """Return the storage of `node`, a slot of `graph`, in call `number`."""
        value = graph.slots.joint.nodes[node]
        if value.is_copied:
            copied_at = self._at[number, 0] + graph.unsaved.first.get(node, 0)
            return Storage(bytes=value.bytes, allocated_at=copied_at, freed_at=copied_at, label=value.module)
        if value.kind == "input":  # until forward ends, the code outside that owns the input holds it
            end = self._end(number, 0)
            # an input that was not in memory by then is part of the batch
            n_bytes = value.bytes if self._live_bytes[number] >= value.bytes else 0
            return Storage(bytes=n_bytes, allocated_at=end, freed_at=end, label=value.module)
        forward = self._at[number, 0]
        allocated_at = graph.saved[0].allocated_at.get(node, graph.unsaved.allocated_at.get(node, 0))
        freed_at = max(graph.unsaved.last.get(node, allocated_at), allocated_at) + 1
        return Storage(
            bytes=value.bytes, allocated_at=forward + allocated_at, freed_at=forward + freed_at, label=value.module
        )


def _merge_positions(profile: Profile) -> Profile:
    """Return `profile` with positions only where a storage, slot, call or phase begins or ends."""
    end = len(profile.base_bytes)
    bounds = {0, *profile.phases.values()}
    bounds |= {at for storage in profile.storages for at in (storage.allocated_at, storage.freed_at)}
    bounds |= {at for slot in profile.slots for at in (slot.need, slot.release) if at is not None}
    bounds |= {at for call in profile.calls for at in (call.enter, call.exit)}
    cuts = sorted(at for at in bounds if at < end)

    def position(at: int) -> int:
        return bisect.bisect_right(cuts, at) - 1 if at < end else len(cuts)

    base = [max(profile.base_bytes[first:stop]) for first, stop in pairwise([*cuts, end])]
    return replace(
        profile,
        base_bytes=tuple(base),
        gradient_bytes=(0,) * len(base),
        phases={phase: position(at) for phase, at in profile.phases.items()},
        storages=tuple(
            replace(s, allocated_at=position(s.allocated_at), freed_at=position(s.freed_at)) for s in profile.storages
        ),
        slots=tuple(
            replace(
                slot,
                need=None if slot.need is None else position(slot.need),
                release=None if slot.release is None else position(slot.release),
            )
            for slot in profile.slots
        ),
        calls=tuple(replace(call, enter=position(call.enter), exit=position(call.exit)) for call in profile.calls),
    )
