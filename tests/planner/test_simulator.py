"""Peaks by whole numbers worked out by hand, and any step against the reference that walks it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import LowtideError
from lowtide.planner import predict
from lowtide.planner.planning import with_peak
from lowtide.planner.records import Decisions, Profile, Value
from lowtide.planner.simulate.assignment import KEPT, REPLAYED, assign
from lowtide.planner.simulate.recompute_cost import compute_recompute_cost
from lowtide.planner.simulate.recompute_segments import combine_demands
from lowtide.planner.simulate.simulator import Simulator
from planner import reference
from planner.profiles import Tape, chain, profiles, random_decisions


def usage(profile: Profile, recompute: list[str] | None = None, replay: list[str] | None = None) -> list[int]:
    simulator = Simulator(profile)
    decisions = Decisions(recompute=frozenset(recompute or ()), replay=frozenset(replay or ()))
    return [int(level) for level in simulator.sweep(simulator.choice(decisions)).usage]


def reference_ms(profile: Profile, decisions: Decisions) -> float:
    step = reference.ReferenceStep(profile, decisions)
    step.usage()
    return step.extra_ms


def inner(*blocks: int) -> frozenset[str]:
    """Addresses of what the blocks of `chain(inner=1)` make inside."""
    return frozenset(f"blocks.{block}#0:1" for block in blocks)


# --- a chain of blocks: x0 -> h0 -> x1 -> h1 -> x2 ... -> loss; x has 10 bytes, h 40, the loss 1


@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_keeping_everything_peaks_at_the_loss(blocks: int) -> None:
    prediction = predict(chain(blocks, inner=1), Decisions())
    assert prediction.peak_bytes == 10 * (blocks + 1) + 40 * blocks + 1
    assert prediction.held_bytes == 10 * (blocks + 1) + 40 * blocks
    assert prediction.peak_position == 2 * blocks + 1
    assert (prediction.extra_ms, prediction.extra_flops) == (0, 0)


@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_recomputing_all_insides_leaves_the_chain_and_one_block(blocks: int) -> None:
    prediction = predict(chain(blocks, inner=1), Decisions(recompute=inner(*range(blocks))))
    assert prediction.peak_bytes == 10 * (blocks + 1) + 40
    assert prediction.held_bytes == 10 * (blocks + 1)
    assert prediction.extra_ms == blocks


def test_dropping_early_blocks_saves_what_dropping_late_ones_does_not() -> None:
    profile = chain(4, inner=1)
    early, late = (predict(profile, Decisions(recompute=inner(*blocks))) for blocks in ((0, 1), (2, 3)))
    assert early.held_bytes == late.held_bytes == 5 * 10 + 2 * 40
    assert early.extra_ms == late.extra_ms
    assert early.peak_bytes == 5 * 10 + 2 * 40 + 1  # at the loss
    assert late.peak_bytes == 5 * 10 + 3 * 40  # in the forward of the last block, which frees nothing that is held


def test_static_memory_and_gradients_count() -> None:
    tape = Tape(static_bytes=1000)
    with tape.call("model#0"):
        x = tape.op(10)
        y = tape.op(20, x, saves=[x], gradient=7)
        tape.op(1, y, saves=[y], gradient=30)
    prediction = predict(tape.profile(), Decisions())
    # Backward frees y before it reads x; by then both gradients are there.
    assert usage(tape.profile()) == [10, 30, 31, 60, 47, 37, 37]
    assert prediction.peak_bytes == 1060
    assert {name: size for name, size in prediction.parts.items() if size} == {
        "parameters": 1000,
        "gradients": 30,
        "activations": 30,
    }


def test_the_peak_is_split_by_category() -> None:
    tape = Tape(static_bytes=5)
    with tape.call("model#0"):
        x = tape.op(10)
        y = tape.op(20, x, saves=[x], recipe="gelu", scratch=3)
        logits = tape.op(100, y, saves=[y], category="loss head", spike=500)
        tape.op(1, logits, saves=[logits])
    prediction = predict(tape.profile(), Decisions(recompute=frozenset({"model#0:1"})))
    assert {name: size for name, size in prediction.parts.items() if size} == {
        "parameters": 5,
        "activations": 30,
        "loss head": 100,
        "temporaries": 500,
    }
    at_recompute = predict(replace(tape.profile(), base_bytes=(0,) * 9), Decisions(recompute=frozenset({"model#0:1"})))
    assert at_recompute.parts["recomputed"] == 0
    assert at_recompute.peak_bytes == 5 + 130


# --- recomputes


def two_readers(first_saved: bool = True) -> Tape:
    """X (10 bytes) makes y (20), which two ops save one after the other."""
    tape = Tape()
    with tape.call("model#0"):
        x = tape.op(10)
        y = tape.op(20, x, saves=[x] if first_saved else [], recipe="gelu", ms=2.0)
        z = tape.op(1, y, saves=[y])
        tape.op(1, z, y, saves=[y])
    return tape


def test_a_chain_holds_what_it_begins_with_while_its_end_is_there() -> None:
    """X (10 bytes) makes y (20), that makes z (30). Backward reads x first, then y, then z twice."""
    tape = Tape()
    with tape.call("model#0"):
        x = tape.op(10)
        y = tape.op(20, x, recipe="gelu")
        z = tape.op(30, y, recipe="gelu")
        tape.op(1, z, saves=[z])
        tape.op(1, z, saves=[z])
        tape.op(1, y, saves=[y])
        tape.op(1, x, saves=[x])
    recomputed = usage(tape.profile(), ["model#0:0", "model#0:1", "model#0:2"])
    # y waits for z, and x for both readers of z: whoever claims z could ask for it again.
    assert recomputed[-8:-4] == [10, 30, 10 + 20 + 30, 10 + 30]


def test_a_value_is_kept_if_one_of_its_slots_is() -> None:
    profile = two_readers().profile()
    for addresses in (["model#0:1"], ["model#0:2"]):
        assert usage(profile, addresses) == usage(profile)
    assert predict(profile, Decisions(recompute=frozenset({"model#0:1"}))).extra_ms == 0


def test_a_value_is_recomputed_once_and_waits_for_all_its_readers() -> None:
    profile = two_readers().profile()
    assert usage(profile, ["model#0:1", "model#0:2"]) == [10, 30, 31, 32, 30, 30, 10, 0, 0]
    assert predict(profile, Decisions(recompute=frozenset({"model#0:1", "model#0:2"}))).extra_ms == 2.0


def test_dropping_an_unread_tensor_costs_nothing() -> None:
    profile = two_readers().profile()
    unread = replace(profile, slots=tuple(replace(slot, need=None) for slot in profile.slots))
    prediction = predict(unread, Decisions(recompute=frozenset({"model#0:1", "model#0:2"})))
    assert prediction.extra_ms == 0
    assert prediction.held_bytes == 10


def test_a_kept_operand_is_held_until_values_computed_from_it_are_released() -> None:
    """X is saved by a later op, so that its own reader is done first: the recompute of y holds it on."""
    tape = Tape()
    with tape.call("model#0"):
        x = tape.op(10)
        y = tape.op(20, x, recipe="gelu")
        z = tape.op(1, y, saves=[y])
        tape.op(1, z, x, saves=[x])
    profile = tape.profile()
    #                                    forward          backward: x read, y read
    assert usage(profile) == [10, 30, 31, 32, 30, 20, 0, 0, 0]
    assert usage(profile, ["model#0:0"]) == [10, 30, 31, 12, 10, 30, 0, 0, 0]


def test_an_unsaved_value_is_scratch_memory_of_the_recompute() -> None:
    tape = Tape()
    with tape.call("model#0"):
        x = tape.op(10)
        passing = tape.op(50, x, saves=[x], recipe="add", ms=1.0)
        y = tape.op(20, passing, recipe="gelu", ms=2.0, scratch=4)
        tape.op(1, y, saves=[y])
    assert usage(tape.profile(), ["model#0:1"])[4] == 10 + 20 + 50 + 4
    assert predict(tape.profile(), Decisions(recompute=frozenset({"model#0:1"}))).extra_ms == 3.0


def test_a_chain_of_recomputes_lets_go_as_it_is_read_backwards() -> None:
    """h1 -> h2 -> h3, 40 bytes each and all from x: the first read needs all three, then each frees one."""
    profile = chain(1, inner=3)
    addresses = [f"blocks.0#0:{ordinal}" for ordinal in (1, 2, 3)]
    assert usage(profile, addresses)[7:11] == [10 + 120, 10 + 80, 10 + 40, 10]
    assert predict(profile, Decisions(recompute=frozenset(addresses))).extra_ms == 3


@pytest.mark.parametrize(("scratch", "most"), [((5, 40, 3), 3), ((5, 50, 3), 10), ((0, 0, 9), 9)])
def test_recomputes_at_one_position_run_one_after_the_other(scratch: tuple[int, int, int], most: int) -> None:
    """h1 -> h2 -> h3, 40 bytes each, all made again for the first read: h3 is not there yet when h2 is made."""
    tape = Tape()
    with tape.call("model#0"):
        current = tape.op(10)
        for bytes_ in scratch:
            current = tape.op(40, current, saves=[current], recipe="gelu", scratch=bytes_)
        tape.op(1, current, saves=[current])
    assert usage(tape.profile(), ["model#0:1", "model#0:2", "model#0:3"])[5:7] == [10 + 120 + most, 10 + 80]


@pytest.mark.parametrize(("w_first", "most"), [(True, 10 + 20 + 20 + 50 + 4), (False, 10 + 50 + 20 + 30)])
def test_intermediates_wait_for_operands_recomputed_after_them(w_first: bool, most: int) -> None:
    """Y needs `passing` and w, which is recomputed with 30 bytes of scratch memory."""
    tape = Tape()
    with tape.call("model#0"):
        x = tape.op(10)
        w = tape.op(20, x, saves=[x], recipe="gelu", scratch=30)
        passing = tape.op(50, x, recipe="add")
        operands = (passing, w) if w_first else (w, passing)  # the last is made first
        y = tape.op(20, *operands, saves=[w], recipe="mul", scratch=4)
        tape.op(1, y, saves=[y])
    assert usage(tape.profile(), ["model#0:1", "model#0:2"])[5] == most


@pytest.mark.parametrize("n", [1, 2, 5])
def test_of_a_chain_that_passes_two_are_there_at_once(n: int) -> None:
    """X -> n values of 50 bytes -> y: each is gone when the next one is there."""
    tape = Tape()
    with tape.call("model#0"):
        current = x = tape.op(10)
        for _ in range(n):
            current = tape.op(50, current, saves=[x] if current is x else [], recipe="mul", ms=1.0)
        y = tape.op(50, current, recipe="tanh", ms=1.0)
        tape.op(1, y, saves=[y])
    profile = tape.profile()
    assert usage(profile, ["model#0:1"])[n + 3] == 10 + 50 + 50
    assert predict(profile, Decisions(recompute=frozenset({"model#0:1"}))).extra_ms == n + 1


def test_an_unsaved_value_is_recomputed_once_for_all_readers() -> None:
    """Y and z are both made from `passing`: at the read of z it is made, and it waits for the read of y."""
    tape = Tape()
    with tape.call("model#0"):
        x = tape.op(10)
        passing = tape.op(50, x, saves=[x], recipe="add", ms=1.0)
        y = tape.op(20, passing, recipe="gelu", ms=2.0)
        z = tape.op(30, passing, recipe="gelu", ms=2.0)
        tape.op(1, y, saves=[y])
        tape.op(1, z, saves=[z])
    profile = tape.profile()
    assert usage(profile, ["model#0:1", "model#0:2"])[6:9] == [10 + 50 + 30, 10 + 50 + 20, 10]
    assert predict(profile, Decisions(recompute=frozenset({"model#0:1", "model#0:2"}))).extra_ms == 5.0


# --- replays


def block_with_spike() -> Profile:
    """Two blocks of x -> h1 -> h2 -> x, 10 and 40 bytes; making h2 allocates 100 more for a moment."""
    tape = Tape()
    with tape.call("model#0", refused="the model itself"):
        x = tape.op(10)
        for block in range(2):
            with tape.call(f"blocks.{block}#0", x, ms=5.0, flops=50):
                h1 = tape.op(40, x, saves=[x])
                h2 = tape.op(40, h1, saves=[h1], spike=100)
                x = tape.op(10, h2, saves=[h2])
        tape.op(1, x, saves=[x])
    return tape.profile()


def test_a_replay_brings_a_block_back_at_its_first_read() -> None:
    profile = block_with_spike()
    replayed = usage(profile, replay=["blocks.0#0"])
    # Forward: of block 0 only its input stays.
    assert replayed[:8] == [10, 50, 190, 60, 60, 200, 110, 111]
    # Backward of block 0, which only holds x0: forward again at h2's read (h1, h2 and the spike), then h1 and h2 are
    # let go of one by one.
    assert replayed[12:16] == [10 + 180, 10 + 40, 10, 0]
    prediction = predict(profile, Decisions(replay=frozenset({"blocks.0#0"})))
    assert (prediction.extra_ms, prediction.extra_flops) == (5.0, 50)


def test_a_replay_allocates_all_that_its_forward_had_beyond_what_was_there() -> None:
    """8 bytes at each position of forward; when block 0 began, 3 of them were there."""
    profile = block_with_spike()
    levels = tuple(level + 8 * (position < 8) for position, level in enumerate(profile.base_bytes))
    known = (profile.calls[0], replace(profile.calls[1], begins_at=3), profile.calls[2])
    before, after = (replace(profile, base_bytes=levels, calls=calls) for calls in (profile.calls, known))
    assert usage(before, replay=["blocks.0#0"])[12] == 10 + 180
    assert usage(after, replay=["blocks.0#0"])[12] == 10 + 180 + 5


def test_inside_a_replay_a_recompute_is_not_caught() -> None:
    """With h2 recomputed from h1, the replay has to leave h1 alone."""
    tape = Tape()
    with tape.call("model#0", refused="the model itself"):
        x = tape.op(10)
        with tape.call("block#0", x, ms=5.0):
            h1 = tape.op(30, x, saves=[x])
            h2 = tape.op(40, h1, saves=[h1], recipe="gelu", ms=1.0)
            x = tape.op(10, h2, saves=[h2])
    profile = tape.profile()
    # The forward again: h1 (caught), h2 and the next x at once are 80 bytes; then h2 is recomputed, in less.
    assert usage(profile, ["block#0:2"], ["block#0"])[4:8] == [10 + 80, 10 + 30, 10, 0]
    assert (
        predict(profile, Decisions(recompute=frozenset({"block#0:2"}), replay=frozenset({"block#0"}))).extra_ms == 6.0
    )


def test_a_saved_tensor_that_is_the_calls_input_follows_the_input() -> None:
    tape = Tape()
    with tape.call("model#0", refused="the model itself"):
        w = tape.op(5)
        x = tape.op(10, w, saves=[w], recipe="norm", ms=1.0)
        with tape.call("block#0", x, ms=5.0):
            h = tape.op(40, x, saves=[x])
            tape.op(1, h, saves=[h])
    profile = tape.profile()
    assert predict(profile, Decisions(replay=frozenset({"block#0"}))).held_bytes == 15
    recomputed = predict(profile, Decisions(recompute=frozenset({"block#0@0"}), replay=frozenset({"block#0"})))
    assert recomputed.held_bytes == 5
    assert recomputed.extra_ms == 6.0


def nested(groups: int = 3, blocks: int = 2, *, state: int = 0) -> Profile:
    """Groups of blocks of x -> h -> x with 10 and 40 bytes; the ops of `chain(inner=1)`, in calls of calls."""
    tape = Tape()
    with tape.call("model#0", refused="the model itself"):
        x = tape.op(10)
        for group in range(groups):
            with tape.call(f"groups.{group}#0", x, ms=10.0):
                for block in range(blocks):
                    with tape.call(f"groups.{group}.{block}#0", x, ms=5.0, state=state):
                        h = tape.op(40, x, saves=[x])
                        x = tape.op(10, h, saves=[h])
        tape.op(1, x, saves=[x])
    return tape.profile()


def test_a_replay_inside_a_replay_leaves_its_input_to_the_outer_one() -> None:
    profile = nested()
    outer = [f"groups.{group}#0" for group in range(3)]
    inner = [f"groups.{group}.{block}#0" for group in range(3) for block in range(2)]
    both = usage(profile, replay=outer + inner)
    # Forward: the inputs of the groups so far, and x and h of the block that runs.
    assert both[:14] == [10, 50, 60, 60, 60, 60, 70, 70, 70, 70, 80, 80, 80, 41]
    # At the read of the last h the last group runs again for the x between its blocks (10, and h and the next x for a
    # moment), then the last block for its h. At that of x of its first block nothing more has to run.
    prediction = predict(profile, Decisions(replay=frozenset(outer + inner)))
    assert prediction.extra_ms == 3 * 10.0 + 6 * 5.0
    assert prediction.held_bytes == 40
    single = predict(profile, Decisions(replay=frozenset(inner)))
    assert single.held_bytes == 70
    assert prediction.peak_bytes < single.peak_bytes


def test_a_replay_inside_a_replay_keeps_its_state() -> None:
    outer = [f"groups.{group}#0" for group in range(3)]
    inner = [f"groups.{group}.{block}#0" for group in range(3) for block in range(2)]
    without = usage(nested(), replay=outer + inner)[:14]
    # The first block is called at position 1; each takes two positions.
    more = [0, 3, 3, 6, 6, 9, 9, 12, 12, 15, 15, 18, 18, 18]
    assert usage(nested(state=3), replay=outer + inner)[:14] == [a + b for a, b in zip(without, more, strict=True)]
    assert usage(nested(state=3), replay=outer) == usage(nested(), replay=outer)


def with_results(profile: Profile, *blocks: int) -> Profile:
    """`profile`, a chain, with the results of `blocks` brought back by running them forward, for 6 ms each."""
    entries = {slot.call: slot.value for slot in profile.slots if slot.is_input}
    calls = list(profile.calls)
    for block in blocks:
        calls[block + 1] = replace(calls[block + 1], result_value=entries[block + 2], advance_ms=6.0, advance_flops=10)
    return replace(profile, calls=tuple(calls))


def test_an_advance_makes_the_input_of_the_next_replay() -> None:
    """Blocks 0 to 3 of x0 -> h0 -> x1 ...: x1, x2 and x3 are not kept, but made from x0 one after the other, once."""
    profile = with_results(chain(4, inner=1), 0, 1, 2)
    ids = [f"blocks.{block}#0" for block in range(4)]
    decisions = Decisions(replay=frozenset(ids), advance=frozenset(ids[:3]))
    prediction = predict(profile, decisions)
    assert prediction.held_bytes == 10 + 10  # x0, and x4, which the loss saves
    assert (prediction.extra_ms, prediction.extra_flops) == (4 * 5.0 + 3 * 6.0, 4 * 9 + 3 * 10)
    simulator = Simulator(profile)
    levels = [int(level) for level in simulator.sweep(simulator.choice(decisions)).usage]
    # At the read of h3: x0, x1, x2 and x3 are there; then h3 and x4 are made in the replay of block 3.
    assert levels[11] == 40 + 50
    # At that of h2 block 2 runs again. What is above x2 is gone.
    assert levels[13] == 30 + 50


def test_an_advance_alone_drops_what_others_save() -> None:
    """The next block saves x1 itself: made at the first read of it, from x0, with h0 for a moment."""
    profile = with_results(chain(2, inner=1), 0)
    decisions = Decisions(advance=frozenset({"blocks.0#0"}))
    simulator = Simulator(profile)
    levels = [int(level) for level in simulator.sweep(simulator.choice(decisions)).usage]
    plain = usage(profile)
    assert levels[5] == plain[5] - 10  # at the loss
    assert levels[8] == plain[8] + 40  # at the read of x1: h0 is there twice
    assert simulator.predict(decisions).extra_ms == 6.0


def test_a_result_kept_inside_a_call_is_not_advanced() -> None:
    tape = Tape()
    with tape.call("model#0", refused="the model itself"):
        x = tape.op(10)
        with tape.call("block#0", x):
            y = tape.op(20, x, saves_result=True)
        tape.op(1, y, saves=[y])
    profile = tape.profile()
    calls = (profile.calls[0], replace(profile.calls[1], result_value=1, advance_ms=3.0))
    profile = replace(profile, calls=calls)
    alone = predict(profile, Decisions(advance=frozenset({"block#0"})))
    assert (alone.held_bytes, alone.extra_ms) == (20, 0.0)
    replayed = predict(profile, Decisions(advance=frozenset({"block#0"}), replay=frozenset({"block#0"})))
    assert (replayed.held_bytes, replayed.extra_ms) == (10, 3.0)


def test_a_measured_peak_differs_from_the_predicted_one_by_temporaries() -> None:
    predicted = predict(chain(2), Decisions())
    measured = with_peak(predicted, predicted.peak_bytes + 7)
    assert measured.peak_bytes == predicted.peak_bytes + 7
    assert measured.parts == predicted.parts | {"temporaries": predicted.parts["temporaries"] + 7}


def test_demands_on_a_node_are_combined_in_either_order() -> None:
    """What is demanded first counts with what comes later; of two at once, the one that is wanted longer."""
    first, second, at_once = (1, 5, 2, 7), (3, 4, 6, 9), (1, 6, 1, 8)
    for one, other, both in ((first, second, (1, 5, 6, 7)), (first, at_once, (1, 6, 2, 8))):
        assert combine_demands(one, other) == combine_demands(other, one) == both


def test_a_recompute_over_its_operand_takes_what_both_take_at_once() -> None:
    """A value of 20 bytes is computed from one of 10 that exists, then written over."""
    values = [Value(storage=None, bytes=n, node="") for n in (10, 20, 20)]
    values[2] = replace(values[2], overwrites=1, transient_bytes=5)
    passes = np.array([False, True, True])
    over = compute_recompute_cost(2, values, [(), (0,), (1,)], passes)
    assert (over.operands, over.scratch_bytes) == ((0,), 5)
    values[2] = replace(values[2], overwrites=None)
    assert compute_recompute_cost(2, values, [(), (0,), (1,)], passes).scratch_bytes == 20 + 5


def test_a_result_inside_a_replayed_call_is_not_advanced() -> None:
    """Two blocks inside one that is replayed: a replay of the outer one, the first call, brings both back."""
    tape = Tape()
    x = tape.op(10)
    with tape.call("outer#0", x, ms=9.0):
        with tape.call("inner#0", x):
            y = tape.op(20, x, saves=[x])
        with tape.call("next#0", y):
            tape.op(30, y, saves=[y], saves_result=True)
    profile = tape.profile()
    profile = replace(
        profile, calls=(profile.calls[0], replace(profile.calls[1], result_value=y, advance_ms=3.0), profile.calls[2])
    )
    replayed = predict(profile, Decisions(replay=frozenset({"outer#0"})))
    assert replayed.extra_ms == 9.0
    assert predict(profile, Decisions(replay=frozenset({"outer#0"}), advance=frozenset({"inner#0"}))) == replayed
    assert predict(profile, Decisions(advance=frozenset({"inner#0"}))).extra_ms == 3.0


def test_an_offloaded_storage_is_off_the_device_until_its_predecessor_is_read() -> None:
    """h0, h1, h2 of 40 bytes each: one op makes each from the last, and saves it; 2 bytes in 1 ms."""
    tape = Tape()
    with tape.call("model#0"):
        h = tape.op(40, saves_result=True)
        for _ in range(2):
            h = tape.op(40, h, saves_result=True)
        tape.op(1, h)
    profile = replace(tape.profile(), offload_bytes_per_ms=2.0)
    decisions = Decisions(offload=frozenset(f"model#0:{n}" for n in range(3)))
    simulator = Simulator(profile)
    levels = [int(level) for level in simulator.sweep(simulator.choice(decisions)).usage]
    # h0 is there until h1 has left, whose last use in forward is when h2 is made. Backward has the one that is read
    # and the next.
    assert levels == [40, 80, 120, 81, 0, 80, 80, 40, 0]
    prediction = simulator.predict(decisions)
    assert (prediction.host_bytes, prediction.extra_ms) == (120, 120.0)
    assert predict(profile, Decisions()).host_bytes == 0


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        (Decisions(recompute=frozenset({"nowhere#0:0"})), "no slot of this profile has the address 'nowhere#0:0'"),
        (Decisions(recompute=frozenset({"model#0:0"})), "model#0:0 has no recipe"),
        (Decisions(replay=frozenset({"nowhere#0"})), "no call of this profile has the id 'nowhere#0'"),
        (Decisions(replay=frozenset({"model#0"})), "model#0 can't be replayed: the model itself"),
        (Decisions(advance=frozenset({"nowhere#0"})), "no call of this profile has the id 'nowhere#0'"),
        (Decisions(advance=frozenset({"blocks.0#0"})), "blocks.0#0 can't be advanced"),
        (Decisions(offload=frozenset({"nowhere#0:0"})), "no slot of this profile has the address 'nowhere#0:0'"),
        (Decisions(offload=frozenset({"model#0:0"})), "model#0:0 can't be offloaded"),
    ],
)
def test_impossible_decisions_are_refused(decisions: Decisions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(chain(1), decisions)


def test_a_decision_holds_for_every_call_of_the_model() -> None:
    tape = Tape()
    for _ in range(2):
        with tape.call("model#0"):
            x = tape.op(10)
            y = tape.op(20, x, saves=[x], recipe="gelu", ms=2.0)
            tape.op(1, y, saves=[y])
    prediction = predict(tape.profile(), Decisions(recompute=frozenset({"model#0:1"})))
    assert prediction.extra_ms == 4.0
    assert prediction.held_bytes == 20


@pytest.mark.parametrize(
    "broken",
    [
        lambda p: replace(p, base_bytes=()),
        lambda p: replace(p, gradient_bytes=p.gradient_bytes[1:]),
        lambda p: replace(p, values=(replace(p.values[0], operands=(3,)), *p.values[1:])),
        lambda p: replace(p, values=(replace(p.values[0], storage=99), *p.values[1:])),
        lambda p: replace(p, slots=(replace(p.slots[0], value=99), *p.slots[1:])),
        lambda p: replace(p, slots=(replace(p.slots[0], storage=99), *p.slots[1:])),
        lambda p: replace(p, slots=(*p.slots[:-1], replace(p.slots[-1], need=99))),
        lambda p: replace(p, calls=(replace(p.calls[0], parent=0), *p.calls[1:])),
        lambda p: replace(p, calls=(replace(p.calls[0], exit=99), *p.calls[1:])),
        lambda p: replace(p, storages=(replace(p.storages[0], allocated_at=-1), *p.storages[1:])),
        lambda p: replace(p, slots=(replace(p.slots[0], call=-1), *p.slots[1:])),
        lambda p: replace(p, phases={"backward": 99}),
        lambda p: replace(p, measured_plain_peak_bytes=0),
    ],
)
def test_a_profile_that_contradicts_itself_is_refused(broken: object) -> None:
    assert callable(broken)
    with pytest.raises(LowtideError, match="contradicts itself"):
        predict(broken(chain(1)), Decisions())


# --- replays that save what is born elsewhere and is not their input


def test_values_computed_from_a_tensor_hold_the_replay_that_saves_it() -> None:
    """F (20 bytes) is saved in a block that is given x (10), and makes g (40), which backward reads after f."""
    tape = Tape()
    with tape.call("model#0", refused="the model itself"):
        x = tape.op(10)
        f = tape.op(20)
        g = tape.op(40, f, recipe="gelu")
        tape.op(1, g, saves=[g])
        with tape.call("block#0", x):
            tape.op(1, f, saves=[f])
    # g could be asked for again, and f with it: until then the block holds x.
    assert usage(tape.profile(), ["model#0:0"], ["block#0"])[5:] == [10 + 20, 10 + 20 + 40, 0, 0, 0, 0]


def test_values_computed_from_a_tensor_hold_a_replay_around_the_one_that_saves_it() -> None:
    """The same where the block (given f1, 20 bytes) that saves f2 (30) is in another one (given x, 10)."""
    tape = Tape()
    with tape.call("model#0", refused="the model itself"):
        x = tape.op(10)
        f1 = tape.op(20)
        f2 = tape.op(30)
        g = tape.op(40, f2, recipe="gelu")
        tape.op(1, g, saves=[g])
        with tape.call("outer#0", x), tape.call("inner#0", f1):
            tape.op(1, f2, saves=[f2])
    levels = usage(tape.profile(), ["model#0:0"], ["outer#0", "inner#0"])
    assert levels[6:] == [10 + 20 + 30, 10 + 20 + 30 + 40, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(("allocated_at", "is_foreign"), [(0, True), (1, False), (2, False), (3, True)])
def test_a_replay_brings_back_what_is_born_from_its_beginning_to_its_end(allocated_at: int, is_foreign: bool) -> None:
    """At the call's end already the next operator may begin, and it belongs to that."""
    tape = Tape()
    with tape.call("model#0"):
        x = tape.op(10)
        with tape.call("block#0", x):
            y = tape.op(20, x, saves_result=True)
            z = tape.op(30, y)
        tape.op(1, z)
    profile = tape.profile()
    assert (profile.calls[1].enter, profile.calls[1].exit) == (1, 3)
    (slot,) = (slot for slot in profile.slots if slot.value == y)
    assert slot.storage is not None
    storages = list(profile.storages)
    storages[slot.storage] = replace(storages[slot.storage], allocated_at=allocated_at)
    simulator = Simulator(replace(profile, storages=tuple(storages)))
    assignment = assign(simulator.index, simulator.choice(Decisions(replay=frozenset({"block#0"}))))
    assert assignment.foreign_values == ([(y, 1)] if is_foreign else [])
    assert assignment.state[y] == (KEPT if is_foreign else REPLAYED)


