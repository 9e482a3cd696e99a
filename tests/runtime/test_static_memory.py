"""Bytes that exist before a step begins, each storage once, and the optimizers that they belong to."""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lowtide._torch.optim import list_parameters
from lowtide.runtime.live_optimizers import count_missing_state, find_optimizers, is_of, listed, state_bytes
from lowtide.runtime.static_memory import _count_bucket_bytes, static_bytes


class Model(nn.Module):
    """24 parameters and a buffer of 5, tied and shared in part."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight
        self.register_buffer("mask", torch.ones(5))
        self.register_buffer("part", self.mask[2:])


def test_each_storage_counts_once_in_the_first_part_that_has_it() -> None:
    model, batch = Model(), torch.ones(3)
    static, addresses = static_bytes(model, [batch, batch[1:], model.mask], [])
    assert (static.parameters, static.buffers, static.inputs) == (96, 20, 12)
    assert (static.gradients, static.optimizer) == (0, 0)
    assert static.total == 128
    assert addresses == {t.untyped_storage().data_ptr() for t in (*model.parameters(), model.mask, batch)}


def test_gradients_state_and_what_else_is_updated() -> None:
    model, beside = Model(), nn.Parameter(torch.ones(7))
    optimizer = torch.optim.SGD([*model.parameters(), beside], lr=0.1, momentum=0.9)
    for parameter in (*model.parameters(), beside):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    static, _ = static_bytes(model, None, [optimizer])
    assert (static.parameters, static.gradients, static.optimizer) == (124, 124, 124)
    assert state_bytes([optimizer], torch.device("cpu")) == 124
    assert state_bytes([optimizer], torch.device("meta")) == 0


def test_tensors_without_memory_on_the_device_count_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4), nn.Linear(4, 4, device="meta"))
    static, addresses = static_bytes(model, [torch.ones(2, device="meta"), torch.ones(0)], [])
    assert (static.parameters, static.inputs) == (80, 0)
    assert 0 not in addresses  # an empty storage has none of its own


@pytest.mark.parametrize(("are_views", "n_bytes"), [(False, 64 + 28), (True, 28)])
def test_buckets_hold_the_gradients_that_are_sent_unless_these_are_views_of_them(are_views: bool, n_bytes: int) -> None:
    model = nn.ParameterDict({name: torch.ones(n) for name, n in (("ours", 16), ("new", 7), ("frozen", 3), ("own", 5))})
    model["frozen"].requires_grad_(False)
    model["ours"].grad = torch.ones(16)
    wrapper = SimpleNamespace(module=model, parameters_to_ignore={"own"}, gradient_as_bucket_view=are_views)
    assert _count_bucket_bytes(wrapper) == n_bytes  # type: ignore[arg-type]


def test_optimizers_are_found_by_the_parameters_that_they_update() -> None:
    model, other = Model(), nn.Linear(2, 2)
    mine, others = torch.optim.SGD([model.one.bias]), torch.optim.SGD(other.parameters())
    assert is_of(model, mine)
    assert not is_of(model, others)
    assert find_optimizers(model) == find_optimizers(model, others) == [mine]
    assert (listed(None), listed(mine), listed((mine, others))) == ([], [mine], [mine, others])
    assert [id(p) for p in list_parameters(mine)] == [id(model.one.bias)]
    assert list_parameters(torch.optim.Optimizer.__new__(torch.optim.Optimizer)) == []


def test_state_is_missing_of_trained_parameters_that_got_no_update() -> None:
    layers = nn.ModuleList(nn.Linear(4, n) for n in (2, 3, 5, 7))
    layers[3].requires_grad_(False)
    optimizer = torch.optim.Adam(layers.parameters())
    layers[0](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    n_numbers = 3 * 4 + 3 + 5 * 4 + 5
    assert count_missing_state([optimizer], torch.device("cpu")) == (4, 4 * (2 * n_numbers + 4))
    assert count_missing_state([torch.optim.Adam(layers.parameters())], torch.device("cpu")) == (0, 0)


def test_garbage_is_collected_only_if_an_unknown_optimizer_is_found() -> None:
    model = Model()
    mine, n_collections = torch.optim.SGD(model.parameters()), _n_full_collections()
    assert find_optimizers(model, mine) == [mine]
    assert _n_full_collections() == n_collections
    unused = torch.optim.SGD(model.parameters())
    unused.itself = unused  # type: ignore[attr-defined]
    del unused
    assert find_optimizers(model, mine) == [mine]
    assert _n_full_collections() > n_collections


def _n_full_collections() -> int:
    return int(gc.get_stats()[-1]["collections"])
