"""The lever `loss head`: no logits, the same loss and gradients except for rounding, and a reason where it can't be."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from comparing import equal
from levers.cases import LENGTH, LOGITS_BYTES, VOCABULARY, Batch, batch_of, close, model_of, pulled, run, untouched
from lowtide.levers.lever import LeverNotApplicable, StepContext
from lowtide.levers.selection import rehearse_with_levers
from lowtide.planner.records import AppliedLever

pytestmark = pytest.mark.loss_head

ROUNDING = 2e-6
"""Relative, in float32."""


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gpt2", {}),
        ("gpt2", {"tie_word_embeddings": False}),
        ("bert", {}),
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("granite", {"logits_scaling": 4.0}),
    ],
)
def test_no_logits_and_the_same_gradients(kind: str, settings: dict[str, Any]) -> None:
    model, batch = model_of(kind, **settings), batch_of()
    plain = run(model, batch, measured=True)
    with pulled(model, "loss head") as on:
        found = run(model, batch, measured=True)
        on.check()
    # Logits, log-softmax and a gradient go; what comes in their place is small.
    assert 2.5 * LOGITS_BYTES < plain.peak_bytes - found.peak_bytes < 4 * LOGITS_BYTES
    assert torch.allclose(plain.loss, found.loss, rtol=ROUNDING)
    assert close(plain.gradients, found.gradients, ROUNDING)
    assert untouched(model)


def test_number_of_items_in_the_batch() -> None:
    model, batch = model_of("gpt2"), batch_of()
    plain = run(model, batch, num_items_in_batch=torch.tensor(300))
    with pulled(model, "loss head"):
        found = run(model, batch, num_items_in_batch=torch.tensor(300))
    assert torch.allclose(plain.loss, found.loss, rtol=ROUNDING)
    assert close(plain.gradients, found.gradients, ROUNDING)


def test_a_loss_outside_of_the_model_and_shifted_by_hand() -> None:
    model, batch = model_of("llama"), batch_of()

    def loss_of() -> tuple[float, dict[str, Tensor]]:
        model.zero_grad()
        logits = model(input_ids=batch["input_ids"]).logits
        shifted = logits[..., :-1, :].contiguous().view(-1, VOCABULARY)
        loss = nn.functional.cross_entropy(shifted, batch["labels"][..., 1:].reshape(-1))
        loss.backward()
        return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    loss, gradients = loss_of()
    with pulled(model, "loss head") as on:
        found, theirs = loss_of()
        on.check()
    assert found == pytest.approx(loss, rel=ROUNDING)
    assert close(gradients, theirs, ROUNDING)


def test_autocast() -> None:
    model, batch = model_of("gpt2"), batch_of()
    with torch.autocast("cpu", torch.bfloat16):
        plain = run(model, batch)
        with pulled(model, "loss head") as on:
            found = run(model, batch)
            on.check()
    assert found.loss.dtype == plain.loss.dtype == torch.float32
    assert torch.allclose(plain.loss, found.loss, rtol=2e-2)  # torch adds up the chunks' losses in bfloat16
    assert close(plain.gradients, found.gradients, 2e-2)


def test_logits_are_computed_for_code_that_reads_them() -> None:
    model, batch = model_of("bert"), batch_of()
    plain = run(model, batch).outputs.logits
    with pulled(model, "loss head") as on:
        outputs = run(model, batch).outputs
        assert outputs.logits.shape == (*batch["input_ids"].shape, VOCABULARY)
        on.check()
        assert torch.equal(outputs.logits.argmax(-1), plain.argmax(-1))
        assert torch.equal(outputs.logits + 0, plain)
        assert torch.equal(outputs.logits[0, 3, 17], plain[0, 3, 17])
        with pytest.raises(LeverNotApplicable, match="the logits themselves are needed, by 'argmax'"):
            on.check()
        model.eval()
        assert type(model(**batch).logits) is Tensor


def test_logits_of_older_weights_are_not_made_up() -> None:
    model, batch = model_of("gpt2"), batch_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pulled(model, "loss head"):
        outputs = model(**batch)
        outputs.loss.backward()
        optimizer.step()
        with pytest.raises(lowtide.LowtideError, match="the weights have changed since"):
            outputs.logits.argmax(-1)


def test_a_model_that_caps_its_logits_is_refused_with_the_reason() -> None:
    model, batch = model_of("gemma2", final_logit_softcapping=30.0), batch_of()
    plain = run(model, batch)
    with pulled(model, "loss head") as on:
        found = run(model, batch)
        with pytest.raises(LeverNotApplicable, match="the logits themselves are needed, by 'tanh'"):
            on.check()
    assert torch.equal(plain.loss, found.loss)
    assert equal(plain.gradients, found.gradients)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(batch: Batch) -> Tensor:
        loss: Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def test_fit_with_the_users_word() -> None:
    model, batch = model_of("gpt2"), batch_of()
    step = _step(model, torch.optim.AdamW(model.parameters()))
    profile = lowtide.rehearse(model, step, batch)
    with pytest.raises(lowtide.Infeasible, match=r"levers=\('outputs', 'loss head'\) \(up to .* less\)"):
        lowtide.fit(model, step, batch, budget="55%", profile=profile)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gc.freeze()  # what is compared with does not count
    with lowtide.fit(model, step, batch, budget="55%", profile=profile, levers=["outputs", "loss head"]) as fitted:
        (lever,) = fitted.plan.levers
        assert (lever.name, lever.exact) == ("loss head", False)
        assert fitted.plan.predicted.extra_ms >= lever.extra_ms >= 0
        assert profile.measured_plain_peak_bytes is not None
        assert lever.bytes == profile.measured_plain_peak_bytes - (fitted.profile.measured_plain_peak_bytes or 0)
        assert lever.bytes > 2 * LOGITS_BYTES
        verdict = fitted.verdict
        assert verdict.within_budget
        assert verdict.predicted_peak_bytes == pytest.approx(verdict.measured_peak_bytes, rel=0.01)
        assert verdict.identical  # to the step with the lever alone
        assert verdict.levers == ("loss head",)
        assert verdict.relative_differences is not None
        assert 0 < verdict.relative_differences["gradients"] < ROUNDING
        assert "relative differences from the plain step: loss" in str(fitted)
        assert lowtide.Verdict.from_json(verdict.to_json()) == verdict
    assert untouched(model)
    assert equal(before, dict(model.named_parameters()))


@pytest.mark.slow
def test_a_plan_with_it_is_estimated_and_shown_with_it() -> None:
    model, batch = model_of("gpt2"), batch_of()

    def step(batch: Batch) -> None:
        model(**batch).loss.backward()
        model.zero_grad()

    fitted = lowtide.fit(model, step, batch, budget="45%", levers=["loss head"])
    fitted.remove()
    assert [lever.name for lever in fitted.plan.levers] == ["loss head"]
    planned = fitted.plan.predicted.peak_bytes
    estimated = lowtide.estimate(model, step, batch, plan=fitted.plan)
    measured = lowtide.timeline(model, step, batch, plan=fitted.plan)
    assert estimated.peak_bytes == pytest.approx(planned, rel=0.002)
    assert estimated.static.total + measured.peak_bytes == pytest.approx(planned, rel=0.002)
    on_gpu = [lowtide.estimate(model, step, batch, plan=plan, device="T4") for plan in (fitted.plan, None)]
    assert on_gpu[1].peak_bytes - on_gpu[0].peak_bytes > LOGITS_BYTES
    assert not hasattr(model.lm_head, "_forward_hooks") or not model.lm_head._forward_hooks


@pytest.mark.slow
def test_with_recomputes_replays_and_steps_in_backward_beside_it() -> None:
    model, batch = model_of("gpt2", n_layer=1, resid_pdrop=0.1), batch_of()
    step = _step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    profile = lowtide.rehearse(model, step, batch)
    levers = ["loss head", "step in backward"]
    with lowtide.fit(model, step, batch, budget="35%", profile=profile, levers=levers) as fitted:
        assert [lever.name for lever in fitted.plan.levers] == levers
        assert fitted.plan.recompute
        assert fitted.verdict.identical
        assert fitted.verdict.within_budget


def test_a_step_that_fails_with_it_leaves_nothing_behind() -> None:
    model, batch = model_of("llama"), batch_of()
    optimizer = torch.optim.AdamW(model.parameters())

    def twice(batch: Batch) -> Tensor:
        loss: Tensor = model(**batch).loss
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    twice(batch)
    known = {name: p.detach().clone() for name, p in model.named_parameters()}
    states = [{key: value.clone() for key, value in entry.items()} for entry in optimizer.state.values()]
    with pytest.raises(LeverNotApplicable, match="the step fails with it: RuntimeError"):
        rehearse_with_levers(
            StepContext(model, twice, batch, optimizer),
            (AppliedLever(name="loss head", what="", exact=False, settings={}),),
        )
    assert untouched(model)
    assert equal(known, dict(model.named_parameters()))
    assert all(p.grad is None for p in model.parameters())
    for before, after in zip(states, optimizer.state.values(), strict=True):
        assert equal(before, after)


def test_a_model_without_a_vocabulary_keeps_its_head() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    batch = torch.randn(LENGTH, 64)

    def step(batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        return loss.detach()

    with lowtide.fit(model, step, batch, budget="90%", levers=["loss head"]) as fitted:
        assert not fitted.plan.levers
        assert any("Sequential is no model of transformers" in note for note in fitted.plan.notes)


def test_there_is_no_such_lever() -> None:
    model = model_of("gpt2")
    with pytest.raises(lowtide.LowtideError, match=r"there is no lever 'magic'\. There are: 'outputs',"):
        lowtide.fit(model, lambda batch: None, batch_of(), budget="50%", levers=["magic"])
