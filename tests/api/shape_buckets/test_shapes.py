"""Batches of many sizes: the small pay nothing, the largest keep to the budget, all have the bits of plain steps."""

import copy
import warnings
from dataclasses import dataclass, replace

import pytest
import torch
import transformers
from torch import nn

import lowtide
from comparing import equal
from lowtide.api.shape_buckets.dispatch import Switched, SwitchingEngine
from lowtide.api.shape_buckets.interpolate import PREDICTED, alike, between
from lowtide.api.shape_buckets.shape_range import Range
from lowtide.planner.records import Decisions
from lowtide.planner.simulate.simulator import predict
from lowtide.profiler.measure_call import Flops
from lowtide.runtime.call_interceptor import CALL
from lowtide.runtime.fingerprint import fingerprint
from models import build, same, state
from runtime.plans import Ops

pytestmark = pytest.mark.xdist_group("shapes")  # in one worker, for `fitted`


def cut(batch, rows, length):
    return {name: tensor[:rows, :length].clone() for name, tensor in batch.items()}


@pytest.fixture(scope="module")
def fitted():
    """GPT-2 with dropout; sequences of 16 to 64."""
    case = build("gpt2")
    fitted = lowtide.fit(case.model, case.step, case.batch, budget="60%", shapes="auto")
    yield case, fitted
    fitted.remove()


@pytest.mark.slow
def test_every_bucket_is_measured_to_be_within_the_budget(fitted):
    _, fitted = fitted
    budget = fitted.plan.budget_bytes
    assert len(fitted.buckets) == 4
    assert [bucket.plan.budget_bytes for bucket in fitted.buckets] == [budget] * 4
    for bucket in fitted.buckets:
        assert bucket.verdict.measured_peak_bytes <= budget
        assert bucket.verdict.identical
        assert not bucket.verdict.drifted
    assert [PREDICTED in bucket.profile.notes for bucket in fitted.buckets] == [True, True, True, False]
    assert not fitted.buckets[0].plan.recompute
    assert fitted.buckets[0].verdict.measured_peak_bytes > 0.9 * budget  # no larger than it must be
    extra = [bucket.plan.predicted.extra_ms for bucket in fitted.buckets]
    assert extra[0] == 0
    assert min(extra[1:]) > 0


def test_one_line_for_each_bucket(fitted):
    *lines, proof = str(fitted[1]).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("up to [4, 3")
    assert "everything is kept" in lines[0]
    assert lines[-1].startswith("up to [4, 64]: ")
    assert "bit-identical" in proof


def work(case, batch):
    """The ops of one forward and backward, and its FLOPs."""
    torch.manual_seed(3)
    with Ops() as ops, Flops() as flops:
        case.model(**batch).loss.backward()
    case.model.zero_grad()
    return ops.count, flops.total


def test_small_batches_take_no_more_work_than_without_a_plan(fitted):
    case, fitted = fitted
    plain = build("gpt2")
    for rows, length in [(4, 30), (2, 16), (1, 9)]:
        assert work(case, cut(case.batch, rows, length)) == work(plain, cut(plain.batch, rows, length))
    assert work(case, case.batch)[0] != work(plain, plain.batch)[0]


def test_a_loop_over_all_sizes_has_the_bits_of_a_plain_one_and_keeps_to_the_budget(fitted):
    case, fitted = fitted
    plain = build("gpt2")
    static = fitted.profile.static.total
    for rows, length in [(4, 64), (4, 20), (4, 43), (4, 64), (2, 57), (4, 33), (3, 64), (1, 5)]:
        torch.manual_seed(7)
        expected = plain.step(cut(plain.batch, rows, length))
        torch.manual_seed(7)
        batch = cut(case.batch, rows, length)
        with lowtide.measure() as memory:
            loss = case.step(batch)
        assert torch.equal(loss, expected)
        assert static + memory.peak_bytes <= fitted.plan.budget_bytes
    assert same(state(plain), state(case))
    case.model.load_state_dict(build("gpt2").model.state_dict())


def test_sizes_may_change_between_a_forward_and_its_backward(fitted):
    case, _ = fitted
    plain = build("gpt2")
    found = []
    for one in (case, plain):
        torch.manual_seed(5)
        losses = [one.model(**cut(one.batch, 4, length)).loss for length in (64, 24, 50)]
        for loss in losses:
            loss.backward()
        found.append([p.grad.clone() for p in one.model.parameters()])
        one.model.zero_grad()
    assert equal(*found)


REPLAYS = (
    (),
    ("transformer.h.1.mlp#0",),
    ("transformer.h.0#0", "transformer.h.1#0", "transformer.h.1.mlp#0"),
    ("transformer.h.0.mlp#0", "transformer.h.1#0", "transformer.h.2#0", "transformer.h.2.attn#0"),
)
"""A plan's for each bucket: what one replays, another replays inside something else."""


