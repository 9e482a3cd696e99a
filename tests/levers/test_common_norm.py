"""Clipping by the common norm while backward steps: gradients are computed twice, and the bits are the same."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from levers.cases import model_of, pulled
from levers.normed import (
    FEATURES,
    NAME,
    Checkpointed,
    Held,
    Named,
    Normed,
    after,
    batch_of,
    found_out,
    results,
    step_of,
)
from levers.test_optimizers import MATRIX_BYTES, PARAMETER_BYTES, after_steps, build, peak_of, rows, same
from lowtide.planner.records import Plan


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("max_norm", [0.01, 1000.0])
@pytest.mark.parametrize(
    "more", [{}, {"norm_type": float("inf")}, {"norm_type": 1.0, "foreach": False, "error_if_nonfinite": True}]
)
def test_the_bits_are_those_of_the_plain_loop(kind: Any, max_norm: float, more: dict[str, Any]) -> None:
    plain, found = results(Normed, kind, batch_of(), max_norm=max_norm, **more)
    assert same(plain, found)
    other, _ = results(Normed, kind, batch_of(), max_norm=max_norm * 0.5, **more)
    clips = max_norm < 1
    assert same(plain, other) != clips  # else it would show nothing


def test_gradients_that_are_not_finite_are_no_update_that_a_loop_could_leave_out() -> None:
    """The loop finds no gradients and a norm of 0, so `if norm.isfinite(): optimizer.step()` would come too late."""
    model = nn.Linear(FEATURES, FEATURES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = step_of(model, optimizer)
    with pulled(model, NAME, optimizer=optimizer, **found_out(model, step, batch_of(), optimizer)):
        step(batch_of())
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(lowtide.LowtideError, match=r"norm of all gradients is (inf|nan). Nothing was updated"):
            step(batch_of() * float("inf"))
        assert same(before, model.state_dict())
        step(batch_of())
        assert not same(before, model.state_dict())


def test_a_model_that_is_checkpointed_and_computes_in_bfloat16() -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        first, last = nn.Linear(FEATURES, FEATURES).bfloat16(), nn.Linear(FEATURES, FEATURES)
        return nn.Sequential(first, nn.Dropout(0.2), nn.Tanh(), Checkpointed(last))

    assert same(*results(made, torch.optim.AdamW, batch_of().bfloat16()))


def test_a_step_that_stops_before_backward_holds_nothing() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved: list[weakref.ref[Any]] = []

    class Packed:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.detach()
            saved.append(weakref.ref(self))

    hooks = torch.autograd.graph.saved_tensors_hooks(Packed, lambda packed: packed.tensor)
    with pulled(model, NAME, optimizer=optimizer, clip_common_norm=1.0), hooks:
        model.last = model(batch_of())  # as some models do
        assert all(reference() is not None for reference in saved)
        del model.last
        assert all(reference() is None for reference in saved)
    assert len(saved) == 2


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_language_model(kind: Any) -> None:
    ids = torch.arange(48).reshape(2, 24) % 50

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=batch, labels=batch).loss
        return loss

    plain, found = results(lambda: model_of("gpt2", vocab_size=50), kind, ids, loss_of=loss_of, max_norm=0.05)
    assert same(plain, found)


@pytest.mark.parametrize("kind", [Named, Held, lambda *both: list(both), lambda *both: {"m": both[0], "s": [both[1]]}])
def test_several_outputs_that_lead_to_the_loss(kind: Any) -> None:
    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        output = model(batch)
        assert kind not in (Named, Held) or type(output) is kind
        if isinstance(output, dict):
            mean, (spread,) = output["m"], output["s"]
        else:
            mean, spread = output if isinstance(output, list | tuple) else (output.mean, output.spread)
        mean *= 2  # in place, as in a plain loop
        return mean.square().mean() + spread.exp().mean()

    assert same(*results(lambda: Normed(kind), torch.optim.SGD, batch_of(), loss_of=loss_of))


def test_it_saves_all_gradients_but_the_largest() -> None:
    model, optimizer = build(torch.optim.SGD)
    step = step_of(model, optimizer)
    plain = peak_of(step, rows(1))
    with pulled(model, NAME, optimizer=optimizer, **found_out(model, step, rows(1), optimizer)) as on:
        found = peak_of(step, rows(1))
        on.check()
        assert all(parameter.grad is None for parameter in model.parameters())
    gradients = PARAMETER_BYTES - MATRIX_BYTES
    assert gradients - MATRIX_BYTES <= plain - found <= gradients + MATRIX_BYTES
    assert peak_of(step, rows(1)) == plain


def test_fit_uses_it_and_plans_for_both_passes() -> None:
    model, optimizer = build(torch.optim.SGD)
    step, batch = step_of(model, optimizer), rows(64)
    known = after_steps(model, optimizer, step, n=0)
    profile = lowtide.rehearse(model, step, batch)
    plain_bytes = profile.measured_plain_peak_bytes or 0
    least = lowtide.planner.find_smallest_peak(profile)[1].peak_bytes
    budget = least - 2 * MATRIX_BYTES  # no plan reaches that while all gradients are there
    with pytest.raises(lowtide.Infeasible, match=f"levers=.*'{NAME}'"):
        lowtide.fit(model, step, batch, budget=budget, profile=profile)
    with lowtide.fit(model, step, batch, budget=budget, profile=profile, levers=[NAME]) as fitted:
        (lever,) = fitted.plan.levers
        assert lever.what.endswith("gradients are computed twice, first for their norm")
        assert "computed twice" in str(fitted)
        assert lever.extra_ms > 0  # a backward more
        assert fitted.plan.recompute or fitted.plan.replay
        assert fitted.verdict.identical
        assert fitted.verdict.measured_peak_bytes == fitted.plan.predicted.peak_bytes <= budget < plain_bytes
        text = fitted.plan.to_json()
    assert same(known, after_steps(model, optimizer, step, n=0))
    plain = after_steps(*(fresh := build(torch.optim.SGD)), step_of(*fresh))
    with lowtide.apply(model, Plan.from_json(text), optimizer=optimizer):
        assert same(plain, after_steps(model, optimizer, step))


@pytest.mark.parametrize("names", [pytest.param(("loss head",), marks=pytest.mark.loss_head), ("micro-batches",)])
def test_together_with_levers_that_change_the_model(names: tuple[str, ...]) -> None:
    found = []
    for more in ((), (NAME,)):
        model = model_of("llama")
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.arange(96).reshape(4, 24)
        step = step_of(model, optimizer, lambda model, batch: model(input_ids=batch, labels=batch).loss)
        settings = {"backwards": 1, "clip_common_norm": 0.01, "norm_type": 2}
        with pulled(model, *more, *names, optimizer=optimizer, n=2, **settings) as on:
            found.append(after(model, optimizer, step, ids, 3))
            on.check()
    assert same(*found)
