"""Queries of a step for contents of tensors are answered truly, answered with a note, or refused with their line."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, TensorDataset

import lowtide
from conftest import of_lines

BATCH = torch.randn(32, 16)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def refused(model, step, batch=BATCH) -> str:
    with pytest.raises(lowtide.DataDependentStepError) as caught:
        lowtide.estimate(model, step, batch)
    return str(caught.value)


def test_a_number_may_be_logged_averaged_and_passed_on(model):
    seen = []

    def step(batch):
        loss = model(batch).square().mean()
        loss.backward()
        value = loss.item()
        seen.append(f"{value:.2f} {round(value, 1)} {math.exp(value):.2f} {(value + 1) / 2} {sum([value, value])}")
        assert math.isfinite(value)
        assert value == value

    estimated = lowtide.estimate(model, step, BATCH)
    assert seen == []  # what the step appended is gone again
    assert all("taken as 1.0" in note for note in estimated.assumed)


@pytest.mark.parametrize("device", [None, "T4"])
def test_a_tensor_in_a_text_is_the_number_that_it_is_or_some_number(device):
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleDict({f"expert_{n}": nn.Linear(16, 4 * (n + 1)) for n in range(3)})

        def forward(self, x, chosen):
            return sum(self.experts[f"expert_{n}"](x[chosen == n]).square().mean() for n in chosen.unique())

    def step(batch):
        loss = model(*batch)
        loss.backward()
        count = (batch[0].mm(batch[0].T) > loss).sum()
        text = f"loss {loss:.4f} or {loss}, {loss.detach():>8.2f}, {count} and {count:05d}"
        if text != "loss 1.0000 or 1.0,     1.00, 1 and 00001":
            raise AssertionError(text)
        with pytest.raises(TypeError):
            f"{batch[0]:.3f}"

    model = Chosen()
    lowtide.estimate(model, step, (torch.randn(4, 16), torch.tensor([0, 2, 2, 0])), device=device)


@pytest.mark.parametrize("decide", [lambda loss: loss.item() > 2, lambda loss: loss > 2, lambda loss: int(loss)])
def test_a_branch_on_an_unknown_number_is_refused_with_its_line(model, decide):
    def step(batch):
        loss = model(batch).square().mean()
        loss.backward()
        if decide(loss):
            batch.clone()

    assert "test_questions.py:" in refused(model, step)


@pytest.mark.parametrize(
    "tensor_of",
    [
        lambda v: torch.tensor([v, v]).mean(),
        lambda v: torch.full((3,), v).sum(),
        lambda v: torch.zeros(3).fill_(v).sum(),
        lambda v: (torch.ones(3) * v).sum(),
        lambda v: torch.zeros(3).index_fill(0, torch.tensor([0]), v).sum(),
    ],
)
def test_a_tensor_of_unknown_numbers_is_unknown(model, tensor_of):
    def step(batch):
        loss = model(batch).square().mean()
        loss.backward()
        known = torch.zeros(3)
        known[0] = 2.0
        assert known.sum() == 2
        if tensor_of(loss.item()) < 3:
            known.clone()

    assert "test_questions.py:" in refused(model, step)


def test_a_batch_is_looked_through_for_what_is_missing(model):
    targets = torch.randn(400_000)
    targets[::2] = math.nan

    def step(batch):
        x, y = batch
        there = ~torch.isnan(y)
        assert y[there].shape == y.masked_select(there).shape == (200_000,)
        model(x).sum().backward()

    assert lowtide.estimate(model, step, (BATCH, targets)).assumed == ()


def test_a_mask_of_unknown_contents_is_refused(model):
    def step(batch):
        h = model(batch)
        h[h > 0].sum().backward()

    assert "depends on a mask" in refused(model, step)
    assert "test_questions.py:" in refused(model, step)


def test_health_is_assumed_and_noted(model):
    def step(batch):
        loss = model(batch).square().mean()
        if torch.isnan(loss) or not torch.isfinite(loss):
            raise AssertionError
        if torch.isinf(model[0].weight).any():
            raise AssertionError
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    estimated = lowtide.estimate(model, step, BATCH)
    assert len(estimated.assumed) == 3  # lines
    assert all(note.endswith("no NaN or infinity") for note in estimated.assumed)


def test_contents_that_follow_from_the_batch_are_known(model):
    lengths = []

    def step(batch):
        x, mask = batch
        if not mask.all():
            lengths.append(int(mask.sum(-1).max()))
        rows = mask.any(-1).nonzero().squeeze(1)
        assert rows.shape == (3,)
        assert mask[0].tolist() == [True, False]
        assert np.asarray(mask[2]).all()
        h = model(x)[mask.any(-1)]
        assert h.shape == (3, 4)
        h.sum().backward()
        assert lengths[-1] == 2

    mask = torch.tensor([[True, False], [False, False], [True, True], [False, True]])
    assert lowtide.estimate(model, step, (torch.randn(4, 16), mask)).assumed == ()


def test_a_value_written_over_is_not_known_any_longer(model):
    def step(batch):
        x, count = batch
        total = count + 1
        assert total.item() == 4
        total += model(x).sum().long()
        return range(int(total))

    assert "test_questions.py:" in refused(model, step, (BATCH, torch.tensor(3)))


@pytest.mark.parametrize("device", [None, "L4"])
def test_contents_made_from_lists_and_arrays_are_known(device):
    model = nn.Embedding(128, 8)
    place = "cuda" if device else "cpu"
    texts = [b"to be", b"or not to be, that is", b"the question"]

    def padded() -> list[torch.Tensor]:
        rows = [torch.tensor(list(text)) for text in texts]
        by_torch = pad_sequence(rows, batch_first=True)
        by_slices = torch.zeros(3, 21, dtype=torch.long)
        by_rows = torch.empty(3, 21, dtype=torch.long).fill_(0)
        array = np.zeros((3, 21), dtype=np.int64)
        for row, text in enumerate(texts):
            by_slices[row, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            by_rows.select(0, row).narrow(0, 0, len(text)).copy_(rows[row])
            array[row, : len(text)] = list(text)
        return [by_torch, by_slices, by_rows, torch.from_numpy(array)]

    def step(batch):
        for ids in padded():
            mask = ids > 0
            assert not mask.all()
            assert mask.sum(1).tolist() == [5, 21, 12]
            ids[~mask] = 127
            assert ids[0, 5:].eq(127).all()
            model(ids.to(place))[mask.to(place)].sum().backward()

    assert not of_lines(lowtide.estimate(model, step, None, **({"device": device} if device else {})).assumed)


def test_a_write_through_one_view_reaches_all_views_and_no_real_tensor(model):
    mask, array = torch.ones(4, 6, dtype=torch.long), np.zeros(3)

    def step(batch):
        mask.fill_(1)  # it is the second step's, too
        mask[2, 1:3] = 0
        rows = mask.view(-1)[12:18]
        assert rows.tolist() == [1, 0, 0, 1, 1, 1]
        rows.numpy()[3] = 7
        assert mask.sum() == 28
        mask.t()[0].copy_(mask[:, 3])
        assert mask[2].tolist() == [7, 0, 0, 7, 1, 1]
        torch.from_numpy(array).add_(1)
        model(batch).sum().backward()

    lowtide.estimate(model, step, BATCH)
    assert torch.equal(mask, torch.ones(4, 6, dtype=torch.long))
    assert not array.any()


def test_after_an_unknown_write_no_view_is_known(model):
    def step(batch):
        mask = torch.ones(4, 6, dtype=torch.long)
        row = mask[0]
        mask[3] = model(batch)[0, 0].long()
        return row.tolist()[0] == 1

    assert "test_questions.py:" in refused(model, step)


def test_statistics_written_by_batch_norm_are_unknown() -> None:
    model = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 4))

    def step(batch):
        model(batch).sum().backward()
        return bool(model[0].running_mean[0] > 0)

    assert "test_questions.py:" in refused(model, step)
    model[0].eval()
    lowtide.estimate(model, step, BATCH)  # frozen it writes nothing


def test_chosen_indices_are_within_bounds(model):
    table = torch.arange(3)

    def step(batch):
        chosen = table.repeat(2)[model(batch).argmax(1)[:4]]  # the model knows which of the 4 it never gives
        small = table[model(batch).argmax(1)[:8]]
        chosen = torch.stack([chosen, small[:4]])
        model(batch).sum().backward()
        return len(chosen)

    lowtide.estimate(model, step, BATCH)


def test_memory_that_nothing_was_written_to_is_zero(model):
    def step(batch):
        assert not torch.empty(64, dtype=torch.long).any()
        assert not torch.ones(64, dtype=torch.long).new_empty(64).any()
        model(batch).sum().backward()

    lowtide.estimate(model, step, BATCH)


def test_which_rows_a_loader_takes_is_no_assumption(model):
    data = TensorDataset(torch.randn(64, 16))
    rows = []

    def step(batch):
        for (x,) in DataLoader(data, batch_size=32, shuffle=True):
            rows.append(len(x))
            model(x).sum().backward()
        mixed = torch.randperm(4).tolist()
        assert sorted(mixed) == [0, 1, 2, 3]

    notes = lowtide.estimate(model, step, BATCH).assumed
    assert len(notes) == 1  # the line of `mixed`
    assert "random numbers" in notes[0]


def test_a_branch_on_random_numbers_is_noted_and_advances_no_generator(model):
    generator = torch.Generator().manual_seed(3)
    before, of_all = generator.get_state(), torch.get_rng_state()

    def step(batch):
        x = batch if torch.rand((), generator=generator) < 0.5 else batch[:16]
        chosen = torch.rand(len(x), 4) < 0.3
        model(x)[chosen].sum().backward()

    estimated = lowtide.estimate(model, step, BATCH)
    assert len(estimated.assumed) == 2  # lines
    assert all("random" in note for note in estimated.assumed)
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), of_all)


@pytest.mark.parametrize("device", [None, "T4"])
def test_an_accuracy_is_unknown_and_needs_no_note(model, device):
    labels = torch.arange(32) % 4

    def step(batch):
        found = model(batch)
        found.sum().backward()
        right = found.argmax(1).cpu() == labels
        n_right = 0
        n_right += right.sum().item()
        accuracies = right.float().mean().item(), right.sum().item() / 32, 100.0 * right.sum().item() / 32
        print(f"{n_right} {right.float().mean():.2f} {right.sum().item()}", accuracies)  # noqa: T201
        rows = int(found.argmax(1).eq(0).sum().item() / 2)  # as many as an expert may get
        assert batch[:rows].shape == (4, 16)
        for accuracy in accuracies:
            if accuracy > 0.9:
                break

    rows, goes_on = of_lines(lowtide.estimate(model, step, BATCH, device=device).assumed)
    assert rows.endswith("choices made here by the largest value are assumed to be spread evenly")
    assert goes_on.endswith("training is assumed to continue")


def test_gradient_scaling_and_schedules_work_and_come_back(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")
    losses, count = [], 0

    def step(batch):
        nonlocal count
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss)
        count += 1

    estimated = lowtide.estimate(model, step, BATCH)
    assert estimated.static.optimizer > 0  # the scaler found no overflow, and the optimizer stepped
    assert (losses, count, scaler._scale, schedule.last_epoch) == ([], 0, None, 0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not optimizer.state


def test_values_compared_by_an_optimizer_are_assumed_small() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adafactor(model.parameters())

    def step(batch):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    estimated = lowtide.estimate(model, step, torch.ones(2, 4))
    assert any("an optimizer compares" in line for line in estimated.assumed)
    measured = lowtide.timeline(model, step, torch.ones(2, 4))
    assert estimated.timeline.peak_bytes == pytest.approx(measured.peak_bytes, abs=64)


def test_a_batch_that_is_packed_keeps_its_sizes_on_the_cpu() -> None:
    model = nn.LSTM(8, 8, batch_first=True)
    packed = pack_padded_sequence(torch.randn(2, 5, 8), torch.tensor([5, 3]), batch_first=True)

    def step(batch):
        model(batch)[0].data.sum().backward()

    assert "aten::_cudnn_rnn" in str(lowtide.estimate(model, step, packed, device="L4"))


def test_packed_sequences_have_the_lengths_that_the_batch_has() -> None:
    model = nn.LSTM(8, 8, batch_first=True)

    def step(batch):
        packed = nn.utils.rnn.pack_padded_sequence(batch[0], batch[1], batch_first=True)
        assert packed.data.shape == (8, 8)
        model(packed)[0].data.sum().backward()

    batch = torch.randn(2, 5, 8), torch.tensor([5, 3])
    estimated = lowtide.estimate(model, step, batch, device="L4")
    assert not estimated.is_sure  # cuDNN documents no bound of what it reserves
    taken = estimated.gpu.total_bytes - estimated.left_bytes
    assert estimated.interval[1] < taken < estimated.interval[1] + 2**30  # and a context
    assert "counted as measured on one GPU" in str(estimated)
    assert estimated.peak_reserved_bytes < estimated.gpu.total_bytes


class Tagger(nn.Module):
    """A class for each token, from sequences of different lengths."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.rnn = nn.LSTM(64, 128, batch_first=batch_first)
        self.out = nn.Linear(128, 10)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        first = self.rnn.batch_first
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=first, enforce_sorted=False)
        out, found = pad_packed_sequence(self.rnn(packed)[0], batch_first=first, total_length=32, padding_value=1.0)
        assert [int(length) for length in found] == [20, 31] * 4 + [31] * 8
        return self.out(out)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("batch_first", [True, False])
