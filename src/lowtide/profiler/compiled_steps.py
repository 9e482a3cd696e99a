"""The profile of a step whose model, or the function around model and loss, torch.compile has compiled as a whole.

Compiled code decides while it is compiled what it saves for backward. So the step is compiled under a partitioner that
does what torch does and notes each joint graph; then it is recorded with a mark at each call of compiled code. The
profile has the graphs' values, slots and costs as that of any other step has those of autograd's graph, on the step's
one axis of positions, and is planned by the same planner.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from lowtide._torch.device_timing import now_ms
from lowtide._torch.joint_graph import JointGraph, JointNode, always_partitioned, partitioning_by, watched_calls
from lowtide.errors import RehearsalError
from lowtide.memory.events import EventStream, Mark, bytes_added
from lowtide.memory.measure import recorder_for
from lowtide.memory.memory_timeline import Timeline
from lowtide.planner.records import Call, Fingerprint, Profile, Slot, Static, Storage, Value
from lowtide.profiler.joint_memory import Half, backward_half, forward_half, upstream, written
from lowtide.profiler.other_memory import in_words, with_others
from lowtide.profiler.preconditions import check
from lowtide.profiler.trial_updates import Updates
from lowtide.runtime.compiled_plan import Partitioner
from lowtide.runtime.fingerprint import fingerprint, place_of, static_bytes, tensors_in
from lowtide.runtime.fingerprint import in_words as shapes_in_words
from lowtide.runtime.joint_slots import JointSlots, Recomputed
from lowtide.state.step_snapshot import Unchanged
from lowtide.utils.interrupts import held_back

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

CALL = "compiled call"
"""Label of the marks at calls of compiled graphs; their data is "enter" or "leave", the graph, and "backward" or not."""
WHOLE = "it is part of compiled code"


@held_back()
def rehearse_compiled(
    model: nn.Module, step: Callable[[Any], Any], batch: Any, *, optimizer: Optimizer | None = None
) -> Profile:
    """The profile of `step(batch)`, which is compiled anew and run three times."""
    check(model, step, batch, optimizer)
    graphs: list[JointSlots] = []
    partitioner = Partitioner()
    partitioner.seen = graphs.append
    with (
        Unchanged(model, batch, optimizer, step) as unchanged,
        Updates(unchanged, model, optimizer) as updates,
        always_partitioned(),
        partitioning_by(partitioner),
    ):
        made_for = fingerprint(model, batch)
        updates.run(batch)
        updates.undo()
        unchanged.rewind()
        static, places = static_bytes(model, batch, unchanged.optimizers)
        with recorder_for(place_of(model)) as recorder:

            def note(what: str, graph: int, is_backward: bool) -> None:
                recorder.mark(CALL, (what, graph, is_backward))

            with watched_calls(note):
                updates.run(batch)
        updates.undo()
        unchanged.rewind()
        began = now_ms(place_of(model))
        updates.step(batch)
        step_ms = now_ms(place_of(model)) - began
    static = with_others(static, places, recorder)
    measured = static.total + Timeline(recorder.stream).peak_bytes
    found = _assembled([*map(_Graph.of, graphs)], recorder.stream, step_ms)
    return replace(
        found,
        fingerprint=made_for,
        static=static,
        measured_plain_peak_bytes=measured,
        given=(shapes_in_words(tensors_in(batch)),),
        notes=(*updates.notes(), *in_words(model, static)),
    )


@dataclass(slots=True)
class _GraphCall:
    """One call of a graph: forward, and its backward if that was run. Events are indices in the stream."""

    graph: int
    forward: tuple[int, int]
    backward: tuple[int, int] | None = None


def _calls(stream: EventStream) -> list[_GraphCall]:
    found, entered = list[_GraphCall](), list[int]()
    for at, event in enumerate(stream.events):
        if type(event) is not Mark or event.label != CALL:
            continue
        what, graph, is_backward = event.data
        if what == "enter":
            entered.append(at)
            continue
        span = (entered.pop(), at)
        if not is_backward:
            found.append(_GraphCall(graph, span))
            continue
        waiting = [call for call in found if call.graph == graph and call.backward is None]
        if waiting:  # the last forward is the first that backward comes to
            waiting[-1].backward = span
    return found


@dataclass(frozen=True, slots=True)
class _Graph:
    """A joint graph: torch's own partition of it, and that with all slots saved."""

    slots: JointSlots
    plain: tuple[Half, Half]
    saved: tuple[Half, Half]
    unsaved: Half
    """Forward where nothing is saved."""

    @classmethod
    def of(cls, slots: JointSlots) -> _Graph:
        joint = slots.joint
        plain, saved = slots.as_torch(), slots.without(())
        return cls(
            slots,
            (forward_half(joint, plain), backward_half(joint, plain)),
            (forward_half(joint, saved), backward_half(joint, saved)),
            forward_half(joint, Recomputed(frozenset(), frozenset())),
        )

    @property
    def plain_bytes(self) -> int:
        """What torch saves of it, but for inputs and outputs."""
        nodes = self.slots.joint.nodes
        return sum(nodes[root].bytes for root in self.slots.roots)

    def is_there(self, node: int, phase: int, at: int) -> bool:
        """Return True if the slot of `node` is in memory at a position of forward (0) or backward (1), if saved."""
        half = self.saved[phase]
        if phase == 0:
            return at >= half.born[node]
        return node in half.last and at <= half.last[node]


