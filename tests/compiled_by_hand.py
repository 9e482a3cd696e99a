"""A recorded step of a compiled graph, and a plan for it, made without compiling."""

from dataclasses import replace

from torch import Tensor, nn

from joint_graphs import MANY, masked
from lowtide.memory.events import Allocate, Event, EventStream, Free, Mark
from lowtide.planner.planning import find_smallest_plan, with_peak
from lowtide.planner.records import Plan
from lowtide.profiler.compiled_profile import CALL, assembled
from lowtide.runtime.fingerprint import fingerprint
from lowtide.runtime.joint_slots import JointSlots

SLOTS = JointSlots(masked(), frozenset({3, 5}))
MASK = MANY // 4


def call(is_backward: bool, *inside: Event) -> tuple[Event, ...]:
    return Mark(CALL, ("enter", 0, is_backward, ())), *inside, Mark(CALL, ("leave", 0, is_backward, ()))


def allocate(block: int, n_bytes: int) -> Allocate:
    return Allocate(block, n_bytes, 4096 * block, "op")


FORWARD = call(False, allocate(1, MANY), allocate(2, MASK), allocate(3, MANY), allocate(4, MANY), Free(1, MANY))
"""The product, which goes, the mask, the normalised tensor and the output."""
TANGENT = (allocate(5, MANY),)
BACKWARD = call(True, allocate(6, MANY), Free(2, MASK), Free(5, MANY), allocate(7, MANY), Free(6, MANY), Free(3, MANY))
STEP = EventStream((*FORWARD, *TANGENT, *BACKWARD))


def plan_for(model: nn.Module, batch: Tensor) -> Plan:
    """Plan for `model` and a graph that it does not have."""
    profile = replace(assembled([SLOTS], STEP, 1.0), fingerprint=fingerprint(model, batch))
    made = find_smallest_plan(profile)
    predicted = with_peak(made.predicted, made.plain.peak_bytes - 1)  # as of a plan that recompiles
    return replace(made, budget_bytes=1, recompute={"drop#0:0": "aten.op"}, predicted=predicted)