def test_a_replay_may_hold_what_its_input_is_made_of() -> None:
    """F (20 bytes) is saved in a block, and makes what the block is given (10): each holds the other."""
    tape = Tape()
    with tape.call("model#0", refused="the model itself"):
        f = tape.op(20)
        given = tape.op(10, f, recipe="gelu")
        with tape.call("block#0", given):
            tape.op(1, f, saves=[f])
    profile = tape.profile()
    decisions = Decisions(recompute=frozenset({"block#0@0"}), replay=frozenset({"block#0"}))
    simulator = Simulator(profile)
    levels = simulator.sweep(simulator.choice(decisions)).usage.tolist()
    assert levels == reference.ReferenceStep(profile, decisions).usage() == [20, 30, 21, 20 + 10 + 1, 0, 0, 0]


# --- any step


@given(profiles(), st.integers(0, 2**32))
def test_the_simulator_sees_what_a_walk_through_the_step_sees(profile: Profile, seed: int) -> None:
    decisions = random_decisions(profile, seed)
    step = reference.ReferenceStep(profile, decisions)
    simulator = Simulator(profile)
    walked = step.usage()
    assert simulator.sweep(simulator.choice(decisions)).usage.tolist() == walked
    prediction = simulator.predict(decisions)
    assert prediction.peak_bytes == profile.static.total + max(walked)
    assert prediction.peak_position == walked.index(max(walked))
    assert prediction.extra_ms == pytest.approx(step.extra_ms)
    assert prediction.extra_flops == step.extra_flops
    assert sum(prediction.parts.values()) == prediction.peak_bytes
    assert simulator.decisions(simulator.choice(decisions)) == decisions


