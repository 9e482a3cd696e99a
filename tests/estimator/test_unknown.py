"""Unknown numbers and arrays may be printed, counted and passed on; branches on them are refused."""

import copy
import pickle
import statistics

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score
from torch import nn

import lowtide
from conftest import of_lines

BATCH = torch.randn(8, 16)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def asked(model, ask, device=None):
    """Have a step ask of what the model gives, on the CPU or on a GPU."""

    def step(batch):
        out = model(batch)
        ask(out.detach().cpu())
        out.square().mean().backward()

    return lowtide.estimate(model, step, BATCH, device=device)


@pytest.mark.parametrize("device", [None, "T4"])
def test_metrics_of_unknown_arrays_may_be_printed(model, device):
    labels = np.arange(8) % 4

    def ask(out):
        logits = out.numpy()
        assert type(logits + 1) is type(logits.T) is type(np.log(logits)) is type(logits)
        assert (logits.shape, logits.dtype, logits[0].shape, logits[:, :2].shape) == ((8, 4), np.float32, (4,), (8, 2))
        found = logits.argmax(1)
        accuracy = (found == labels).mean()
        probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        for number in (accuracy, logits.max(), logits[0, 0], logits[0, 0].item(), np.median(logits), logits.std()):
            assert f"{number:.2f} {round(number, 1)}" == "1.00 1.0"
        for score in (accuracy_score(labels, found), f1_score(labels, found, average="macro", zero_division=0.0)):
            assert 0 <= score <= 1
        assert 0 <= roc_auc_score(labels == 1, probabilities[:, 1]) <= 1
        kept = [*found, *logits.tolist()[0], np.concatenate([logits, logits]).sum()]
        assert len(kept) == 13
        written = np.zeros((8, 4))
        written += logits
        logits[0] = 0

    notes = of_lines(asked(model, ask, device).assumed)
    assert any(note.endswith("the numbers of an array, which are not known, are taken as 1") for note in notes)
    assert all("test_unknown.py:" in note for note in notes), notes


def test_copies_are_plain_and_large_arrays_take_no_memory(model):
    def ask(out):
        plain = pickle.loads(pickle.dumps(out.numpy()))
        assert type(plain) is np.ndarray
        assert plain.sum() == 32
        assert copy.deepcopy(out.numpy()).shape == (8, 4)
        large = out.mean().expand(2**40).numpy()
        assert large.shape == (2**40,)
        assert not large.flags.writeable

    asked(model, ask)


@pytest.mark.parametrize(
    "decide",
    [
        lambda a: a.mean() > 0.5,
        lambda a: a[0, 0] > 0.5,
        lambda a: bool((a > 0).all()),
        lambda a: [1, 2][a[0].argmax()],
        lambda a: [1, 2][a.argmin(1)[0]],
        lambda a: 3 in a,
        lambda a: int(a.sum()),
        lambda a: range(a[0, 0].astype(int)) if hasattr(a[0, 0], "astype") else range(a[0, :1].astype(int)[0]),
        lambda a: sorted(a.tolist()[0]),
        lambda a: np.allclose(a, 1) and 5,
    ],
)
def test_a_branch_on_an_unknown_array_is_refused_with_its_line(model, decide):
    def ask(out):
        found = decide(out.numpy())
        if found:
            out.clone()

    with pytest.raises(
        lowtide.DataDependentStepError, match=r"test_unknown\.py:\d+: it decides by a number from a tensor"
    ):
        asked(model, ask)


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda a: np.nonzero(a), r"numpy\.nonzero gives"),
        (lambda a: a.nonzero(), r"numpy\.nonzero gives"),
        (lambda a: np.where(a > 0), r"numpy\.where gives"),
        (lambda a: np.unique(a), r"numpy\.unique gives"),
        (lambda a: a[a > 0], "depends on a mask"),
        (lambda a: a[0][a[0] > 0], "depends on a mask"),
    ],
)
def test_arrays_whose_sizes_depend_on_unknown_contents_are_refused(model, ask, why):
    with pytest.raises(lowtide.DataDependentStepError, match=why):
        asked(model, lambda out: ask(out.numpy()))


@pytest.mark.parametrize(
    "tensor_of",
    [
        torch.from_numpy,
        torch.as_tensor,
        torch.tensor,
        lambda a: torch.tensor([a[0], a[1]]),
        lambda a: torch.from_numpy(a.T[1:].astype("d")),
    ],
)
def test_a_tensor_of_such_an_array_is_unknown(model, tensor_of):
    with pytest.raises(lowtide.DataDependentStepError, match="it decides by the contents of a tensor"):
        asked(model, lambda out: tensor_of(out.numpy() * 2).sum() > 3 and None)


def test_unknown_whole_numbers_may_be_printed_and_counted(model):
    def ask(out):
        count, n = (out > 0).sum(), 0
        n += int(count)
        n += int(count.item())
        text = f"{int(count)} " + "%d of %d" % (count.item(), n) + " {:d}".format(int(count.item()))  # noqa: UP031, UP032
        assert text == "1 1 of 2 1"
        with pytest.raises(lowtide.DataDependentStepError):
            n = int(count)
        with pytest.raises(lowtide.DataDependentStepError):
            out[: int(count.item())].sum()

    assert all("taken as 1" in note for note in asked(model, ask).assumed)


def test_the_mean_of_unknown_numbers_is_unknown(model):
    def ask(out):
        losses = [out.sum().item() for _ in range(2)]
        return bool(statistics.mean(losses) > 2)

    with pytest.raises(lowtide.DataDependentStepError, match="decides by a number"):
        asked(model, ask)
