"""That micro-batches give the whole batch's gradients, however it is nested and however its loss averages."""

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BatchEncoding

import lowtide
from lowtide.errors import LowtideError
from lowtide.levers.accumulation.split_batch import spans
from models import build

# --- pieces ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pair:
    x: Tensor
    label: str = "a label"


class Named(NamedTuple):
    x: Tensor
    y: Tensor


X, Y = torch.arange(14.0).reshape(7, 2), torch.arange(7)

BATCHES: dict[str, tuple[Any, Callable[[Any], Tensor]]] = {
    "tensor": (X, lambda b: b),
    "dict": ({"x": X, "n": 3, "none": None}, lambda b: b["x"]),
    "ordered dict": (OrderedDict(x=X, y=Y), lambda b: b["x"]),
    "tuple": ((X, Y), lambda b: b[0]),
    "list": ([X, Y], lambda b: b[0]),
    "named tuple": (Named(X, Y), lambda b: b.x),
    "dataclass": (Pair(X), lambda b: b.x),
    "nested": ({"a": [{"b": (X, Pair(Y))}]}, lambda b: b["a"][0]["b"][0]),
    "encoding": (BatchEncoding({"input_ids": X}), lambda b: b["input_ids"]),
    "numpy": ({"x": X, "ids": np.arange(7)}, lambda b: b["x"]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_pieces_have_the_type_of_the_batch_and_views_of_its_rows(name: str) -> None:
    batch, x_of = BATCHES[name]
    parts = lowtide.micro_batches(batch, 3)
    assert [type(part) for part in parts] == [type(batch)] * 3
    assert [len(x_of(part)) for part in parts] == [3, 2, 2]
    assert torch.equal(torch.cat([x_of(part) for part in parts]), X)
    assert {x_of(part).untyped_storage().data_ptr() for part in parts} == {X.untyped_storage().data_ptr()}
    assert len(x_of(batch)) == 7


@given(st.integers(1, 50), st.integers(1, 60))
def test_spans_cover_all_rows_in_order_and_differ_by_one_at_most(rows: int, n: int) -> None:
    found = spans(rows, n)
    assert len(found) == min(rows, n)
    assert [row for start, end in found for row in range(start, end)] == list(range(rows))
    sizes = [end - start for start, end in found]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_shared_entries_go_to_every_piece() -> None:
    table = torch.ones(5)
    batch = {"x": X, "text": list("abcdefg"), "bias": torch.ones(1, 4), "scale": torch.tensor(2.0), "table": table}
    first, second = lowtide.micro_batches(batch, 2, shared={"table"})
    assert (first["text"], second["text"]) == (list("abcd"), list("efg"))
    for part in (first, second):
        assert part["bias"].shape == (1, 4)
        assert part["scale"] == 2
        assert part["table"] is table


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"x": X, "y": torch.ones(5)}, r"y can't be cut.*5 rows where the batch has 7.*shared=\{'y'\}"),
        ({"x": X, "y": torch.eye(7).to_sparse()}, "y can't be cut.*sparse"),
        ({"x": X, "y": object()}, "y can't be cut.*object"),
        ((X, nn.utils.rnn.pack_sequence([torch.ones(3)])), "1 can't be cut.*PackedSequence"),
        ({"n": 3}, "no rows were found.*dict"),
        (torch.ones(0, 3), "no rows"),
    ],
)
def test_batches_that_can_not_be_split_are_refused(batch: Any, says: str) -> None:
    with pytest.raises(LowtideError, match=says):
        lowtide.micro_batches(batch, 2)


def test_less_than_one_piece_is_refused() -> None:
    with pytest.raises(LowtideError, match="0 pieces"):
        lowtide.micro_batches(X, 0)


# --- gradients ------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids).tanh())


def tokens(rows: int = 7, length: int = 5) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, 11, (rows, length))
    labels = ids.clone()
    labels[torch.arange(length) >= torch.randint(1, length + 1, (rows, 1))] = -100  # each row has its own length
    return {"input_ids": ids, "labels": labels}


