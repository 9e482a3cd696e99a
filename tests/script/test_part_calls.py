"""Copies of the calls of compiled code in a step."""

import torch
from torch import Tensor, nn

from lowtide.memory.entry_storages import bytes_of, find_existing_tensors
from lowtide.memory.events import Allocate
from lowtide.memory.measure import make_recorder
from lowtide.runtime.composite_model import CompositeModel
from lowtide.script.part_calls import PartCalls


def test_each_different_call_is_made_again_with_equal_arguments_and_the_same_frozen_parameters() -> None:
    maker, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    model = CompositeModel([maker, judge])
    calls = PartCalls(model)
    x, drawn = torch.randn(2, 8)[:, ::2], torch.randn(2, 4, requires_grad=True)
    n_bytes = sum(bytes_of(find_existing_tensors()).values())
    with make_recorder(torch.device("cpu")) as recorder:
        for _ in range(2):
            calls.add(maker, ((x,), {}))
            calls.add(judge, ((), {"input": drawn}))
        judge.requires_grad_(False)
        calls.add(judge, ((), {"input": drawn}))
    judge.requires_grad_(True)
    assert not [event for event in recorder.stream.events if type(event) is Allocate]
    assert sum(bytes_of(find_existing_tensors()).values()) == n_bytes
    x_bits, drawn_bits = x.clone(), drawn.detach().clone()
    x.zero_()
    made = calls.made()
    assert [called for called, *_ in made] == [maker, judge, judge]
    assert torch.equal(made[0][1][0], x_bits)
    assert torch.equal(made[2][2]["input"], drawn_bits)
    assert made[2][2]["input"].requires_grad
    results: list[Tensor] = calls.run(*made)
    results[2].sum().backward()
    assert judge.weight.grad is None
    assert judge.weight.requires_grad
    results[1].sum().backward()
    assert judge.weight.grad is not None


def test_no_call_is_made_again_where_one_can_not_be_copied() -> None:
    module = nn.Linear(4, 4)
    calls = PartCalls(module)
    calls.add(module, ((torch.ones(2, 4),), {}))
    calls.add(module, ((torch.ones(2, 4).to_sparse(),), {}))
    assert not calls.made()
    calls.clear()
    calls.add(module, ((torch.ones(2, 4),), {}))
    assert len(calls.made()) == 1
