"""The lever `outputs`: logits are freed before backward if no code reads them, and a late read raises."""

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import lowtide
from comparing import equal
from levers.cases import LOGITS_BYTES, ROWS, VOCABULARY, Batch, batch_of, model_of, pulled, run, untouched
from lowtide.levers.field_reads import find_reason_to_read

Step = Callable[[Batch], Tensor]


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
def test_the_logits_go_and_the_bits_stay(kind: str) -> None:
    model, batch = model_of(kind), batch_of()
    plain = run(model, batch, measured=True)
    with pulled(model, "outputs") as on:
        found = run(model, batch, measured=True)
        on.check()
    assert plain.peak_bytes - found.peak_bytes == LOGITS_BYTES
    assert torch.equal(plain.loss, found.loss)
    assert plain.gradients.keys() == found.gradients.keys()
    assert equal(plain.gradients, found.gradients)
    assert untouched(model)
    assert run(model, batch).outputs.logits is not None


@pytest.mark.parametrize(
    "read",
    [
        lambda o: o.logits,
        lambda o: o["logits"],
        lambda o: o[1],
        lambda o: o[:2],
        lambda o: o[-1],
        lambda o: o.to_tuple(),
        lambda o: list(o.values()),
        lambda o: dict(o.items()),
        lambda o: [*o],
        lambda o: getattr(o, "logits", None),
        lambda o: o.get("logits"),
        lambda o: copy.deepcopy(o),
        lambda o: pickle.dumps(o),
    ],
)
def test_a_late_reader_is_told_which_lever_it_was(read: Callable[[Any], object]) -> None:
    model, batch = model_of("gpt2"), batch_of()
    with pulled(model, "outputs"):
        outputs = run(model, batch).outputs
    with pytest.raises(lowtide.LowtideError, match=r"'outputs' is on.*levers=\(\)"):
        read(outputs)


@pytest.mark.loss_head
def test_nothing_is_left_of_a_removed_lever() -> None:
    model, batch = model_of("llama"), batch_of()
    gone = weakref.ref(model.lm_head.weight)
    gc.collect()
    gc.disable()
    try:
        with pulled(model, "outputs", "loss head", "micro-batches", n=2) as on:
            run(model, batch)
        front = weakref.ref(on)
        del on, model
        assert front() is None
        assert gone() is None
    finally:
        gc.enable()


def test_the_remaining_outputs_look_as_before() -> None:
    model, batch = model_of("gpt2"), batch_of()
    kind = type(run(model, batch).outputs)
    with pulled(model, "outputs"):
        outputs = run(model, batch).outputs
        assert isinstance(outputs, kind)
        assert outputs.loss is outputs["loss"] is outputs[0]
        assert outputs.past_key_values is None  # as it would have been
        assert "logits" in outputs
        assert bool(outputs)
        assert "freed" in repr(outputs)
        for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert untouched(clone)
        with torch.no_grad():
            assert model(**batch).logits is not None
        assert model(input_ids=batch["input_ids"]).logits is not None  # no labels, no loss
        model.eval()
        assert model(**batch).logits is not None


def _holding(model: nn.Module) -> Step:
    def step(batch: Batch) -> Tensor:
        outputs = model(**batch)
        outputs.loss.backward()
        model.zero_grad()
        loss: Tensor = outputs.loss.detach()
        return loss

    return step


def test_fit_pulls_it_without_a_word_where_it_saves() -> None:
    model, batch = model_of("gpt2", resid_pdrop=0.1), batch_of()
    step = _holding(model)
    profile = lowtide.rehearse(model, step, batch)
    assert profile.measured_plain_peak_bytes is not None
    budget = profile.measured_plain_peak_bytes - LOGITS_BYTES
    with lowtide.fit(model, step, batch, budget=budget, profile=profile) as fitted:
        (lever,) = fitted.plan.levers
        assert (lever.name, lever.exact, lever.bytes, lever.extra_ms) == ("outputs", True, LOGITS_BYTES, 0)
        assert not fitted.plan.recompute
        assert not fitted.plan.replay
        assert fitted.verdict.measured_peak_bytes <= budget
        assert fitted.verdict.identical
        assert "lever outputs: of the model's outputs only the loss is returned" in str(fitted)
        assert lowtide.Plan.from_json(fitted.plan.to_json()) == fitted.plan
        assert lowtide.Profile.from_json(fitted.profile.to_json()) == fitted.profile
        with pytest.raises(lowtide.LowtideError, match="freed"):
            run(model, batch).outputs.logits  # noqa: B018
    assert untouched(model)
    with lowtide.fit(model, step, batch, budget=budget, profile=profile, levers=()) as fitted:
        assert not fitted.plan.levers
        assert fitted.plan.recompute


def test_fit_leaves_small_outputs_alone() -> None:
    """Reading the logits of a classifier still works: a few bytes are not worth an error."""
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=160, num_attention_heads=4, vocab_size=VOCABULARY
    )
    model = transformers.BertForSequenceClassification(config).train()
    batch = {"input_ids": batch_of()["input_ids"], "labels": torch.zeros(ROWS, dtype=torch.long)}
    with lowtide.fit(model, _holding(model), batch, budget="90%") as fitted:
        assert fitted.plan.recompute
        assert not fitted.plan.levers
        assert run(model, batch).outputs.logits.shape == (ROWS, 2)


