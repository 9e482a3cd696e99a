"""From joint graphs and a recorded step to a profile that is planned as any other."""

from collections import Counter
from dataclasses import replace

import pytest

import lowtide
from compiled_by_hand import BACKWARD, FORWARD, MASK, SLOTS, STEP, TANGENT, allocate, call
from joint_graphs import FEW, MANY, masked, node
from lowtide.errors import RehearsalError
from lowtide.memory.events import Event, EventStream, Free, Mark
from lowtide.memory.memory_timeline import Timeline
from lowtide.planner.records import Decisions
from lowtide.planner.simulate.simulator import predict
from lowtide.profiler.compiled_profile import CALL, assembled, compute_peak_with_calls, count_held_after_calls
from lowtide.runtime.joint_slots import JointSlots


def sends() -> JointSlots:
    graph = masked()
    graph.nodes.append(node("extern", (9,), root=10, backward=True, target="_c10d_functional.all_reduce"))
    return JointSlots(graph, SLOTS.plain)


def test_a_step_that_saves_all_slots_takes_what_they_do() -> None:
    profile = assembled([SLOTS], STEP, 1.0)
    assert profile.graphs == ("key",)
    assert {slot.address for slot in profile.slots} == {"input#0:0", "fc#0:0", "#0:0", "drop#0:0", "norm#0:0"}
    assert predict(profile, Decisions()).held_bytes == MANY + MASK + FEW  # seeds are for what is recomputed


def test_an_input_from_which_values_are_recomputed_is_held_for_them() -> None:
    """The code that calls a block would free its input. Images are copied for it, since convolutions store them so."""
    held = allocate(8, MANY)

    def freed_bytes(graph: JointSlots, *before: Event) -> int:
        profile = assembled([graph], EventStream((*before, *STEP)), 1.0)
        freed = predict(profile, Decisions()).held_bytes
        return freed - predict(profile, Decisions(recompute=frozenset({"fc#0:0"}))).held_bytes

    copied = masked()
    copied.nodes[0].is_copied = True
    assert freed_bytes(SLOTS) == MANY  # the batch's
    assert freed_bytes(SLOTS, held) == 0
    assert freed_bytes(JointSlots(copied, SLOTS.plain)) == 0


def test_bytes_that_torchs_own_partition_saves_by_its_order_are_not_taken_from_a_plans_peak() -> None:
    """Results that inductor writes over saved tensors in the plain step may need memory of their own where these are
    not saved.
    """
    in_place = EventStream((*FORWARD, *TANGENT, *call(True)))
    recompute = Decisions(recompute=frozenset({"drop#0:0"}))
    found = predict(assembled([SLOTS], in_place, 1.0), recompute)
    assert found.peak_bytes == predict(assembled([SLOTS], STEP, 1.0), recompute).peak_bytes


def test_recorded_memory_that_no_value_accounts_for_counts_only_where_the_peak_is_not_explained_without_it() -> None:
    """A block in forward, freed at once: after the peak, and at it."""

    def base_bytes(*forward: Event) -> tuple[int, ...]:
        return assembled([SLOTS], EventStream((*forward, *TANGENT, *BACKWARD)), 1.0).base_bytes

    block = (allocate(8, MANY), Free(8, MANY))
    assert base_bytes(*FORWARD[:-1], *block, FORWARD[-1]) == base_bytes(*FORWARD)
    assert sum(base_bytes(*FORWARD[:-2], *block, *FORWARD[-2:])) > sum(base_bytes(*FORWARD))


def test_the_peak_with_other_compiled_calls_has_the_loss_of_the_step() -> None:
    plain = Timeline(STEP).peak_bytes
    assert (
        compute_peak_with_calls(STEP, EventStream((*FORWARD, *BACKWARD))) == plain
    )  # the gradient of the loss is the step's
    larger = (*FORWARD, *call(True, allocate(9, 5 * MANY)))
    assert compute_peak_with_calls(STEP, EventStream(larger)) == 3 * MANY + MASK + 6 * MANY - MANY
    assert compute_peak_with_calls(STEP, EventStream(FORWARD)) is None


