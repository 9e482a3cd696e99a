"""A rehearsal finds what is saved, predicts the peak of the plain step, and leaves nothing behind."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide.planner.predict import predict
from lowtide.planner.records import Decisions, Profile
from models import MODELS, Case, build, same, state


@pytest.fixture(scope="module", params=MODELS)
def rehearsed(request: pytest.FixtureRequest) -> tuple[Case, Profile]:
    case = build(request.param)
    return case, lowtide.rehearse(case.model, case.step, case.batch)


def test_the_peak_of_the_plain_step_follows_from_the_most_saving_one(rehearsed):
    _, profile = rehearsed
    predicted = predict(profile, Decisions()).peak_bytes
    assert predicted == pytest.approx(profile.measured_plain_peak_bytes, rel=0.02)


def test_static_memory_is_counted_once(rehearsed):
    case, profile = rehearsed
    parameters = sum(p.numel() * p.element_size() for p in case.model.parameters())
    assert profile.static.parameters == parameters  # tied weights: parameters() has them once
    steps = sum(4 for p in case.model.parameters() if p.requires_grad)  # AdamW's step counters, float32
    assert profile.static.optimizer == 2 * parameters + steps
    assert profile.static.gradients == 0


def test_most_saved_bytes_can_be_remade_or_replayed(rehearsed):
    _, profile = rehearsed
    replayable = {call for call, entry in enumerate(profile.calls) if entry.refused is None}

    def inside_a_replayable(call: int | None) -> bool:
        while call is not None and call not in replayable:
            call = profile.calls[call].parent
        return call is not None

    saved = {slot.storage: slot for slot in profile.slots if slot.storage is not None and not slot.is_input}
    total = sum(profile.storages[storage].bytes for storage in saved)
    droppable = sum(
        profile.storages[storage].bytes
        for storage, slot in saved.items()
        if profile.values[slot.value].recipe is not None or inside_a_replayable(slot.call)
    )
    assert droppable > 0.9 * total


def test_a_profile_survives_json(rehearsed, tmp_path):
    _, profile = rehearsed
    path = tmp_path / "profile.json"
    profile.to_json(path)
    assert Profile.from_json(path) == profile


@pytest.mark.parametrize("before", ["fresh", "after a step", "with gradients"])
def test_everything_is_as_it_was(before):
    case = build("resnet")
    if before == "after a step":
        case.step(case.batch)
    if before == "with gradients":
        case.model(**case.batch).loss.backward()
    known, gradients = state(case), [p.grad for p in case.model.parameters()]
    buffers, python, numpy = [*case.model.buffers()], random.getstate(), np.random.get_state()
    lowtide.rehearse(case.model, case.step, case.batch)
    assert same(known, state(case))
    assert all(p.grad is g for p, g in zip(case.model.parameters(), gradients, strict=True))
    assert all(now is then for now, then in zip(case.model.buffers(), buffers, strict=True))
    assert random.getstate() == python
    assert np.array_equal(np.random.get_state()[1], numpy[1])


def test_everything_is_as_it_was_when_the_step_raises():
    case = build("gpt2")
    case.step(case.batch)
    known = state(case)
    steps = 0

    def failing(batch):
        nonlocal steps
        steps += 1
        case.step(batch)
        if steps == 2:
            raise KeyError("the second step fails")

    with pytest.raises(KeyError, match="the second step fails"):
        lowtide.rehearse(case.model, failing, case.batch)
    assert same(known, state(case))
    assert not any("_compiled_call_impl" in module.__dict__ for module in case.model.modules())


def test_an_optimizer_is_noticed_and_its_settings_come_back():
    case = build("gpt2")
    schedule = torch.optim.lr_scheduler.StepLR(case.optimizer, 1)

    def step(batch):
        case.step(batch)
        schedule.step()

    lowtide.rehearse(case.model, step, case.batch)
    assert case.optimizer.param_groups[0]["lr"] == 1e-3
    assert not case.optimizer.state


def _step_of(model: nn.Module):
    return lambda batch: model(batch).sum().backward()


def _refused(model, step, batch) -> str:
    with pytest.raises(lowtide.RehearsalError) as caught:
        lowtide.rehearse(model, step, batch)
    return str(caught.value)


def test_what_can_not_be_rehearsed_is_refused_in_words():
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(32, 64)
    assert "eval mode" in _refused(nn.Sequential(nn.Linear(64, 64)).eval(), _step_of(model), batch)
    assert "without a call of Sequential" in _refused(model, lambda batch: batch.sum(), batch)
    assert "no backward" in _refused(model, lambda batch: model(batch).sum(), batch)
    assert "under no_grad" in _refused(model, torch.no_grad()(lambda batch: model(batch).sum()), batch)
    assert "function of the batch" in _refused(model, 3, batch)
    assert "torch.nn.Module" in _refused(lambda batch: batch, _step_of(model), batch)
    compiled = nn.Sequential(torch.compile(nn.Linear(64, 64), backend="eager"), nn.Tanh())
    assert "0 is compiled" in _refused(compiled, _step_of(compiled), batch)
    frozen = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
    assert "requires a gradient" in _refused(frozen, _step_of(frozen), batch)


def test_a_step_that_differs_each_time_is_refused():
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(32, 64)
    times = 0

    def step(batch):
        nonlocal times
        times += 1
        for _ in range(times):
            model(batch).sum().backward()

    assert "the same work each time" in _refused(model, step, batch)
