"""A loss in which rows see each other has the whole batch's gradients in pieces, by cached representations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from conftest import RunPython

Encode = Callable[[Any], Any]


def tower(dropout: float = 0.1) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(32), nn.Linear(32, 8))


class Pair(nn.Module):
    """Two towers and a temperature, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.scale = tower(), tower(), nn.Parameter(torch.tensor(1.0))

    def encode(self, part: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"image": self.image(part["x"]), "text": self.text(part["y"])}

    def loss_of(self, found: dict[str, Tensor]) -> Tensor:
        image, text = (F.normalize(found[name], dim=1) for name in ("image", "text"))
        logits = self.scale.exp() * image @ text.T
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def made() -> tuple[Pair, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Pair().double()
    return model, {"x": torch.randn(37, 8).double(), "y": torch.randn(37, 8).double()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def test_gradients_of_eight_pieces_are_the_whole_batchs() -> None:
    model, batch = made()
    state = torch.get_rng_state()
    parts = [model.encode(part) for part in lowtide.micro_batches(batch, 8)]  # all graphs at once: the same masks
    expected = model.loss_of({name: torch.cat([part[name] for part in parts]) for name in ("image", "text")})
    expected.backward()
    after, wanted = torch.get_rng_state(), gradients(model)
    torch.set_rng_state(state)
    loss = lowtide.accumulate(model.loss_of, batch, 8, representations=model.encode)
    found = gradients(model)
    assert torch.equal(loss, expected.detach())
    assert not loss.requires_grad
    assert torch.equal(torch.get_rng_state(), after)
    assert wanted.keys() == found.keys() == dict(model.named_parameters()).keys()
    for name in wanted:
        assert (found[name] - wanted[name]).abs().max() <= 1e-12, name


def test_no_piece_is_in_memory_while_another_is() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 4096), nn.GELU(), nn.Linear(4096, 8)), torch.randn(512, 8)

    def loss_of(found: Tensor) -> Tensor:
        return F.cross_entropy(found @ found.T, torch.arange(len(found)))

    peaks = []
    for n in (1, 8):
        with lowtide.measure() as memory:
            lowtide.accumulate(loss_of, batch, n, representations=model)
        peaks.append(memory.peak_bytes)
        model.zero_grad()
    assert peaks[1] < peaks[0] / 4


@pytest.mark.parametrize("weight", [None, "rows"])
def test_a_loss_that_mixes_rows_is_refused_by_name(weight: Any) -> None:
    model, batch = made()
    with pytest.raises(lowtide.LowtideError, match=r"not a sum over rows: .*representations=encode.*GradCache"):
        lowtide.accumulate(lambda part: model.loss_of(model.encode(part)), batch, 4, weight=weight)
    assert gradients(model) == {}


def test_a_second_encoding_that_differs_is_refused() -> None:
    model, batch = made()
    other = torch.Generator().manual_seed(0)

    def encode(part: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: t + torch.rand(t.shape, generator=other) for name, t in model.encode(part).items()}

    with pytest.raises(lowtide.LowtideError, match="piece 0 gave other representations when it was encoded again"):
        lowtide.accumulate(model.loss_of, batch, 4, representations=encode)


def _detached(model: Pair) -> Encode:
    return lambda part: {name: tensor.detach() for name, tensor in model.encode(part).items()}


def _one_row(model: Pair) -> Encode:
    return lambda part: {name: tensor.mean(0) for name, tensor in model.encode(part).items()}


def _nothing(model: Pair) -> Encode:
    return lambda part: ()


def _normalized(model: Pair) -> Encode:
    model.image = nn.Sequential(model.image, nn.BatchNorm1d(8).double())
    return model.encode


@pytest.mark.parametrize(
    ("encode_of", "settings", "words"),
    [
        (_detached, {}, "no representation has a graph and a gradient"),
        (_one_row, {}, r"a row for each of the 10 rows of its piece.*returned shape \[8\]"),
        (_nothing, {}, r"returned \(\), which has no tensor"),
        (lambda model: 3, {}, "takes a function that encodes a piece; found int"),
        (_normalized, {}, "the model normalizes over the batch"),
        (lambda model: model.encode, {"weight": "rows"}, "leave weight and batch_norm out"),
    ],
)
def test_what_is_refused(encode_of: Callable[[Pair], Encode], settings: dict[str, Any], words: str) -> None:
    model, batch = made()
    with pytest.raises(lowtide.LowtideError, match=words):
        lowtide.accumulate(model.loss_of, batch, 4, representations=encode_of(model), **settings)


