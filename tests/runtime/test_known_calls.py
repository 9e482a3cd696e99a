"""Records of a model's calls: series of calls between two steps that do not train the model."""

from torch import nn

from lowtide.runtime.known_calls import KnownCalls


def test_only_a_series_of_calls_between_steps_is_reported_with_its_number() -> None:
    calls, ended, model = KnownCalls(), list[int](), nn.Linear(2, 2)
    calls.ends_between = ended.append
    for n_calls in (0, 1, 2, 3):
        for _ in range(n_calls):
            calls.see_between(model)
        calls.end_between()
    assert ended == [2, 3]