def test_graphs_that_ran_in_earlier_steps_alone_do_not_hinder_a_comparison_of_calls() -> None:
    """A model of transformers is compiled again after its first call, which sets the kind of its problem or loss."""
    marks = iter([(where, 1, is_backward, ()) for is_backward in (False, True) for where in ("enter", "leave")])
    later = tuple(Mark(CALL, next(marks)) if isinstance(event, Mark) else event for event in STEP)
    assert compute_peak_with_calls(EventStream(later), STEP) == Timeline(STEP).peak_bytes


def test_a_batch_that_backward_frees_is_free_for_later_calls_although_the_trial_calls_hold_theirs() -> None:
    """The trial calls run on copies, which are held until the last one ends."""
    batch, gradient = -1, allocate(8, MANY)
    kept = [*BACKWARD[:-1], Free(batch, 2 * MANY), BACKWARD[-1]]
    rest = [Free(block, MANY) for block in (4, 7)]
    once = [*FORWARD, *TANGENT, *kept, *rest]
    trial = EventStream((*FORWARD, *TANGENT, *BACKWARD))
    step = EventStream((*once, gradient, *FORWARD, *TANGENT, *BACKWARD))
    assert compute_peak_with_calls(step, trial) == Timeline(EventStream(once)).peak_bytes
    held = EventStream((*FORWARD, *TANGENT, *BACKWARD, *rest, gradient, *FORWARD, *TANGENT, *BACKWARD))
    frees = EventStream(tuple(once))
    assert compute_peak_with_calls(held, frees) == Timeline(held).peak_bytes


def test_blocks_that_no_call_frees_are_held_by_the_step() -> None:
    assert count_held_after_calls(STEP) == Counter({MANY: 2})  # the output, and what backward returns


def test_what_is_computed_again_is_not_held_and_costs_its_time() -> None:
    profile = assembled([SLOTS], STEP, 1.0)
    found = predict(profile, Decisions(recompute=frozenset({"drop#0:0"})))
    assert found.held_bytes == MANY + 2 * FEW
    assert 0 < found.extra_ms < 1
    with pytest.raises(ValueError, match="no recipe"):
        predict(profile, Decisions(recompute=frozenset({"#0:0"})))  # random numbers


def test_graphs_with_equal_addresses_are_told_apart_and_calls_of_one_graph_are_not() -> None:
    other = JointSlots(replace(masked(), key="other"), SLOTS.plain)
    second = (Mark(CALL, _of(1, event.data)) if type(event) is Mark else event for event in STEP.events)
    profile = assembled([SLOTS, other], EventStream((*STEP.events, *second)), 1.0)
    assert {slot.address.partition("/")[0] for slot in profile.slots} == {"key", "other"}
    twice = assembled([SLOTS], EventStream((*STEP.events, *STEP.events)), 1.0)
    assert {Counter(slot.address for slot in twice.slots)[slot.address] for slot in twice.slots} == {2}


def _of(number: int, data: object) -> tuple[object, ...]:
    """Return the data of a mark, for another graph."""
    assert isinstance(data, tuple)
    return data[0], number, *data[2:]


@pytest.mark.parametrize(
    ("graphs", "events", "why"),
    [
        ((), (), 'backend="inductor"'),
        ((SLOTS,), FORWARD, "no backward"),
        ((sends(),), STEP.events, r"sends to other processes \(_c10d_functional.all_reduce\)"),
        ((SLOTS,), (*FORWARD, *BACKWARD, *BACKWARD), "retain_graph"),
    ],
)
def test_steps_that_can_t_be_planned_are_refused_with_why(
    graphs: tuple[JointSlots, ...], events: tuple[Event, ...], why: str
) -> None:
    with pytest.raises(RehearsalError, match=why):
        assembled(graphs, EventStream(events), 1.0)


def test_the_profile_is_the_same_after_a_trip_through_json() -> None:
    profile = assembled([SLOTS], STEP, 1.0)
    assert lowtide.Profile.from_json(profile.to_json()) == profile