def test_a_loss_that_calls_backward_itself_is_refused() -> None:
    model, batch = made()

    def loss_of(found: dict[str, Tensor]) -> Tensor:
        loss = model.loss_of(found)
        loss.backward()
        return loss

    with pytest.raises(lowtide.LowtideError, match=r"called backward itself.*Zero the gradients"):
        lowtide.accumulate(loss_of, batch, 4, representations=model.encode)


def test_keys_without_a_gradient_are_kept_in_a_queue_without_a_graph() -> None:
    model, batch = made()
    queue = torch.randn(50, 8).double()

    def encode(part: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            keys = F.normalize(model.text(part["y"]), dim=1)
        return F.normalize(model.image(part["x"]), dim=1), keys

    def loss_of(found: tuple[Tensor, Tensor]) -> Tensor:  # InfoNCE, as in MoCo
        nonlocal queue
        queries, keys = found
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.T], 1)
        queue = torch.cat([queue[len(keys) :], keys])
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))

    lowtide.accumulate(loss_of, batch, 4, representations=encode)
    assert not queue.requires_grad
    assert all(name.startswith("image.") for name in gradients(model))


def two_views(found: tuple[Tensor, Tensor]) -> Tensor:
    """SimCLR's NT-Xent."""
    rows = F.normalize(torch.cat(found), dim=1)
    similar = (rows @ rows.T / 0.5).masked_fill(torch.eye(len(rows), dtype=torch.bool), -torch.inf)
    return F.cross_entropy(similar, torch.arange(len(rows)).roll(len(rows) // 2))


def hardest(found: tuple[Tensor, Tensor]) -> Tensor:
    """Triplets of the hardest rows of a batch; the second representation are labels."""
    rows, labels = found
    far, same = torch.cdist(rows, rows), labels[:, None] == labels
    near = far.masked_fill(same, torch.inf).min(1).values
    return F.relu((far * same).max(1).values - near + 0.3).mean()


@pytest.mark.parametrize("loss_of", [two_views, hardest])
def test_other_losses_with_negatives_of_the_batch(loss_of: Callable[[Any], Tensor]) -> None:
    model, batch = made()
    batch["labels"] = torch.arange(37) // 4

    def encode(part: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        other = model.image(part["y"]) if loss_of is two_views else part["labels"]
        return model.image(part["x"]), other

    state = torch.get_rng_state()
    expected = loss_of(tuple(map(torch.cat, zip(*map(encode, lowtide.micro_batches(batch, 8)), strict=True))))
    expected.backward()
    wanted = gradients(model)
    torch.set_rng_state(state)
    assert torch.equal(lowtide.accumulate(loss_of, batch, 8, representations=encode), expected.detach())
    for name, found in gradients(model).items():
        assert (found - wanted[name]).abs().max() <= 1e-12, name

    def whole(part: dict[str, Tensor]) -> Tensor:
        return loss_of(encode(part))

    weights: tuple[Any, ...] = (None, "rows", "rows")
    for weight in weights:  # a second try is refused, too
        with pytest.raises(lowtide.LowtideError, match="representations="):
            lowtide.accumulate(whole, batch, 4, weight=weight)


def test_a_scaler_scales_all_gradients() -> None:
    model, batch = made()
    model.eval()
    lowtide.accumulate(model.loss_of, batch, 4, representations=model.encode)
    wanted = gradients(model)
    lowtide.accumulate(
        model.loss_of, batch, 4, representations=model.encode, backward=lambda loss: (loss * 8).backward()
    )
    for name, found in gradients(model).items():
        assert torch.allclose(found, 8 * wanted[name], rtol=1e-12)


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_all_rows(run_python: RunPython, tmp_path: Path) -> None:
    program = Path(__file__).parents[1] / "processes" / "together.py"
    done = run_python(str(program), str(tmp_path / "meeting"), "contrastive.gathers", path=program.parents[1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("contrastive.gathers: as it should be") == 2


@pytest.mark.parametrize("device", [None, "T4"])
def test_a_step_with_representations_is_estimated(device: str | None) -> None:
    pair, batch = made()

    def step(batch: dict[str, Tensor]) -> None:
        lowtide.accumulate(pair.loss_of, batch, 2, representations=pair.encode)

    assert lowtide.estimate(pair, step, batch, device=device).peak_bytes > 0