def test_values_held_only_by_replays_are_recomputed_once_for_all_readers() -> None:
    """x, made from w, is the input of b; y and z are made from it outside."""
    tape = Tape()
    with tape.call("model#0"):
        w = tape.op(10)
        x = tape.op(20, w, saves=[w], recipe="tanh")
        with tape.call("b#0", x):
            inside = tape.op(40, x)
            tape.op(1, inside, saves=[inside])
        y, z = tape.op(30, x, recipe="gelu"), tape.op(30, x, recipe="gelu")
        tape.op(1, y, z, saves=[y, z])
    profile = tape.profile()
    for replay in (frozenset[str](), frozenset({"b#0"})):
        decisions = Decisions(recompute=frozenset({"model#0:1", "model#0:2"}), replay=replay)
        simulator = Simulator(profile)
        assert simulator.sweep(simulator.choice(decisions)).usage.tolist() == (
            reference.ReferenceStep(profile, decisions).usage()
        )
        assert simulator.predict(decisions).extra_ms == pytest.approx(reference_ms(profile, decisions))


def test_a_replayed_call_holds_its_input_until_it_ends() -> None:
    """A tensor of 100 bytes is read by the first operator of b, and backward reads nothing of b."""
    tape = Tape()
    with tape.call("model#0"):
        x = tape.op(100)
        with tape.call("b#0", x):
            y = tape.op(10, x)
            z = tape.op(50, y, saves=[y], unread=True)
        tape.op(1, z)
    assert usage(tape.profile())[:4] == [100, 110, 60, 61]
    assert usage(tape.profile(), replay=["b#0"])[2] == 160


@given(profiles())
def test_the_plain_step_costs_nothing_more(profile: Profile) -> None:
    prediction = predict(profile, Decisions())
    assert (prediction.extra_ms, prediction.extra_flops, prediction.parts["recomputed"]) == (0, 0, 0)