def of_tokens(model: Net, part: dict[str, Tensor], **settings: Any) -> Tensor:
    return F.cross_entropy(model(part["input_ids"]).transpose(1, 2), part["labels"], **settings)


def shifted(model: Net, part: dict[str, Tensor]) -> Tensor:
    logits, labels = model(part["input_ids"])[:, :-1], part["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


LOSSES: dict[str, Callable[[Net, dict[str, Tensor]], Tensor]] = {
    "token mean": of_tokens,
    "token mean, shifted": shifted,
    "token sum": lambda m, p: of_tokens(m, p, reduction="sum"),
    "class weights": lambda m, p: of_tokens(m, p, weight=torch.linspace(0.5, 2, 11, dtype=torch.float64)),
    "smoothed": lambda m, p: of_tokens(m, p, label_smoothing=0.1),
    "smoothed, shifted": lambda m, p: F.cross_entropy(
        m(p["input_ids"])[:, :-1].flatten(0, 1), p["labels"][:, 1:].flatten(), label_smoothing=0.3
    ),
    "smoothed sum": lambda m, p: of_tokens(m, p, label_smoothing=0.1, reduction="sum"),
    "smoothed, class weights": lambda m, p: of_tokens(
        m, p, label_smoothing=0.1, weight=torch.linspace(0.5, 2, 11, dtype=torch.float64)
    ),
    "another ignored label": lambda m, p: (
        of_tokens(m, p, ignore_index=3) if (p["labels"] >= 0).all() else of_tokens(m, p)
    ),
    "mean": lambda m, p: (m(p["input_ids"]) ** 2).mean(),
    "sum": lambda m, p: (m(p["input_ids"]) ** 2).sum(),
    "row means": lambda m, p: (m(p["input_ids"]) ** 2).mean((1, 2)).mean(),
    "squared error": lambda m, p: F.mse_loss(
        m(p["input_ids"]), torch.zeros((), dtype=torch.float64).expand((*p["input_ids"].shape, 11))
    ),
    "reshaped": lambda m, p: of_tokens(m, p).view(()),
}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor], rounding: float = 1e-12) -> None:
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient, rtol=rounding, atol=rounding, msg=name)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_and_loss_are_those_of_the_whole_batch(name: str, n: int) -> None:
    model, batch, loss_of = Net(), tokens(), LOSSES[name]
    whole = loss_of(model, batch)
    whole.backward()
    expected = gradients(model)
    loss = lowtide.accumulate(lambda part: loss_of(model, part), batch, n)
    assert_equal(gradients(model), expected)
    torch.testing.assert_close(loss, whole.detach(), rtol=1e-12, atol=1e-12)
    assert not loss.requires_grad


def test_the_mean_of_means_would_be_wrong_here() -> None:
    """Labels whose number differs from row to row, without which the tests above would prove little."""
    model, batch = Net(), tokens()
    of_tokens(model, batch).backward()
    expected = gradients(model)
    for part in lowtide.micro_batches(batch, 3):
        (of_tokens(model, part) / 3).backward()
    found = gradients(model)
    assert any((found[name] - expected[name]).abs().max() > 1e-3 for name in found)


def test_a_piece_whose_labels_are_all_ignored_adds_nothing() -> None:
    model, batch = Net(), tokens(4)
    batch["labels"][2:] = -100
    of_tokens(model, batch).backward()
    expected = gradients(model)
    loss = lowtide.accumulate(lambda part: of_tokens(model, part), batch, 2)
    assert loss.isfinite()
    assert_equal(gradients(model), expected)
    batch["labels"][:] = -100
    with pytest.raises(LowtideError, match="all labels of this batch are ignored"):
        lowtide.accumulate(lambda part: of_tokens(model, part), batch, 2)


def test_gradients_that_are_there_are_added_to() -> None:
    model, batch = Net(), tokens()
    for _ in range(2):
        of_tokens(model, batch).backward()
    expected = gradients(model)
    of_tokens(model, batch).backward()
    lowtide.accumulate(lambda part: of_tokens(model, part), batch, 3)
    assert_equal(gradients(model), expected)


