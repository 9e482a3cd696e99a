"""Saved tensors that wait on the host: the same bits, one copy a storage, nothing left on the device or alive.

On the CPU a copy stands for pinned memory (`CpuCopier`), so that the handles, their order and their lifetimes are
tested where there is no GPU. The streams are tested on one.
"""

import gc
from collections.abc import Iterable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.runtime.engine import Engine
from lowtide.runtime.offload import COPIERS, Offloaded, OffloadedStorage
from lowtide.runtime.plan_table import parse_actions
from lowtide.runtime.saved_values import Value
from parts import Language
from runtime.cpu_copier import CPU, CpuCopier
from runtime.plans import (
    check_nothing_outlives_a_step,
    check_two_backward_passes,
    count,
    differences,
    installed,
    outcome,
)

IDS = torch.arange(20).view(2, 10)
BLOCKS = [f"blocks.{n}#0" for n in range(4)]
EVERYTHING = [
    f"{path}#0:{n}" for path in ("", "blocks.0", "blocks.1.mlp.1", "blocks.2.norm1", "norm") for n in range(6)
]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COPIERS, CPU, CpuCopier())


def in_force(
    model: nn.Module, offloaded: Iterable[str], replay: Iterable[str] = (), advance: Iterable[str] = ()
) -> AbstractContextManager[Engine]:
    return installed(Engine(model, parse_actions({}, replay, advance, offloaded)))


class Chain(nn.Module):
    """x -> tanh -> tanh ...: each saves its result. Knows the memory of what it made."""

    def __init__(self, n: int = 4):
        super().__init__()
        self.linear, self.n, self.made = nn.Linear(8, 8), n, list[StorageWeakRef]()

    def forward(self, x):
        x = self.linear(x)
        for _ in range(self.n):
            x = x.tanh()
            self.made.append(StorageWeakRef(x.untyped_storage()))
        return x.sum()


@pytest.mark.parametrize(
    ("offloaded", "replay", "advance"),
    [
        (EVERYTHING, [], []),
        ([f"{block}@0" for block in BLOCKS], BLOCKS, []),
        ([f"{block}@0" for block in BLOCKS[::2]], BLOCKS, BLOCKS[::2]),
        (EVERYTHING, BLOCKS[:2], BLOCKS[1:]),
    ],
)
def test_gradients_and_random_numbers_are_those_of_the_plain_step(offloaded, replay, advance):
    model = Language(layers=4)

    def step():
        loss = model(IDS).square().mean()
        loss.backward()
        return loss

    plain = outcome(model, step)
    with in_force(model, offloaded, replay, advance):
        assert differences(plain, outcome(model, step)) == []
        loss = model(IDS).square().mean()
        assert count(OffloadedStorage)
        del loss


def test_an_offloaded_tensor_is_off_the_device_until_its_predecessor_is_read():
    model, x = Chain(4), torch.randn(3, 8)
    fetched: list[int] = []
    with in_force(model, [f"#0:{n}" for n in range(4)]) as engine, pytest.MonkeyPatch.context() as patch:
        back = CpuCopier.back
        patch.setattr(CpuCopier, "back", lambda self, host: (fetched.append(0), back(self, host))[1])
        loss = model(x)
        assert [ref.expired() for ref in model.made] == [True] * 4
        loss.backward()
        assert not engine.packer.drifted
    assert len(fetched) == 4


def test_the_next_one_to_be_read_is_on_its_way_when_one_is_read():
    model, x = Chain(3), torch.randn(3, 8)
    log: list[str] = []
    with in_force(model, [f"#0:{n}" for n in range(3)]), pytest.MonkeyPatch.context() as patch:
        fetch, bring_back = OffloadedStorage.fetch, OffloadedStorage.bring_back
        names: dict[int, str] = {}
        patch.setattr(OffloadedStorage, "fetch", lambda t: (log.append(f"fetch {names[id(t)]}"), fetch(t))[1])
        patch.setattr(OffloadedStorage, "bring_back", lambda t: (log.append(f"read {names[id(t)]}"), bring_back(t))[1])
        loss = model(x)
        storages = [thing for thing in gc.get_objects() if type(thing) is OffloadedStorage]
        names.update({id(storage): str(storage._host.data_ptr()) for storage in storages})
        del storages
        loss.backward()
    reads = [entry.removeprefix("read ") for entry in log if entry.startswith("read")]
    assert len(reads) == 3
    third, second, first = reads
    assert log == [
        f"read {third}", f"fetch {third}", f"fetch {second}",
        f"read {second}", f"fetch {second}", f"fetch {first}",
        f"read {first}", f"fetch {first}",
    ]  # fmt: skip


