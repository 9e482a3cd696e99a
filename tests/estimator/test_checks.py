"""Conditions that only check are assumed to pass, and noted with their line; other branches on contents are refused."""

import copy
import logging
import math
import warnings

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import distributions, nn
from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig
from transformers.optimization import Adafactor

import lowtide
from conftest import of_lines

BATCH = torch.randn(32, 16)
log = logging.getLogger(__name__)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def estimated(model, ask, **options):
    def step(batch):
        found = model(batch)
        loss = found.square().mean()
        ask(found > 0, loss.item())
        loss.backward()

    return lowtide.estimate(model, step, BATCH, **options)


def negated(q, n):
    if not q.all():
        raise ValueError


def asserted(q, n):
    assert q.any() and not q[0].any(), "both"  # noqa: PT018
    assert n < 100
    assert bool(q.all())
    assert torch.equal(q, q)
    assert torch.allclose(q.float(), q.double().float())


def compared(q, n):
    if n > 1e4:
        message = f"the loss is {n}"
        raise ValueError(message)


def over_lines(q, n):
    if n != n or not q.all() or q.all().item():
        raise ValueError(
            "several lines",
        )


def told(q, n):
    if q.any():
        warnings.warn("some are positive", stacklevel=1)
    if n > 3:
        log.info("large")


def each(q, n):
    assert all(row.any() for row in q)
    if any(row.any() for row in q):
        raise ValueError


def otherwise(q, n):
    if n is None:
        raise TypeError
    elif q.any():
        raise ValueError
    if q.all():
        pass
    else:
        raise ValueError


def of_distributions(q, n):
    scale = q.float().exp()
    look = {"validate_args": True}  # torch's compiler turns it off
    distributions.Normal(scale, scale, **look).rsample()
    distributions.MultivariateNormal(scale, torch.diag_embed(scale), **look).log_prob(scale)
    distributions.Categorical(logits=scale, **look).log_prob(q[:, 0].long())


PASSING = [negated, asserted, compared, over_lines, told, each, otherwise, of_distributions]


@pytest.mark.parametrize("device", [None, "T4"])
@pytest.mark.parametrize("ask", PASSING, ids=lambda ask: ask.__name__)
def test_a_check_passes_and_its_line_is_noted(model, ask, device):
    notes = [note for note in estimated(model, ask, device=device).assumed if "a check is assumed to pass" in note]
    first = ask.__code__.co_firstlineno
    n_lines = max(line for *_, line in ask.__code__.co_lines() if line) - first
    assert notes
    for note in notes:
        assert f"{__name__.rpartition('.')[2]}.py:" in note
        assert first < int(note.partition(".py:")[2].partition(":")[0]) <= first + n_lines


def loop(q, n):
    while n < 3:
        n += 1


def choice(q, n):
    return 1 if q.all() else 2


def inside_of_one(q, n):
    if n is None or isinstance(n, str):
        raise TypeError
    if isinstance(n, float):
        if n > 1:
            q.clone()
        raise KeyError


def made_of(q, n):
    if bool(q.all()) == bool(n > 3):
        raise ValueError


def compares(q, n):
    if torch.equal(q, q.roll(1)):
        q.clone()


def kept(q, n):
    return not q.all()


def size(q, n):
    rows = 32
    if n > 3:
        rows = 16
    q[:rows].clone()


def passed_on(q, n):
    if n > 3:
        half = True
    else:
        half = False
    kept = half
    if kept:
        q.clone()


def given_back(q, n):
    width = 3
    if n > 3:
        width = 4
    return width


def turn(q, n):
    for row in q:
        if n > 3:
            row.clone()
            continue
        row.t()


def given(q, n):
    if n > 3:
        return q
    return None


def told_after_work(q, n):
    print("sum", q.sum() if n > 3 else q)  # noqa: T201


def forever(q, n):
    while True:
        if n < 3:
            break


class Leaves(nn.Module):
    def forward(self, n):
        for _ in range(3):
            if n > 3:
                break


def inside_of_a_module(q, n):
    Leaves()(n)


@pytest.mark.parametrize(
    "ask",
    [
        *(loop, choice, inside_of_one, made_of, compares, kept, size, passed_on, given_back, turn, given),
        *(told_after_work, forever, inside_of_a_module),
    ],
    ids=lambda ask: ask.__name__,
)
def test_a_branch_on_unknown_contents_is_refused(model, ask):
    with pytest.raises(lowtide.DataDependentStepError, match=r"test_checks.py:\d+: it (decides by|compares)"):
        estimated(model, ask)


def is_nan(q, n):
    for _ in range(2):
        if q.sum().item() != q.sum().item():
            break
        if not n < 1e4:
            print("diverged", n)  # noqa: T201
            break
        if q.all() or n > 1e6:
            raise SystemExit(1)


def leaves(q, n):
    for _ in range(2):
        if n > 3 and q.any():
            log.info("skipped")
            continue
    if n > 10:
        return
    if n < 10:
        log.info("fine")
    else:
        return


def counts(q, n):
    best, patience, epoch, stops = math.inf, 0, 0, False
    if n < best:
        best, patience = n, 0
        log.info("best so far: %f", best)
    else:
        patience += 1
        if patience > 5:
            stops = True
    is_best = best > n
    if is_best:
        best_epoch = epoch
        log.info("at %d", best_epoch)
    if stops:
        raise KeyError
    return best


