"""A comparison of tensors leaves none of them out."""

import pytest
import torch

from comparing import equal

ONE, TWO = torch.ones(2), torch.full((2,), 2.0)


def test_tensors_are_compared_by_their_places_and_names() -> None:
    assert equal([ONE, None], (ONE.clone(), None))
    assert not equal([ONE, TWO], [TWO, ONE])
    assert not equal([ONE], [None])
    assert equal({"a": ONE, "b": TWO}, {"b": TWO, "a": ONE})
    assert not equal({"a": ONE, "b": TWO}, {"a": TWO, "b": TWO})


def test_entries_of_only_one_side_are_an_error() -> None:
    for one, other in (([ONE], []), ([ONE, TWO], iter([ONE])), ([TWO], [ONE, ONE])):
        with pytest.raises(ValueError, match="argument"):
            equal(one, other)
    with pytest.raises(ValueError, match=r"only one of the two has \['b'\]"):
        equal({"a": ONE}, {"a": ONE, "b": ONE})
