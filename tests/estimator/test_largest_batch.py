"""The largest size is the one whose peak fits while the next one's does not."""

import math

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lowtide
from lowtide.estimator.batch_search import _find_largest_within


@given(
    st.integers(1, 5000),
    st.integers(1, 300),
    st.integers(0, 10_000),
    st.sampled_from([lambda n: n, lambda n: n * n, lambda n: n + n // 7 * 50, math.isqrt]),
)
def test_the_search_finds_it_for_any_peak_that_grows(most, start, budget, grows):
    guesses = []

    def peak(n):
        guesses.append(n)
        return 100 + grows(n)

    found = _find_largest_within(peak, budget, start=min(start, most), most=most)
    assert found == max((n for n in range(1, most + 1) if 100 + grows(n) <= budget), default=0)
    assert len(set(guesses)) <= 4 * math.log2(most + 1) + 6


@pytest.fixture
def setting():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch):
        nn.functional.cross_entropy(model(batch["x"]).flatten(0, -2), batch["y"].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def test_the_largest_batch(setting):
    model, step = setting
    batch = {"x": torch.randn(16, 64), "y": torch.arange(16) % 10}
    found = lowtide.largest_batch(model, step, batch, budget="2MiB")
    assert found.estimate.peak_bytes <= found.budget_bytes == 2 * 2**20
    one_more = {"x": torch.randn(found.size + 1, 64), "y": torch.arange(found.size + 1) % 10}
    assert lowtide.estimate(model, step, one_more).peak_bytes > found.budget_bytes
    assert len(found.peaks) <= 6
    real = {"x": torch.randn(found.size, 64), "y": torch.arange(found.size) % 10}
    measured = lowtide.timeline(model, step, real).peak_bytes + found.estimate.static.total
    assert measured == pytest.approx(found.estimate.peak_bytes, rel=0.001)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("kind", ["arrays", "labels in a list", "entries of rows"])
def test_arrays_and_lists_are_lengthened_too(setting, kind):
    model, step = setting
    batch = {"x": torch.randn(16, 64), "y": torch.arange(16) % 10}
    expected = lowtide.largest_batch(model, step, batch, budget="2MiB")

    def other_step(batch):
        x, y = batch
        if kind == "entries of rows":
            y = [row["label"] for row in y]
        step({"x": torch.as_tensor(x, dtype=torch.float32), "y": torch.as_tensor(y)})

    labels = [int(label) for label in batch["y"]]
    x, y = {
        "arrays": (batch["x"].numpy(), batch["y"].numpy()),
        "labels in a list": (batch["x"], labels),
        "entries of rows": (batch["x"], [{"label": label, "size": torch.ones(2)} for label in labels]),
    }[kind]
    found = lowtide.largest_batch(model, other_step, (x, y), budget="2MiB")
    assert found.size == pytest.approx(expected.size, rel=0.1)  # an array is not counted, but what is made of it


def test_a_size_that_the_step_can_not_be_taken_at_is_said():
    model = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.Linear(512, 10))

    def step(batch):
        model(batch).sum().backward()
        model.zero_grad()

    with pytest.raises(
        lowtide.RehearsalError, match=r"size 4 needs .* at the smaller size 1 the step fails: .* more than 1 value"
    ):
        lowtide.largest_batch(model, step, torch.randn(4, 256), budget=100)


def test_a_batch_without_tensors_is_refused(setting):
    model, step = setting
    with pytest.raises(lowtide.RehearsalError, match="no tensor or array of the batch has a dimension 0"):
        lowtide.largest_batch(model, step, ["a text", 3], budget="2MiB")


def test_the_longest_sequence_up_to_what_the_model_takes(setting):
    model, step = setting
    batch = {"x": torch.randn(4, 8, 64), "y": torch.zeros(4, 8, dtype=torch.long)}
    assert lowtide.largest_batch(model, step, batch, budget="8MiB", batch_dim=1, most=20).size == 20


def test_if_not_even_one_fits_the_smallest_peak_is_said(setting):
    model, step = setting
    batch = {"x": torch.randn(16, 64), "y": torch.arange(16) % 10}
    with pytest.raises(lowtide.Infeasible) as caught:
        lowtide.largest_batch(model, step, batch, budget="100KiB")
    assert caught.value.smallest_peak_bytes == sum(caught.value.parts.values()) > 100 * 2**10


def test_a_batch_without_that_dimension_is_refused(setting):
    model, step = setting
    with pytest.raises(lowtide.RehearsalError, match="dimension 5"):
        lowtide.largest_batch(model, step, torch.randn(2, 2), budget="1MiB", batch_dim=5)


def test_the_largest_batch_for_a_gpu_is_sure_to_fit_and_twice_that_is_not(setting):
    model, step = setting
    batch = {"x": torch.randn(16, 64), "y": torch.arange(16) % 10}
    found = lowtide.largest_batch(model, step, batch, device="cuda:2GiB")
    assert found.estimate.fits
    assert found.peaks[found.size] <= found.budget_bytes < 2 * 2**30
    larger = {"x": torch.empty(2 * found.size, 64), "y": torch.zeros(2 * found.size, dtype=torch.long)}
    assert not lowtide.estimate(model, step, larger, device="cuda:2GiB").fits
    with pytest.raises(lowtide.BudgetError, match="the peak that it is a share of is not known") as refused:
        lowtide.largest_batch(nn.Linear(1, 1), lambda batch: None, torch.randn(1), budget="50%")
    assert "60%" not in str(refused.value)
    with pytest.raises(lowtide.BudgetError, match="RTX 4090"):
        lowtide.largest_batch(model, step, batch)


def test_a_batch_that_is_no_plain_container(setting):
    model, step = setting
    batch = {"x": torch.randn(16, 64), "y": torch.arange(16) % 10}
    expected = lowtide.largest_batch(model, step, batch, budget="2MiB").size
    assert lowtide.largest_batch(model, step, transformers.BatchEncoding(batch), budget="2MiB").size == expected
