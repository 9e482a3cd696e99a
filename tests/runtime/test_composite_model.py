"""One module for the trained ones of a loop, and its name."""

import pytest
from torch import nn

from lowtide.runtime.composite_model import CompositeModel, find_name, join_models


@pytest.mark.parametrize("order", [1, -1])
def test_a_model_that_contains_the_others_stands_for_all(order: int) -> None:
    head = nn.Linear(2, 2)
    model = nn.Sequential(nn.Linear(2, 2), head)
    assert join_models([head, model][::order]) is model


def test_models_beside_each_other_become_parts_of_one() -> None:
    generator, critic = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    model = join_models([generator, critic, generator[0]])
    assert type(model) is CompositeModel
    assert [*model.children()] == [generator, critic]
    assert find_name(model) == "Sequential and Linear"