def test_each_forward_is_replayed_by_its_own_plan_whatever_came_after_it(fitted):
    buckets = [
        replace(bucket, plan=replace(bucket.plan, recompute={}, replay=replay, advance=()))
        for bucket, replay in zip(fitted[1].buckets, REPLAYS, strict=True)
    ]
    lengths = [int(bucket.size.split()[1][:-1]) for bucket in buckets]
    case, plain = build("gpt2"), build("gpt2")
    switched = Switched(SwitchingEngine(case.model, buckets))
    found = []
    for one in (case, plain):
        torch.manual_seed(5)
        losses = [one.model(**cut(one.batch, 4, length)).loss for length in (*lengths[::-1], *lengths)]
        for loss in losses[1:]:
            loss.backward()
        losses[0].backward()
        found.append([p.grad.clone() for p in one.model.parameters()])
    switched.remove()
    assert equal(*found)
    assert not switched.drifted


def test_a_batch_beyond_the_largest_gets_the_plan_with_the_smallest_peak_and_one_warning(fitted):
    case, found = fitted
    larger = {name: tensor.repeat(2, 1) for name, tensor in case.batch.items()}
    peaks = []
    for plan in (found.buckets[-1].plan, replace(found.buckets[-1].plan, fallback=None)):
        other = build("gpt2")
        with lowtide.apply(other.model, plan, say=lambda what: None), lowtide.measure() as memory:
            other.model(**larger).loss.backward()
        peaks.append(memory.peak_bytes)
    with (
        pytest.warns(UserWarning, match=r"larger than in the largest rehearsed batch \(\[4, 64\]\)"),
        lowtide.measure() as memory,
    ):
        case.model(**larger).loss.backward()
    assert memory.peak_bytes == peaks[0] < peaks[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case.model(**{name: tensor.repeat(3, 1) for name, tensor in case.batch.items()}).loss.backward()
        with torch.no_grad():
            case.model(**{name: tensor.repeat(3, 1) for name, tensor in case.batch.items()})
    case.model.zero_grad()


def test_a_small_batch_of_another_form_is_not_said_to_be_large(fitted):
    case, _ = fitted
    small = {name: tensor[:2, :8] for name, tensor in case.batch.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case.model(**small, attention_mask=torch.ones(2, 8)).loss.backward()
    case.model.zero_grad()


def test_a_step_that_raises_leaves_the_next_ones_right(fitted):
    case, _ = fitted
    plain = build("gpt2")
    wrong = cut(case.batch, 4, 64)
    wrong["input_ids"][0, 0] = 10**6
    for one in (case, plain):
        with pytest.raises(IndexError):
            one.model(**wrong)
    assert work(case, cut(case.batch, 4, 20)) == work(plain, cut(plain.batch, 4, 20))


@pytest.mark.slow
def test_an_interpolated_profile_never_underestimates():
    """Exact in the number of rows; on the safe side where attention grows with the square of the length."""
    for name, small, middle, exact in [
        ("llama", (1, 64), (2, 64), True),
        ("gpt2", (4, 16), (4, 40), False),
        ("bert", (4, 32), (4, 48), False),
    ]:
        case = build(name)
        two = [lowtide.rehearse(case.model, case.step, b) for b in (cut(case.batch, *small), case.batch)]
        batch = cut(case.batch, *middle)
        true = lowtide.rehearse(case.model, case.step, batch)
        dim = 0 if exact else 1
        share = (middle[dim] - small[dim]) / ((4, 64)[dim] - small[dim])
        made = between(*two, share, fingerprint(case.model, batch))
        true = replace(true, static=replace(true.static, others=made.static.others))  # other batches that this test has
        assert alike(made, true)
        recompute = frozenset(s.address for s in true.slots if true.values[s.value].recipe and not s.is_input)
        blocks = frozenset(c.id for c in true.calls if c.refused is None and c.parent is not None and "Block" in c.cls)
        for decisions in (Decisions(), Decisions(recompute=recompute), Decisions(replay=blocks)):
            of_made, of_true = predict(made, decisions), predict(true, decisions)
            assert of_true.peak_bytes <= of_made.peak_bytes <= 1.05 * of_true.peak_bytes
            assert of_true.held_bytes <= of_made.held_bytes
            if exact:
                assert of_made.held_bytes <= of_true.held_bytes + 64
                assert of_made.extra_flops == of_true.extra_flops


class Two(nn.Module):
    """Does something else with long sequences."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
        self.more = nn.Sequential(nn.LayerNorm(64), nn.GELU())

    def forward(self, x):
        x = self.body(x)
        return self.more(x) if x.shape[1] > 48 else x


def step_of(model):
    def step(batch):
        loss = model(batch["x"]).square().mean()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return step


def test_sizes_that_do_different_work_are_rehearsed_each():
    torch.manual_seed(0)
    model = Two().train()
    plain = copy.deepcopy(model)
    batch = {"x": torch.randn(8, 64, 64)}
    small = {"x": batch["x"][:, :32]}
    with lowtide.fit(model, step_of(model), batch, budget="70%", shapes=small) as fitted:
        assert not any(PREDICTED in bucket.profile.notes for bucket in fitted.buckets)
        assert all(bucket.verdict.within_budget for bucket in fitted.buckets)
        for length in (64, 50, 47, 20):
            part = {"x": batch["x"][:, :length]}
            assert torch.equal(step_of(model)(part), step_of(plain)(part))
        assert not fitted.applied.drifted


@pytest.mark.slow
def test_images_vary_in_number():
    case, plain = build("resnet"), build("resnet")
    with lowtide.fit(case.model, case.step, case.batch, budget="93%", shapes="auto") as fitted:
        assert fitted.buckets[-1].size == "[8, 3, 48, 48]"
        for rows in (8, 2, 7):
            batch, other = ({name: t[:rows].clone() for name, t in one.batch.items()} for one in (case, plain))
            assert torch.equal(case.step(batch), plain.step(other))
        for bucket in fitted.buckets:
            assert bucket.verdict.measured_peak_bytes <= fitted.plan.budget_bytes
    assert same(state(plain), state(case))
    assert not any(CALL in vars(module) for module in case.model.modules())


@pytest.mark.slow
def test_where_everything_fits_nothing_is_done():
    case = build("llama")
    with lowtide.fit(case.model, case.step, case.batch, budget="100%", shapes="auto") as fitted:
        assert len(fitted.buckets) == 1
        assert [module for module in case.model.modules() if CALL in vars(module)] == [case.model]  # looks at sizes
    assert CALL not in vars(case.model)


def test_varying_dimensions_are_found():
    ids = torch.zeros(4, 64, dtype=torch.long)
    sizes = Range({"ids": ids, "weights": torch.ones(4, 64, 3), "label": torch.zeros(4)})
    assert [(v.tensor, v.dim, v.small, v.large) for v in sizes.varying] == [(0, 1, 16, 64), (1, 1, 16, 64)]
    cut = sizes.batch(0.5)
    assert [list(tensor.shape) for tensor in cut.values()] == [[4, 40], [4, 40, 3], [4]]
    assert cut["ids"].untyped_storage().nbytes() == 4 * 40 * 8
    assert [v.dim for v in Range((torch.zeros(8, 3, 9, 9), torch.zeros(8))).varying] == [0, 0]
    images = torch.zeros(8, 3, 16, 16)
    for beside in (torch.zeros(8, 16, 16, dtype=torch.long), torch.zeros(8, 20, dtype=torch.long)):  # pixels, labels
        assert [v.dim for v in Range((images, beside)).varying] == [0, 0]
    assert [v.dim for v in Range(images.to(torch.uint8)).varying] == [0]
    both = Range(ids, ids[:2, :32])
    assert list(both.batch(0.5).shape) == [3, 48]


@pytest.mark.parametrize(
    ("large", "small", "what"),
    [
        (torch.zeros(4, 8), torch.zeros(4, 8), "no dimension of the batch varies"),
        (torch.zeros(4, 8), torch.zeros(5, 8), "should be smaller"),
        (torch.zeros(4, 8), torch.zeros(4), "more than its sizes"),
        (torch.zeros(4, 8), {"x": torch.zeros(2, 8)}, "differ in structure"),
        (3, None, "no dimension of the batch varies"),
    ],
)
def test_batches_that_can_not_be_compared_are_refused(large, small, what):
    with pytest.raises(lowtide.RehearsalError, match=what):
        Range(large, small)


def test_a_step_that_takes_no_smaller_batch_says_so():
    model = nn.Linear(8, 8)

    def step(batch):
        model(batch.view(4, 8).float()).sum().backward()

    with pytest.raises(lowtide.RehearsalError, match=r"smaller batch, of \[4, 2\] instead of \[4, 8\]: RuntimeError"):
        lowtide.fit(model, step, torch.ones(4, 8, dtype=torch.long), budget="90%", shapes="auto")


@pytest.mark.slow
def test_no_plan_is_left_in_force_when_the_largest_does_not_fit():
    case = build("gpt2 fused")
    known = state(case)
    with pytest.raises(lowtide.Infeasible):
        lowtide.fit(case.model, case.step, case.batch, budget="2MiB", shapes="auto")
    with pytest.raises(lowtide.LowtideError, match="shapes takes"):
        lowtide.fit(case.model, case.step, case.batch, budget="60%", shapes="some")
    assert same(known, state(case))
    assert not any(CALL in vars(module) for module in case.model.modules())


@dataclass
class _Text:
    tokens: torch.Tensor
    names: list[str]


def test_batches_of_any_kind_are_cut():
    ids = torch.arange(4 * 16).view(4, 16)
    encoded = transformers.BatchEncoding({"input_ids": ids, "labels": ids})
    for large in (encoded, {"input_ids": ids, "labels": ids}):
        small = Range(large).batch(0.0)
        assert type(small) is type(large)
        assert torch.equal(small["input_ids"], ids[:, :4])
        assert small["labels"] is small["input_ids"]  # as in the large one
        assert large["input_ids"] is ids
    small = Range(_Text(ids, ["a", "b"]), _Text(ids[:2, :8], ["c"])).batch(0.0)
    assert torch.equal(small.tokens, ids[:2, :8])
    assert small.names == ["a", "b"]