@pytest.mark.parametrize("name", ["gpt2 fused", "bert", "llama"])
def test_transformers(name: str) -> None:
    """To the rounding of float32, which their loss is computed in whatever the model is."""
    case = build(name)
    case.model.double().eval()
    batch = dict(case.batch)
    batch["labels"] = batch["labels"].masked_fill(torch.arange(64) > torch.randint(5, 64, (4, 1)), -100)
    case.model(**batch).loss.backward()
    expected = gradients(case.model)
    lowtide.accumulate(lambda part: case.model(**part).loss, batch, 3)
    assert_equal(gradients(case.model), expected, rounding=1e-7)


@pytest.mark.slow
def test_under_a_plan() -> None:
    case = build("llama")
    case.model.double()
    plan = lowtide.plan(lowtide.rehearse(case.model, case.step, case.batch), "80%")
    case.model(**case.batch).loss.backward()
    expected = gradients(case.model)
    with lowtide.apply(case.model, plan):
        lowtide.accumulate(lambda part: case.model(**part).loss, case.batch, 2)
    assert_equal(gradients(case.model), expected, rounding=1e-7)


# --- how a loss averages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("first", ["input_ids", "labels"])
def test_tokens_that_are_their_own_labels_but_for_padding(first: str, n: int) -> None:
    """In the first piece nothing is padded, so there tokens and labels are equal."""
    model, ids = Net(), tokens(4)["input_ids"]
    lengths = torch.tensor([99, 4, 99, 2])
    labels = ids.masked_fill(torch.arange(ids.shape[1]) >= lengths[:, None], -100)
    batch = {first: {"input_ids": ids, "labels": labels}[first], "input_ids": ids, "labels": labels}
    of_tokens(model, batch).backward()
    expected = gradients(model)
    lowtide.accumulate(lambda part: of_tokens(model, part), batch, n)
    assert_equal(gradients(model), expected)


def test_two_indistinguishable_sets_of_labels_need_a_weight() -> None:
    model, batch = Net(), tokens(4)
    batch["others"] = batch["labels"].clone()
    batch["others"][2:] = -100
    with pytest.raises(LowtideError, match="which of the batch's tensors are its labels"):
        lowtide.accumulate(lambda part: of_tokens(model, part), batch, 2)
    assert gradients(model) == {}


