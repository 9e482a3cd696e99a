"""Memory beside the model counts in every budget, each storage once."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.memory import entry_storages as entry
from lowtide.planner.records import Profile
from lowtide.profiler.other_memory import measure_other_models

MANY = 200_000
X = torch.randn(64, 32)


class Teacher(nn.Sequential):
    pass


class Average:
    """Of the weights, in a list of tensors, as diffusers' EMAModel has it."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        self.shadow = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def follow(self, parameters: Iterator[nn.Parameter]) -> None:
        for mine, p in zip(self.shadow, parameters, strict=True):
            mine.lerp_(p, 0.1)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU())))


def rehearsed(model: nn.Module) -> Profile:
    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    return lowtide.rehearse(model, step, X)


def test_an_average_in_a_plain_object_counts_once_and_in_percent_budgets() -> None:
    model = net()
    n_bytes = sum(p.nbytes for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters())

    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            average.follow(model.parameters())

    average: Average | None = None
    without = lowtide.rehearse(model, step, X)
    average = Average(model.parameters())
    found = lowtide.rehearse(model, step, X)
    assert found.static.others - without.static.others == n_bytes
    assert (found.static.inputs, found.static.parameters) == (X.nbytes, n_bytes)
    assert without.measured_plain_peak_bytes is not None
    assert found.measured_plain_peak_bytes == without.measured_plain_peak_bytes + n_bytes
    with lowtide.fit(model, step, X, budget="90%", profile=found) as fitted:
        assert fitted.plan.budget_bytes == int(0.9 * found.measured_plain_peak_bytes)
        assert fitted.verdict.measured_peak_bytes == fitted.plan.predicted.peak_bytes


def test_copies_made_by_a_rehearsal_do_not_count() -> None:
    model = net()
    large = nn.Linear(512, 512)
    before = rehearsed(model).static.others
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.large = large  # type: ignore[attr-defined]
    assert rehearsed(model).static.others == before


@pytest.mark.parametrize("kind", ["numpy's", "seen by numpy", "a view", "shared", "sparse"])
def test_every_storage_counts_that_a_tensor_has(kind: str) -> None:
    model = net()
    before = rehearsed(model).static.others
    kept: list[Tensor] = [torch.zeros(MANY)]
    if kind == "numpy's":
        kept = [torch.from_numpy(np.zeros(MANY, np.float32))]
    elif kind == "seen by numpy":
        kept[0].numpy()
    elif kind == "a view":
        kept = [kept[0][5:9], kept[0].view(2, -1)]
    elif kind == "shared":
        kept[0].share_memory_()
    elif kind == "sparse":
        kept = [torch.ones(MANY // 3).to_sparse()]  # an index of 8 bytes and a value of 4 for each
    n_bytes = 4 * (MANY - MANY % 3 if kind == "sparse" else MANY)
    profile = rehearsed(model)
    assert profile.static.others == before + n_bytes
    assert any("tensors of no model" in note for note in profile.notes)
    assert kept


def test_a_file_that_is_mapped_is_no_memory(tmp_path: Path) -> None:
    array = np.memmap(tmp_path / "data", np.float32, "w+", shape=(MANY,))
    mapped, borrowed = torch.from_numpy(array), torch.from_numpy(np.zeros(MANY, np.float32))
    assert entry.bytes_of([mapped, borrowed]) == {borrowed.data_ptr(): borrowed.nbytes}


def test_copies_that_are_set_aside_are_left_out_for_as_long_as_they_live() -> None:
    copy, mine = entry.exclude_from_entry(torch.zeros(MANY)), torch.zeros(MANY)
    assert entry.bytes_of([copy, mine]) == {mine.data_ptr(): mine.nbytes}
    where = copy.data_ptr()
    del copy
    assert where not in entry._excluded


def test_other_models_are_listed_by_class_and_bytes() -> None:
    model, teacher = net(), Teacher(nn.Linear(64, 64), nn.BatchNorm1d(64))
    critics = [nn.Bilinear(4, 4, 4) for _ in range(2)]
    again = nn.ModuleList([model[0], nn.Linear(3, 3)])  # what is the model's counts there
    found = measure_other_models(model)
    tensors = [*teacher.parameters(), *teacher.buffers()]
    assert found["Teacher"] == sum(t.nbytes for t in tensors)
    assert found["2 of Bilinear"] == sum(p.nbytes for critic in critics for p in critic.parameters())
    assert found["ModuleList"] >= sum(p.nbytes for p in again[1].parameters())
    note = next(note for note in rehearsed(model).notes if note.startswith("also in memory, and counted"))
    assert f"Teacher ({lowtide.units.format_bytes(found['Teacher'])})" in note


def test_another_model_of_the_same_class_is_told_from_the_model() -> None:
    model, average = Teacher(nn.Linear(8, 8)), Teacher(nn.Linear(8, 8))
    assert measure_other_models(model)["another Teacher"] == sum(p.nbytes for p in average.parameters())


def test_another_compiled_model_has_the_name_of_its_own_class() -> None:
    model, average = Teacher(nn.Linear(8, 8)), torch.compile(Teacher(nn.Linear(8, 8)), backend="eager")
    n_bytes = sum(p.nbytes for p in average.parameters())
    assert measure_other_models(model)["another Teacher"] == n_bytes
    assert measure_other_models(nn.Linear(8, 8))["2 of Teacher"] == 2 * n_bytes