class _Axis:
    """Positions of the step: each is a stretch of events, or one call inside of a compiled graph."""

    def __init__(self, stream: EventStream, calls: Sequence[_GraphCall], graphs: Sequence[_Graph]) -> None:
        self.base: list[int] = []
        """For each position the bytes that no slot holds."""
        self.at: dict[tuple[int, int], int] = {}
        """For each call of a graph, and 0 for its forward or 1 for its backward, the first position."""
        levels = list(accumulate(map(bytes_added, stream.events)))
        spans = [(call.forward, number, 0) for number, call in enumerate(calls)]
        spans += [(call.backward, number, 1) for number, call in enumerate(calls) if call.backward]
        held = done = 0
        for (enter, leave), number, phase in sorted(spans):
            graph = graphs[calls[number].graph]
            self.base.append(max(levels[done : enter + 1]) - held)
            self.at[number, phase] = len(self.base)
            below = levels[enter] - held
            if phase:
                held -= graph.plain_bytes
            # what inductor's order, its fusions and scratch memory make of it, for all positions alike
            more = max(levels[enter : leave + 1]) - levels[enter] - max(graph.plain[phase].levels)
            nodes = graph.slots.joint.nodes
            saved = [slot.node for slot in graph.slots.slots if slot.node in graph.saved[1].last]
            given = sum(nodes[node].bytes for node in saved) if phase else 0
            for at, level in enumerate(graph.saved[phase].levels):
                there = sum(nodes[node].bytes for node in saved if graph.is_there(node, phase, at))
                self.base.append(below + given + level - there + more)
            if not phase:
                held += graph.plain_bytes
            done = leave
        self.base.append(max(levels[done:]) - held)