def test_sequences_that_are_packed_and_padded_again_need_what_they_need(batch_first: bool) -> None:
    model = Tagger(batch_first)
    ids = torch.randint(0, 100, (16, 32) if batch_first else (32, 16))
    batch = ids, torch.tensor([20, 31] * 4 + [31] * 8)

    def step(batch):
        model(*batch).square().mean().backward()

    estimated, measured = lowtide.estimate(model, step, batch), lowtide.timeline(model, step, batch)
    assert estimated.timeline.peak_bytes == measured.peak_bytes
    assert estimated.unknown == ()
    assert lowtide.estimate(model, step, batch, device="L4").peak_reserved_bytes > 0


def test_packed_sequences_whose_lengths_depend_on_numbers_are_refused() -> None:
    model = nn.LSTM(8, 8, batch_first=True)

    def step(batch):
        lengths = (model.weight_ih_l0.sum(1).sigmoid()[:2] * 5).long() + 1
        packed = pack_padded_sequence(batch, lengths, batch_first=True, enforce_sorted=False)
        model(packed)[0].data.sum().backward()

    with pytest.raises(lowtide.RehearsalError, match=r"test_questions.py:\d+"):
        lowtide.estimate(model, step, torch.randn(2, 6, 8))


@pytest.fixture
def halved() -> Iterator[Callable[[Tensor], Tensor]]:
    """An operator of one's own that says nothing of its results."""
    library = torch.library.Library("lowtide_tests", "DEF")
    library.define("halved(Tensor x) -> Tensor")
    library.impl("halved", lambda x: x / 2, "CPU")
    yield torch.ops.lowtide_tests.halved
    library._destroy()


@pytest.mark.parametrize("where", [{}, {"device": "L4"}], ids=["here", "gpu"])
def test_an_operator_without_a_kernel_for_fake_tensors_is_named_with_its_line(
    where: dict[str, str], halved: Callable[[Tensor], Tensor]
) -> None:
    model = nn.Linear(8, 8)

    def nested(batch: Tensor) -> None:
        torch.nested.nested_tensor([model(batch), batch])

    def own(batch: Tensor) -> None:
        model(halved(batch)).sum().backward()

    named = r"test_questions.py:\d+: aten::_nested_tensor_from_tensor_list is .*\n.*lowtide.timeline"
    with pytest.raises(lowtide.RehearsalError, match=named):
        lowtide.estimate(model, nested, torch.ones(4, 8), **where)
    with pytest.raises(lowtide.RehearsalError, match=r"lowtide_tests::halved is .*\n.*register_fake"):
        lowtide.estimate(model, own, torch.ones(4, 8), **where)
