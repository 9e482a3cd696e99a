"""Why a lever that takes time is not used."""

import pytest

from lowtide.levers.selection import explain_not_paying


@pytest.mark.parametrize(
    ("saved_ms", "why"),
    [
        (8.0, "it adds 12 ms a step (+10 %), and saves 8 ms of recomputes and replays"),
        (-7.56, "it adds 12 ms a step (+10 %), and saves nothing of recomputes and replays"),
    ],
)
def test_the_cost_and_saving_of_a_lever_are_measured(saved_ms: float, why: str) -> None:
    assert explain_not_paying(12.0, saved_ms, 120.0) == why
