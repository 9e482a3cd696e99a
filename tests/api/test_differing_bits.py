"""Search for recomputed values that change bits of compiled code: they are found in few trials, and kept."""

import pytest

from compiled_by_hand import SLOTS, STEP
from lowtide.api.differing_bits import REFUSED, TRIALS, find_differing_addresses, with_kept
from lowtide.planner.records import Decisions
from lowtide.planner.simulate.simulator import predict
from lowtide.profiler.compiled_profile import assembled


@pytest.mark.parametrize("culprit", [0, 5, 15, 31])
def test_one_value_of_many_is_found_in_few_trials(culprit: int) -> None:
    addresses, trials = tuple(f"block#0:{n}" for n in range(32)), list[tuple[str, ...]]()

    def is_identical(recomputed: tuple[str, ...]) -> bool:
        trials.append(recomputed)
        return addresses[culprit] not in recomputed

    assert find_differing_addresses(addresses, is_identical) == (addresses[culprit],)
    assert len(trials) == TRIALS


def test_trials_are_bounded_and_what_is_left_is_kept_together() -> None:
    addresses = tuple(f"block#0:{n}" for n in range(100))
    found = find_differing_addresses(addresses, lambda recomputed: "block#0:7" not in recomputed, trials=2)
    assert "block#0:7" in found
    assert len(found) == 25


def test_a_single_value_needs_no_trial() -> None:
    assert find_differing_addresses(("norm#0:0",), lambda _: pytest.fail("compiled in vain")) == ("norm#0:0",)


def test_a_value_that_changes_bits_is_kept_by_every_plan() -> None:
    profile, recompute = assembled([SLOTS], STEP, 1.0), Decisions(recompute=frozenset({"drop#0:0"}))
    predict(profile, recompute)
    kept = with_kept(profile, ("drop#0:0",))
    (slot,) = (slot for slot in kept.slots if slot.address == "drop#0:0")
    assert kept.values[slot.value].refused == REFUSED
    with pytest.raises(ValueError, match=r"drop#0:0"):
        predict(kept, recompute)