def _assembled(graphs: Sequence[_Graph], stream: EventStream, step_ms: float) -> Profile:
    calls = _calls(stream)
    if not calls or {call.graph for call in calls} != {*range(len(graphs))}:
        raise RehearsalError(
            f"{len(graphs)} graphs were compiled for the step, and {len({call.graph for call in calls})} of them ran in "
            "the next one: let it do the same work each time that it is given the same batch."
        )
    calls = [call for call in calls if call.backward is not None]
    if not calls:
        raise RehearsalError("the step ran no backward through compiled code: call loss.backward() inside of it.")
    axis = _Axis(stream, calls, graphs)
    units = [_units(graph.slots.joint.nodes) for graph in graphs]
    ms = step_ms / (sum(sum(units[call.graph]) for call in calls) or 1.0)
    values, storages, slots, records = list[Value](), list[Storage](), list[Slot](), list[Call]()
    for number, call in enumerate(calls):
        graph = graphs[call.graph]
        forward, backward = axis.at[number, 0], axis.at[number, 1]
        joint, half = graph.slots.joint, graph.saved[0]
        by_node = {slot.node: slot for slot in graph.slots.slots}
        order = upstream(joint, by_node)
        made = written(joint, order, by_node)
        index: dict[int, int] = {}
        for node in order:
            found, slot = joint.nodes[node], by_node.get(node)
            storage = None
            if slot is not None:
                storage, born = len(storages), half.born.get(node, graph.unsaved.born.get(node, 0))
                dies = max(graph.unsaved.last.get(node, born), born) + 1
                storages.append(
                    Storage(bytes=found.bytes, born=forward + born, dies=forward + dies, label=found.module)
                )
            index[node] = len(values)
            values.append(
                Value(
                    storage=storage,
                    bytes=found.bytes if node in made else 0,
                    node=found.target,
                    recipe=None if slot is not None and slot.is_kept else found.target,
                    needs=tuple(index[arg] for arg in found.args if joint.nodes[arg].kind != "input"),
                    cost_ms=units[call.graph][node] * ms,
                    flops=found.flops,
                    expensive=bool(found.flops),
                )
            )
        for slot in graph.slots.slots:
            node = slot.node
            is_read = node in graph.saved[1].first
            slots.append(
                Slot(
                    address=slot.address,
                    value=index[node],
                    storage=values[index[node]].storage,
                    call=number,
                    label=joint.nodes[node].module,
                    need=backward + graph.saved[1].first[node] if is_read else None,
                    release=backward + graph.saved[1].last[node] + 1 if is_read else 0,
                )
            )
        exit_ = forward + len(half.levels)
        records.append(
            Call(id=f"compiled graph {call.graph}#{number}", cls="", parent=None, enter=forward, exit=exit_, refused=WHOLE)
        )
    ends = [axis.at[number, 1] + len(graphs[call.graph].saved[1].levels) for number, call in enumerate(calls)]
    backward = min(axis.at[number, 1] for number in range(len(calls)))
    found = Profile(
        fingerprint=Fingerprint(torch="", model="", batch="", device=""),
        static=Static(),
        base_bytes=tuple(axis.base),
        gradient_bytes=(0,) * len(axis.base),
        phases={"forward": axis.at[0, 0], "backward": backward, "after backward": max(ends)},
        storages=tuple(storages),
        values=tuple(values),
        slots=tuple(slots),
        calls=tuple(records),
        step_ms=step_ms,
        measured_plain_peak_bytes=None,
        graphs=tuple(graph.slots.joint.key for graph in graphs),
    )
    return _coarser(found)


BYTES_PER_FLOP = 12.0
"""FLOPs that take as long as one byte that a kernel of its own writes; a fused one takes a quarter."""


def _units(nodes: Sequence[JointNode]) -> list[float]:
    """What each call costs, in FLOPs of a matrix product."""
    found = []
    for node in nodes:
        own = 0.0 if node.kind in ("pointwise", "view", "input") else 1.0
        found.append(node.flops + BYTES_PER_FLOP * (own + 0.25 * (node.kind not in ("view", "input"))) * node.bytes)
    return found


def _coarser(profile: Profile) -> Profile:
    """`profile` with positions only where something begins or ends."""
    end = len(profile.base_bytes)
    cuts = {0, *profile.phases.values()}
    cuts |= {at for storage in profile.storages for at in (storage.born, storage.dies)}
    cuts |= {at for slot in profile.slots for at in (slot.need, slot.release) if at is not None}
    cuts |= {at for call in profile.calls for at in (call.enter, call.exit)}
    cuts = sorted(at for at in cuts if at < end)

    def position(at: int) -> int:
        return bisect.bisect_right(cuts, at) - 1 if at < end else len(cuts)

    base = [max(profile.base_bytes[first:stop]) for first, stop in pairwise([*cuts, end])]
    return replace(
        profile,
        base_bytes=tuple(base),
        gradient_bytes=(0,) * len(base),
        phases={phase: position(at) for phase, at in profile.phases.items()},
        storages=tuple(replace(s, born=position(s.born), dies=position(s.dies)) for s in profile.storages),
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
