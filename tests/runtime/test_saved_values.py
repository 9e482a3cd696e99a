"""Values and the handles on them: who reads a value, and until when it is held."""

import pytest
import torch

from lowtide._torch.backward import backward_number
from lowtide.runtime.saved_fields import NEVER
from lowtide.runtime.saved_values import KEYS, Handle, Value, register, registered


def test_a_handle_that_becomes_another_value_is_a_reader_of_that_one() -> None:
    one, other = Value(torch.ones(2)), Value(torch.zeros(2))
    handle, second = Handle(one), Handle(one)
    handle.refer_to(other)
    assert (one.readers, other.readers) == (1, 1)
    assert handle.get().tolist() == [0, 0]
    del handle, second
    assert (one.readers, other.readers) == (0, 0)


def test_a_kept_value_that_was_written_to_is_not_read() -> None:
    tensor = torch.ones(2)
    value = Value(tensor.detach())
    assert not value.is_changed
    tensor.add_(1)
    assert value.is_changed
    with pytest.raises(RuntimeError, match="is at version 1; expected version 0 instead"):
        value.get()


def test_a_kept_value_whose_memory_is_exposed_is_compared_before_it_is_read() -> None:
    tensor = torch.tensor([1.0, 2.0])
    array, value = tensor.numpy(), Value(tensor)
    value.expose()
    assert not value.is_changed
    array[:] = array[::-1].copy()  # the same bytes in another order, unseen by autograd
    assert value.is_changed
    array[:] = array[::-1].copy()
    assert not value.is_changed


def test_each_output_of_a_node_has_its_value() -> None:
    x = torch.ones(10, requires_grad=True)
    outputs = (x * 2).chunk(10)
    node = outputs[0].grad_fn
    assert node is not None
    values = [Value(output.detach()) for output in outputs]
    for number, value in enumerate(values):
        register(node, number, value)
    assert len(values) > len(KEYS)
    assert all(registered(node, number) is value for number, value in enumerate(values))
    values.clear()
    del value
    assert registered(node, 3) is None


def test_no_pass_has_the_number_that_stands_for_none() -> None:
    assert backward_number() == -1
    assert NEVER < -1
