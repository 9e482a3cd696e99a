"""From joint graphs and a recorded step to a profile that is planned as any other."""

import pytest

import lowtide
from joint_graphs import FEW, MANY, masked
from lowtide.errors import RehearsalError
from lowtide.memory.events import Allocate, Event, EventStream, Free, Mark
from lowtide.planner.records import Decisions
from lowtide.planner.simulate.simulator import predict
from lowtide.profiler.compiled_profile import CALL, assembled
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


def test_a_step_that_saves_all_slots_takes_what_they_do() -> None:
    profile = assembled([SLOTS], EventStream((*FORWARD, *TANGENT, *BACKWARD)), 1.0)
    assert profile.graphs == ("key",)
    assert {slot.address for slot in profile.slots} == {"fc#0:0", "#0:0", "drop#0:0", "norm#0:0"}
    assert predict(profile, Decisions()).held_bytes == MANY + MASK + FEW  # seeds are for what is recomputed


def test_what_is_computed_again_is_not_held_and_costs_its_time() -> None:
    profile = assembled([SLOTS], EventStream((*FORWARD, *TANGENT, *BACKWARD)), 1.0)
    found = predict(profile, Decisions(recompute=frozenset({"drop#0:0"})))
    assert found.held_bytes == MANY + 2 * FEW
    assert 0 < found.extra_ms < 1
    with pytest.raises(ValueError, match="no recipe"):
        predict(profile, Decisions(recompute=frozenset({"#0:0"})))  # random numbers


@pytest.mark.parametrize(
    ("graphs", "events", "why"),
    [
        ((), (), 'backend="inductor"'),
        ((SLOTS,), FORWARD, "no backward"),
        ((SLOTS,), (*FORWARD, *BACKWARD, *BACKWARD), "retain_graph"),
    ],
)
def test_steps_that_can_t_be_planned_are_refused_with_why(
    graphs: tuple[JointSlots, ...], events: tuple[Event, ...], why: str
) -> None:
    with pytest.raises(RehearsalError, match=why):
        assembled(graphs, EventStream(events), 1.0)


def test_the_profile_is_the_same_after_a_trip_through_json() -> None:
    profile = assembled([SLOTS], EventStream((*FORWARD, *TANGENT, *BACKWARD)), 1.0)
    assert lowtide.Profile.from_json(profile.to_json()) == profile