def test_one_copy_for_all_that_share_a_storage():
    class Sharing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            h = self.linear(x).tanh()
            left, right = h.chunk(2, -1)
            return (h.square() + (left * right).sum() + h.sin()).sum()

    model, x = Sharing(), torch.randn(3, 8)
    plain = outcome(model, lambda: model(x).backward())
    with in_force(model, [f"#0:{n}" for n in range(8)]):
        loss = model(x)
        assert count(OffloadedStorage) == 1  # of h, which is saved four times, twice as a part of it
        del loss
        assert differences(plain, outcome(model, lambda: model(x).backward())) == []


def test_parameters_stay():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return (x * self.weight).sum()

    model = Weighted()
    with in_force(model, ["#0:0", "#0:1"]) as engine:
        loss = model(torch.randn(3, 8, requires_grad=True))
        assert count(OffloadedStorage) == 1
        assert engine.packer.drifted
        loss.backward()


def test_a_tensor_with_another_holder_is_kept():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            h = self.linear(x)
            return (h.sin() + h.cos()).sum()

    model = Twice()
    with in_force(model, ["#0:0"]):
        loss = model(torch.randn(3, 8))
        assert not count(Offloaded)
        loss.backward()


def test_backward_over_a_retained_graph_and_after_the_plan_was_removed():
    model = Language(layers=4)
    check_two_backward_passes(model, IDS, lambda: in_force(model, [f"{block}@0" for block in BLOCKS], BLOCKS))


@pytest.mark.parametrize("end", ["backward", "dropped", "raised"])
def test_nothing_outlives_its_step(end):
    model = Language(layers=4)
    planned = in_force(model, [*EVERYTHING, *(f"{block}@0" for block in BLOCKS)], BLOCKS[2:])
    check_nothing_outlives_a_step(model, IDS, planned, end, Value, OffloadedStorage, Offloaded)


def test_a_tensor_that_is_changed_in_place_while_it_leaves_is_refused():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            h = self.linear(x)
            y = h.sin()
            h.mul_(2)
            return y.sum() + h.sum()

    model = Changing()
    with in_force(model, ["#0:0"]):
        loss = model(torch.randn(3, 8))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_without_a_way_to_the_host_it_is_kept_and_that_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(COPIERS, CPU)
    model, x = Chain(2), torch.randn(3, 8)
    with in_force(model, ["#0:1"]) as engine, pytest.warns(UserWarning, match="these tensors are kept"):
        model(x).backward()
    assert engine.packer.drifted == {"#0:1"}


@pytest.mark.gpu
def test_on_a_gpu_the_bits_are_the_same_and_the_memory_is_less():
    model, x = Chain(8).cuda(), torch.randn(2**18, 8, device="cuda")
    plain = outcome(model, lambda: model(x).backward())
    with in_force(model, [f"#0:{n}" for n in range(8)]):
        for _ in range(20):  # a race would show now and then
            assert differences(plain, outcome(model, lambda: model(x).backward())) == []
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = model(x)
        assert torch.cuda.memory_allocated() - before < 2 * x.nbytes
        del loss


@pytest.mark.gpu
def test_on_a_gpu_unread_memory_is_not_reused_too_early():
    model, x = Chain(8).cuda(), torch.randn(2**18, 8, device="cuda")
    expected = torch.full_like(x, 3.0)
    with in_force(model, [f"#0:{n}" for n in range(8)]):
        for _ in range(20):
            loss = model(x)
            del loss  # while copies are still running
            assert torch.equal(torch.full_like(x, 3.0), expected)
