"""When a rehearsal is the last that holds a saved tensor's memory."""

import torch

from lowtide.profiler.external_references import Holding
from lowtide.runtime.saved_values import Handle, Value, value_without_grad_fn


def test_memory_is_let_go_of_when_only_saved_tensors_are_left():
    tensor = torch.randn(64, 64)
    address = tensor.data_ptr()
    value = Value(tensor.detach())
    handles = [Handle(value), Handle(value, tensor.view(-1).detach()), Handle(value, tensor.t().detach())]
    holding = Holding()
    for handle in handles:
        holding.watch(handle)
    assert holding.let_go() == ()
    del handle, handles[1:]
    assert holding.let_go() == ()
    del tensor
    assert holding.let_go() == (address,)
    assert holding.let_go() == ()  # each once


def test_memory_that_is_gone_altogether_is_not_let_go_of():
    handle = Handle(Value(torch.randn(64, 64)))
    holding = Holding()
    holding.watch(handle)
    del handle
    assert holding.let_go() == ()


def test_parameters_are_not_watched():
    weight = torch.nn.Parameter(torch.randn(64, 64))
    handle = Handle(value_without_grad_fn(weight), weight.t().detach())
    holding = Holding()
    holding.watch(handle)
    del weight
    assert holding.let_go() == ()