def prints(q, n):
    print("up" if n > 3 else "down", f"{n:.1f}{'*' if n < 2 else ''}", n < 3)  # noqa: T201


def saves(q, n):
    best, copied = math.inf, None
    if n < best:
        best = n
        copied = {name: value.clone() for name, value in {"q": q}.items()}
    if n > best:
        pass
    else:
        copied = copy.deepcopy(copied)
    assert copied["q"] is not q


GOES_ON, SAME = "training is assumed to continue", "either way needs the same memory"
MORE = "the way that saves or copies something is taken, as the one that needs more memory"


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (is_nan, [GOES_ON, GOES_ON, "a check is assumed to pass"]),
        (leaves, [GOES_ON] * 3),
        (counts, [SAME, SAME]),
        (prints, ["both ways only print or count"]),
        (saves, [MORE, MORE]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("device", [None, "T4"])
def test_of_branches_with_equal_memory_one_is_taken_and_training_goes_on(model, ask, said, device, capsys):
    found = of_lines(estimated(model, ask, device=device).assumed)
    notes = [note.partition(".py:")[2].partition(": ") for note in found]
    notes = [(int(line), why) for line, _, why in notes if "a number from a tensor" not in why]
    assert [why for _, why in sorted(notes)] == said
    first = ask.__code__.co_firstlineno
    assert all(first < line <= max(line for *_, line in ask.__code__.co_lines() if line) for line, _ in notes)


def test_code_without_a_source_is_refused(model):
    names = {}
    exec("def ask(q, n):\n    assert q.all()\n", names)
    with pytest.raises(lowtide.DataDependentStepError):
        estimated(model, names["ask"])


@pytest.mark.parametrize("device", [None, "T4"])
def test_known_tensors_are_compared(model, device):
    def ask(q, n):
        ones = torch.ones(4, device=q.device)
        assert torch.equal(ones, ones.clone())
        assert not torch.equal(ones, ones.roll(1) * 2)
        assert not torch.allclose(ones, ones + 1)
        (torch.ones(2) if torch.allclose(ones, ones + 1e-9) else torch.ones(3)).view(2)

    assert not any("check" in note for note in estimated(model, ask, device=device).assumed)


def test_a_check_that_fails_for_what_is_known_fails(model):
    def ask(q, n):
        assert (BATCH.long() > 10**6).all(), "known"

    with pytest.raises(AssertionError, match="known"):
        estimated(model, ask)


@pytest.mark.parametrize("device", [None, "T4"])
def test_an_assignment_gives_as_many_pairs_as_any_costs(model, device):
    def ask(q, n):
        for costs in (q.float(), q.float().cpu().numpy):
            rows, columns = linear_sum_assignment(costs if isinstance(costs, torch.Tensor) else costs())
            assert (len(rows), len(columns)) == (4, 4)
            assert q[torch.as_tensor(rows), torch.as_tensor(columns)].shape == (4,)

    notes = estimated(model, ask, device=device).assumed
    assert any("the numbers of an array" in note for note in notes)


def test_the_largest_of_unknown_numbers_is_unknown(model):
    seen = []

    def ask(q, n):
        for found in (max(0.5, n), max(n, 0.5), min(n, 1e9), min(-1e9, n), max([3.0, n, 2.0]), math.exp(min(n, 20))):
            seen.append(f"{found:.1f}")
        best = max(0.5, n)
        with pytest.raises(lowtide.DataDependentStepError):
            bool(best > 0.4)
        raise KeyError(*seen)

    with pytest.raises(KeyError) as caught:
        estimated(model, ask)
    assert caught.value.args == ("1.0",) * 5 + ("2.7",)


def test_an_optimizer_may_compare_unknown_tensors():
    model = nn.Linear(256, 128)
    optimizer = Adafactor(model.parameters())  # bounds its step by a tensor

    def step(batch):
        model(batch).square().mean().backward()
        optimizer.step()

    found = lowtide.estimate(model, step, torch.randn(8, 256), optimizer=optimizer)
    assert any("an optimizer compares" in note for note in found.assumed)


def test_a_detector_needs_what_it_is_measured_to_need() -> None:
    torch.manual_seed(0)
    backbone = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[1] * 4, out_features=["stage4"]
    )  # fmt: skip
    detector = DetrForObjectDetection(
        DetrConfig(
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=backbone,
            d_model=64,
            encoder_layers=1,
            decoder_layers=1,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            num_queries=20,
            num_labels=80,
        )
    )
    objects = [
        {"class_labels": torch.randint(0, 80, (n,)), "boxes": torch.rand(n, 4) * 0.4 + 0.3} for n in (3, 5)
    ]  # fmt: skip

    def step(batch):
        detector(pixel_values=batch[0], labels=batch[1]).loss.backward()

    batch = torch.randn(2, 3, 128, 128), objects
    measured = lowtide.timeline(detector, step, batch).peak_bytes
    assert lowtide.estimate(detector, step, batch).timeline.peak_bytes == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("device", [None, "H100-80"])
def test_a_product_of_two_dtypes_fails_as_in_the_step(model, device) -> None:
    """Fake kernels of torch 2.13 compute it."""
    model[2].to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="to have the same dtype, but got"):
        lowtide.estimate(model, lambda batch: model(batch).sum().backward(), BATCH, device=device)