UNKNOWN: dict[str, Callable[[Net, dict[str, Tensor]], Tensor]] = {
    "several losses": lambda m, p: of_tokens(m, p) + (m(p["input_ids"]) ** 2).mean(),
    "a stack of means": lambda m, p: torch.stack([of_tokens(m, p), of_tokens(m, p)]).sum(),
    "a division": lambda m, p: of_tokens(m, p, reduction="sum") / 20,
    "a smoothed mean and a mean": lambda m, p: of_tokens(m, p, label_smoothing=0.1) + m(p["input_ids"]).mean(),
    "as if smoothed": lambda m, p: 0.5 * of_tokens(m, p) + 0.5 * m(p["input_ids"]).sum() / torch.tensor(20.0),
    "labels of its own": lambda m, p: F.cross_entropy(m(p["input_ids"][:, 0]), torch.arange(len(p["labels"]))),
    "terms that are no rows": lambda m, p: (m(p["input_ids"]) ** 2).mean((0, 1)).mean(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unrecognized_average_needs_a_weight(name: str) -> None:
    model, loss_of = Net(), UNKNOWN[name]
    with pytest.raises(LowtideError, match=r"cannot determine how this loss averages: .*weight="):
        lowtide.accumulate(lambda part: loss_of(model, part), tokens(), 2)
    assert gradients(model) == {}


def test_a_given_weight_is_used() -> None:
    model, batch = Net(), tokens()

    def loss_of(part: dict[str, Tensor]) -> Tensor:
        return of_tokens(model, part) * 2 + 0

    loss_of(batch).backward()
    expected = gradients(model)
    lowtide.accumulate(loss_of, batch, 3, weight=lambda part: (part["labels"] != -100).sum())
    assert_equal(gradients(model), expected)

    (model(batch["input_ids"]).mean((1, 2)).sum() / 7).backward()
    expected = gradients(model)
    lowtide.accumulate(lambda part: model(part["input_ids"]).mean((1, 2)).sum() / 7, batch, 3, weight="sum")
    assert_equal(gradients(model), expected)

    model(batch["input_ids"]).mean().mul(3).backward()
    expected = gradients(model)
    lowtide.accumulate(lambda part: model(part["input_ids"]).mean().mul(3), batch, 3, weight="rows")
    assert_equal(gradients(model), expected)


def in_batch_negatives(model: nn.Module, part: Tensor) -> Tensor:
    z = F.normalize(model(part), dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("n", [2, 4, 16])
def test_rows_that_see_each_other_are_refused(dropout: float, n: int) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.Linear(16, 4)), torch.randn(32, 8)
    state = torch.get_rng_state()
    with pytest.raises(
        LowtideError, match=r"not a sum over rows: .*\. Rows that depend on each other, such as in-batch"
    ):
        lowtide.accumulate(lambda part: in_batch_negatives(model, part), batch, n, weight="rows")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert dropout or torch.equal(torch.get_rng_state(), state)


def hardest_triplets(model: nn.Module, part: Any) -> Tensor:
    z = model(part["x"])
    apart, same = torch.cdist(z, z), part["labels"][:, None] == part["labels"]
    return F.relu((apart * same).amax(1) - (apart + 1e6 * same).amin(1) + 0.3).mean()


def redundancy(model: nn.Module, part: Any) -> Tensor:
    z = model(part["x"])
    z = (z - z.mean(0)) / z.std(0)
    return (z.T @ z / len(z) - torch.eye(4)).square().sum()


def class_weights(model: nn.Module, part: Any) -> Tensor:
    return F.cross_entropy(model(part["x"]), part["labels"], weight=torch.tensor([0.2, 1.0, 2.0, 3.0]))


def ignoring(model: nn.Module, part: Any) -> Tensor:
    return F.cross_entropy(model(part["x"]), part["labels"], ignore_index=0)


def total(model: nn.Module, part: Any) -> Tensor:
    return F.cross_entropy(model(part["x"]), part["labels"], reduction="sum")


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    ("loss", "weight"),
    [
        (hardest_triplets, "rows"),
        (hardest_triplets, None),
        (redundancy, "sum"),
        (class_weights, "rows"),
        (ignoring, "rows"),
        (total, "rows"),
        (ignoring, "sum"),
    ],
)
def test_no_loss_gets_other_gradients_in_silence(loss: Any, weight: Any, dropout: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.Linear(16, 4))
    batch = {"x": torch.randn(32, 8), "labels": torch.tensor([1, 2, 3] * 8 + [0] * 8)}
    with pytest.raises(LowtideError, match=r"not a sum over rows|mean over labels"):
        lowtide.accumulate(lambda part: loss(model, part), batch, 4, weight=weight)
    with pytest.raises(LowtideError):
        lowtide.accumulate(functools.partial(loss, model), batch, 4, weight=weight)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_stated_weight_is_tried_out_once_and_draws_nothing() -> None:
    model, batch, calls = nn.Linear(8, 1), torch.randn(16, 8), []

    def loss_of(part: Tensor) -> Tensor:
        calls.append((len(part), torch.is_grad_enabled()))
        return model(part).mean()

    state = torch.get_rng_state()
    for _ in range(2):
        lowtide.accumulate(loss_of, batch, 4, weight="rows")
    assert calls == [(4, False), (8, False), (4, False), *[(4, True)] * 8]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_step_that_accumulates_is_fitted_though_its_rows_are_compared_in_the_first_run_only() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)), nn.Linear(64, 5))
    batch = torch.randn(2048, 64), torch.randint(5, (2048,))

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        return lowtide.accumulate(lambda part: F.cross_entropy(model(part[0]), part[1]), batch, 4)

    with lowtide.fit(model, step, batch, budget="80%") as fitted:
        assert fitted.verdict.measured_peak_bytes <= fitted.plan.budget_bytes
        assert fitted.verdict.identical


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("device", [None, "T4"])
def test_a_step_that_accumulates_is_estimated(device: str | None, smoothing: float) -> None:
    model, labels = nn.Linear(8, 5), torch.randint(5, (32,))
    labels[:3] = -100

    def loss_of(part: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(part[0]), part[1], label_smoothing=smoothing)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        lowtide.accumulate(loss_of, batch, 4)

    batch = torch.randn(32, 8), labels
    whole = lowtide.estimate(model, lambda batch: loss_of(batch).backward(), batch, device=device).peak_bytes
    assert 0 < lowtide.estimate(model, step, batch, device=device).peak_bytes <= whole
    has_graph: list[bool] = []
    model.register_forward_pre_hook(lambda *_: has_graph.append(torch.is_grad_enabled()))
    step(batch)
    assert has_graph == [False] * 3 + [True] * 4  # rows can only be compared in a real step


