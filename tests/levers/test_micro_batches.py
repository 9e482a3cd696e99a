"""The lever `micro-batches`: a step that fits in no other way, with the whole batch's loss and gradients."""

import contextlib
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import lowtide
from levers.cases import Batch, batch_of, close, model_of, pulled, run, untouched
from lowtide.levers.lever import LeverNotApplicable, StepContext
from lowtide.levers.micro_batches import find_piece_counts
from lowtide.planner import find_smallest_peak

ROUNDING = 2e-6
TINY = dict(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=50)


@pytest.mark.parametrize(("n", "more"), [(2, {}), (3, {"num_items_in_batch": 77}), (4, {})])
def test_the_whole_batchs_loss_and_gradients(n: int, more: dict[str, Any]) -> None:
    model, batch = model_of("llama"), batch_of()
    plain = run(model, batch, measured=True, **more)
    with pulled(model, "micro-batches", n=n) as on:
        found = run(model, batch, measured=True, **more)
        on.check()
    assert torch.allclose(plain.loss, found.loss, rtol=ROUNDING)
    assert close(plain.gradients, found.gradients, ROUNDING)
    assert found.peak_bytes < plain.peak_bytes
    assert untouched(model)


@pytest.mark.parametrize("labels", ["classes", "numbers"])
def test_models_that_do_not_look_at_the_number_of_items(labels: str) -> None:
    """The Trainer gives it to every model that takes any keyword; many average over what they are given."""
    torch.manual_seed(0)
    n_labels = 3 if labels == "classes" else 1
    config = transformers.BertConfig(**TINY, num_labels=n_labels, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    model = transformers.BertForSequenceClassification(config).train()
    given = torch.randint(3, (5,)) if labels == "classes" else torch.randn(5)
    batch = {"input_ids": torch.randint(50, (5, 6)), "labels": given}
    plain = run(model, batch, num_items_in_batch=torch.tensor(5))
    with pulled(model, "micro-batches", n=3):
        found = run(model, batch, num_items_in_batch=torch.tensor(5))
    assert torch.allclose(plain.loss, found.loss, rtol=ROUNDING)
    assert close(plain.gradients, found.gradients, ROUNDING)


def test_a_loss_beside_the_one_that_is_divided_is_refused() -> None:
    """A term that is added once for each piece would count as often."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **TINY, num_key_value_heads=2, num_local_experts=2, output_router_logits=True, use_cache=False
    )
    model, ids = transformers.MixtralForCausalLM(config).train(), torch.randint(50, (4, 6))
    with (
        pulled(model, "micro-batches", n=2),
        pytest.raises(lowtide.LowtideError, match="cannot determine how this loss"),
    ):
        model(input_ids=ids, labels=ids, num_items_in_batch=24)
    assert all(p.grad is None for p in model.parameters())


def test_earlier_gradients_stay() -> None:
    model, batch = model_of("gpt2", resid_pdrop=0, attn_pdrop=0, embd_pdrop=0), batch_of()
    (2 * model(**batch).loss).backward()
    model(**batch).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with pulled(model, "micro-batches", n=2):
        (2 * model(**batch).loss).backward()  # a factor, as a scaler has
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        with pytest.raises(lowtide.LowtideError, match="backward can run only once"):
            loss.backward()
        with torch.no_grad():
            assert model(**batch).logits is not None
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert close(expected, found, ROUNDING)


def test_a_failing_piece_leaves_the_gradients_alone() -> None:
    model, batch = model_of("llama"), batch_of()
    model(**batch).loss.backward()
    known = {name: p.grad for name, p in model.named_parameters()}
    with pulled(model, "micro-batches", n=2):
        with pytest.raises(IndexError):
            model(input_ids=batch["input_ids"] + 10**6, labels=batch["labels"])
        with pytest.raises(lowtide.LowtideError, match="need a model that gives its loss"):
            model(input_ids=batch["input_ids"])
        with pytest.raises(lowtide.LowtideError, match="'micro-batches' is on"):
            model(**batch).logits  # noqa: B018
    assert all(p.grad is known[name] for name, p in model.named_parameters())


def test_rows_of_a_model_are_compared_once_and_without_a_graph() -> None:
    """Otherwise the first run of a rehearsal would do work that the next one does not."""
    model, batch = model_of("gpt2"), batch_of(4)
    has_graph = []
    model.register_forward_pre_hook(lambda *_: has_graph.append(torch.is_grad_enabled()))
    for n in (2, 4):
        with pulled(model, "micro-batches", n=n):
            model(**batch).loss.backward()
    assert has_graph == [False] * 3 + [True] * 6


def test_batch_norm_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(LeverNotApplicable, match="1 normalizes over the batch"), pulled(model, "micro-batches", n=2):
        pass
    assert untouched(model)


@pytest.mark.parametrize("inside", [False, True])
def test_float16_under_a_gradient_scaler_is_refused(inside: bool) -> None:
    """Also where autocast is on only inside the model, as accelerate has it."""
    model, batch = model_of("llama"), batch_of()
    half = torch.autocast("cpu", torch.float16)
    if inside:
        model.forward = half(model.forward)
    refused = pytest.raises(lowtide.LowtideError, match="Use bfloat16 autocast")
    with pulled(model, "micro-batches", n=2), contextlib.nullcontext() if inside else half, refused:
        model(**batch)
    assert all(p.grad is None for p in model.parameters())


def test_numbers_that_make_pieces_smaller() -> None:
    site = StepContext(nn.Linear(1, 1), lambda batch: None, torch.zeros(10, 1), None)
    assert list(find_piece_counts(site)) == [2, 3, 4, 5, 10]  # pieces of 5, 4, 3, 2 and 1 rows


@pytest.mark.slow
def test_fit_takes_the_fewest_pieces_that_fit_and_only_if_it_has_to() -> None:
    model, batch = model_of("gpt2", resid_pdrop=0, attn_pdrop=0, embd_pdrop=0), batch_of(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Batch) -> Tensor:
        loss: Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    profile = lowtide.rehearse(model, step, batch)
    plain = profile.measured_plain_peak_bytes
    assert plain is not None
    with lowtide.fit(model, step, batch, budget="95%", profile=profile, levers=["micro-batches"]) as fitted:
        assert not fitted.plan.levers
        assert fitted.plan.notes[-1] == "lever 'micro-batches' is not used: the step fits without it"
    with pytest.raises(lowtide.Infeasible, match="'micro-batches'") as caught:
        lowtide.fit(model, step, batch, budget="30%", profile=profile)
    smallest = {}
    for number in (2, 3):
        with pulled(model, "micro-batches", n=number):
            smallest[number] = find_smallest_peak(lowtide.rehearse(model, step, batch))[1].peak_bytes
    assert smallest[3] < smallest[2] < caught.value.smallest_peak_bytes
    budget = (smallest[2] + smallest[3]) // 2
    with lowtide.fit(model, step, batch, budget=budget, profile=profile, levers=["micro-batches"]) as fitted:
        (lever,) = fitted.plan.levers
        assert lever.settings["n"] == 3
        assert lever.bytes > 0
        assert fitted.verdict.within_budget
        assert fitted.verdict.identical
        assert fitted.verdict.relative_differences is not None
        assert fitted.verdict.relative_differences["gradients"] < ROUNDING
    assert untouched(model)


@pytest.mark.loss_head
def test_together_with_a_chunked_loss_head() -> None:
    model, batch = model_of("llama"), batch_of()
    plain = run(model, batch)
    with pulled(model, "loss head", "micro-batches", n=2):
        found = run(model, batch)
    assert torch.allclose(plain.loss, found.loss, rtol=ROUNDING)
    assert close(plain.gradients, found.gradients, ROUNDING)