def test_a_plan_file_brings_its_levers_along(tmp_path: Any) -> None:
    model, batch = model_of("gpt2", n_layer=1), batch_of()
    with lowtide.fit(model, _holding(model), batch, budget="65%") as fitted:
        assert fitted.plan.levers
        fitted.plan.to_json(tmp_path / "plan.json")
    plan = lowtide.Plan.from_json(tmp_path / "plan.json")
    other = model_of("gpt2", n_layer=1)
    plain = run(other, batch, measured=True)
    with lowtide.apply(other, plan):
        planned = run(other, batch, measured=True)
    assert plain.peak_bytes - planned.peak_bytes > LOGITS_BYTES
    assert equal(plain.gradients, planned.gradients)
    assert lowtide.verify(other, _holding(other), batch, plan).identical
    assert untouched(other)


def _reads_in_the_rehearsal(model: nn.Module) -> Step:
    def step(batch: Batch) -> Tensor:
        outputs = model(**batch)
        outputs.loss.backward()
        model.zero_grad()
        shown: Tensor = _shown(outputs)
        return shown

    return step


def _shown(outputs: Any) -> Tensor:
    mean: Tensor = outputs.logits.mean().detach()
    return mean


def _reads_every_hundredth_time(model: nn.Module) -> Step:
    steps = [0]

    def step(batch: Batch) -> Tensor:
        outputs = model(**batch)
        outputs.loss.backward()
        model.zero_grad()
        steps[0] += 1
        if steps[0] % 100 == 0:
            batch["predicted"] = outputs[1].argmax(-1)
        loss: Tensor = outputs.loss.detach()
        return loss

    return step


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("made", [_reads_in_the_rehearsal, _reads_every_hundredth_time])
def test_a_step_that_may_read_more_keeps_its_outputs(made: Callable[[nn.Module], Step]) -> None:
    model, batch = model_of("gpt2"), batch_of()
    with lowtide.fit(model, made(model), batch, budget="80%") as fitted:
        assert not fitted.plan.levers
        assert fitted.verdict.identical
    assert untouched(model)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("wrap", [lambda outputs: {"epoch": 1, "outputs": [outputs]}, lambda outputs: outputs])
def test_a_step_that_returns_the_outputs_keeps_them(wrap: Callable[[Any], Any]) -> None:
    model, batch = model_of("gpt2"), batch_of()

    def step(batch: Batch) -> Any:
        outputs = model(**batch)
        outputs.loss.backward()
        model.zero_grad()
        return wrap(outputs)

    with lowtide.fit(model, step, batch, budget="90%") as fitted:
        assert not fitted.plan.levers
        assert fitted.verdict.identical
    assert untouched(model)


class _Trainer:
    def __call__(self, batch: Batch) -> Any:
        return self.loss_of(batch)

    def loss_of(self, batch: Batch) -> Any:
        return self.report(batch)

    def report(self, batch: Batch) -> Any:
        return "attentions" in batch


class _Engine:
    """Has a trainer; what its code names leads to that one's."""

    def __init__(self) -> None:
        self.trainer = _Trainer()

    def train(self, batch: Batch) -> Any:
        return self.trainer(batch)

    @staticmethod
    def shown(batch: Batch) -> Any:
        return _shown(batch)


engine = _Engine()
another = ModuleType("another")
another.train_step = engine.train  # type: ignore[attr-defined]


def _closed_over(trainer: _Trainer) -> Callable[[Batch], Any]:
    return lambda batch: trainer.loss_of(batch)


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda batch: batch["labels"][0], None),
        (lambda batch: batch.logits, r"reads \.logits"),
        (lambda batch: batch["logits"], "mentions 'logits'"),
        (lambda batch: batch[1], "indexes something in line"),
        (lambda batch: batch[:1], "indexes something in line"),
        (lambda batch: batch[0], None),
        (lambda batch: [each.logits for each in batch], r"reads \.logits"),
        (lambda batch: getattr(batch, "log" + "its"), "reads|uses getattr|mentions"),
        (lambda batch: _shown(batch), r"_shown .* reads \.logits"),
        (_Trainer(), "report .* mentions 'attentions'"),
        (_Trainer().loss_of, "report .* mentions 'attentions'"),
        (lambda batch: engine.train(batch), "report .* mentions 'attentions'"),
        (lambda batch: engine.trainer.report(batch), "report .* mentions 'attentions'"),
        (lambda batch: _Engine.shown(batch), r"_shown .* reads \.logits"),
        (lambda batch: another.train_step(batch), "report .* mentions 'attentions'"),
        (_closed_over(_Trainer()), "report .* mentions 'attentions'"),
        (len, "the code of a builtin_function_or_method can't be read"),
    ],
)
def test_fields_that_code_may_read_are_found(step: Callable[[Any], Any], why: str | None) -> None:
    found = find_reason_to_read(step, ("logits", "attentions"))
    if why is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(why, found)