def test_a_piece_that_averages_in_another_way_is_noticed_before_its_backward() -> None:
    model, batch = Net(), tokens(4)

    def loss_of(part: dict[str, Tensor]) -> Tensor:
        x = model(part["input_ids"])
        return (
            x.mean()
            if part["input_ids"] is not batch["input_ids"] and bool((part["labels"] == last).all())
            else x.sum()
        )

    last = batch["labels"][2:]
    with pytest.raises(LowtideError, match=r"micro-batch 1 was reduced as a mean.*zero them"):
        lowtide.accumulate(loss_of, batch, 2)


def test_a_piece_that_is_smoothed_in_another_way_is_noticed() -> None:
    model, smoothing = Net(), iter([0.1, 0.1, 0.1, 0.1, 0.2])  # three for the check of rows
    with pytest.raises(LowtideError, match=r"micro-batch 1 .*label_smoothing=0\.2 and not 0\.1"):
        lowtide.accumulate(lambda part: of_tokens(model, part, label_smoothing=next(smoothing)), tokens(4), 2)


# --- refused --------------------------------------------------------------------------------------------------------


def test_batch_norm_is_refused_unless_accepted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
    x = X.double()
    mean = model[1].running_mean.clone()
    with pytest.raises(LowtideError, match=r"normalizes over the batch \(aten\.native_batch_norm .*batch_norm=True"):
        lowtide.accumulate(lambda part: model(part).square().mean(), x, 2)
    assert gradients(model) == {}
    assert torch.equal(model[1].running_mean, mean)
    lowtide.accumulate(lambda part: model(part).square().mean(), x, 2, batch_norm=True)
    gradients(model)
    model.eval()
    model(x).square().mean().backward()
    expected = gradients(model)
    lowtide.accumulate(lambda part: model(part).square().mean(), x, 2)
    assert_equal(gradients(model), expected)


def test_a_function_that_returns_no_loss_is_refused() -> None:
    model = Net()

    def complete(part: dict[str, Tensor]) -> Tensor:
        loss = of_tokens(model, part)
        loss.backward()
        return loss.detach()

    with pytest.raises(LowtideError, match=r"without a graph.*neither call backward"):
        lowtide.accumulate(complete, tokens(), 2)
    with pytest.raises(LowtideError, match=r"shape \[4, 5, 11\]"):
        lowtide.accumulate(lambda part: model(part["input_ids"]), tokens(), 2)
    with pytest.raises(LowtideError, match="a NoneType"):
        lowtide.accumulate(lambda part: None, tokens(), 2)  # type: ignore[arg-type,return-value]


def test_backward_may_be_the_users_own() -> None:
    model, batch = Net(), tokens()
    (of_tokens(model, batch) * 128).backward()
    expected = gradients(model)
    lowtide.accumulate(lambda p: of_tokens(model, p), batch, 3, backward=lambda loss: (loss * 128).backward())
    assert_equal(gradients(model), expected)


def test_one_piece_is_in_memory_at_a_time() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 1))
    x = torch.randn(4096, 64)

    def peak(n: int) -> int:
        model.zero_grad()
        with lowtide.measure(model) as memory:
            lowtide.accumulate(lambda part: model(part).square().mean(), x, n)
        return memory.peak_bytes

    assert peak(8) < peak(1) / 4
