"""When a rehearsal is the last that holds a saved tensor's memory."""

import torch

from lowtide._torch.tensors import WeakStorage
from lowtide.profiler.external_references import RECENT, ExternalReferences
from lowtide.runtime.saved_values import Handle, Value, make_value_without_grad_fn


def test_memory_is_released_when_only_saved_tensors_hold_it():
    tensor = torch.randn(64, 64)
    address = tensor.data_ptr()
    value = Value(tensor.detach())
    handles = [Handle(value), Handle(value, tensor.view(-1).detach()), Handle(value, tensor.t().detach())]
    holding = ExternalReferences()
    for handle in handles:
        holding.watch(handle)
    assert holding.find_unreferenced() == ()
    del handle, handles[1:]
    assert holding.find_unreferenced() == ()
    del tensor
    assert holding.find_unreferenced() == ((address, 1),)
    assert holding.find_unreferenced() == ()  # each once


def test_freed_memory_is_not_reported_as_released():
    handle = Handle(Value(torch.randn(64, 64)))
    holding = ExternalReferences()
    holding.watch(handle)
    del handle
    assert holding.find_unreferenced() == ()


def test_parameters_are_not_watched():
    weight = torch.nn.Parameter(torch.randn(64, 64))
    handle = Handle(make_value_without_grad_fn(weight), weight.t().detach())
    holding = ExternalReferences()
    holding.watch(handle)
    del weight
    assert holding.find_unreferenced() == ()


def test_entries_of_a_list_are_checked_once_per_mark(monkeypatch):
    looks = 0
    owners = WeakStorage.owners

    def counted(storage):
        nonlocal looks
        looks += 1
        return owners(storage)

    monkeypatch.setattr(WeakStorage, "owners", counted)
    holding, held = ExternalReferences(), []
    handles = []
    for _ in range(20 * RECENT):
        held.append(torch.randn(4))
        handles.append(Handle(Value(held[-1].detach())))
        holding.watch(handles[-1])
        assert holding.find_unreferenced() == ()
    assert looks <= 3 * RECENT * len(held)


def test_the_end_of_a_long_list_is_seen_where_its_call_ends():
    held = [torch.randn(4) for _ in range(4 * RECENT)]
    addresses = {tensor.data_ptr() for tensor in held}
    handles = [Handle(Value(tensor.detach())) for tensor in held]
    holding = ExternalReferences()
    for handle in handles:
        holding.watch(handle)
    since = holding.n_watched
    assert holding.find_unreferenced() == ()
    late = torch.randn(4)
    handles.append(Handle(Value(late.detach())))
    holding.watch(handles[-1])
    assert holding.find_unreferenced(since=since) == ()
    held.clear()
    assert len(holding.find_unreferenced(since=0)) == len(addresses)
    assert holding.find_unreferenced(everything=True) == ()


def test_memory_released_between_two_looks_counts_as_held_at_the_first():
    held = [torch.randn(4) for _ in range(8 * RECENT)]
    address = held[0].data_ptr()
    handles = [Handle(Value(tensor.detach())) for tensor in held]
    holding = ExternalReferences()
    for handle in handles:
        holding.watch(handle)
    assert holding.find_unreferenced(everything=True) == ()
    del held[0]
    n = 1
    while not (found := holding.find_unreferenced()):
        n += 1
    assert found == ((address, n),)
    assert n == 8


def test_an_address_that_is_used_again_is_watched_again():
    tensor = torch.randn(4)
    address = tensor.data_ptr()
    handle = Handle(Value(tensor.detach()))
    holding = ExternalReferences()
    holding.watch(handle)
    del handle
    handle = Handle(Value(tensor.detach()))
    holding.watch(handle)
    assert holding.find_unreferenced() == ()
    del tensor
    assert holding.find_unreferenced() == ((address, 1),)
