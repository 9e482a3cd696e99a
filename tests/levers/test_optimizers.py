"""Levers on the optimizer: no temporaries, or no gradients; the same parameters and states after some steps."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import lowtide
from levers.cases import pulled
from lowtide.levers import LEVERS
from lowtide.levers.lever import LeverNotApplicable, StepContext

WIDTH, DEPTH = 128, 6
MATRIX_BYTES = WIDTH * WIDTH * 4
PARAMETER_BYTES = DEPTH * (MATRIX_BYTES + WIDTH * 4)
STEP, FUSED = "step in backward", "fused optimizer"
Step = Callable[[Tensor], Tensor]


def build(kind: Any = torch.optim.AdamW, **settings: Any) -> tuple[nn.Sequential, Any]:
    """Layers whose gradients are larger than their activations, in two parameter groups."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)))
    groups = [
        {"params": [*model[:2].parameters()], "lr": 1e-2},
        {"params": [*model[2:].parameters()], "weight_decay": 0.1},
    ]
    return model.train(), kind(groups, lr=1e-3, **settings)


def rows(n: int = 8) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(n, WIDTH)


def plain_step(model: nn.Module, optimizer: Any, *, micro: int = 1, between: Any = None, after: Any = None) -> Step:
    """Forward, backward (in `micro` passes), `between`, the update, and whatever comes `after`."""

    def step(batch: Tensor) -> Tensor:
        total = torch.zeros(())
        for part in batch.chunk(micro):
            loss = model(part).square().mean() / micro
            loss.backward()
            total += loss.detach()
        if between is not None:
            between(model)
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after()
        return total

    return step


def after_steps(model: nn.Module, optimizer: Any, step: Step, n: int = 3) -> dict[str, Tensor]:
    """Parameters, optimizer state and losses of `n` steps."""
    losses = {f"loss {i}": step(rows()) for i in range(n)}
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found = optimizer.state.get(parameter, {})
        kept |= {f"{name} {key}": value.clone() for key, value in found.items() if isinstance(value, Tensor)}
    return losses | kept


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def peak_of(step: Step, batch: Tensor) -> int:
    with lowtide.measure() as memory:
        step(batch)
    return memory.peak_bytes


def _each_by_its_norm(model: nn.Module) -> None:
    for parameter in model.parameters():
        clip_grad_norm_(parameter, 1e-3)


CLIPPINGS = {
    "none": None,
    "value": lambda model: clip_grad_value_(model.parameters(), 1e-4),
    "norm of each": _each_by_its_norm,
}


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.NAdam,
        torch.optim.Adafactor,
        torch.optim.ASGD,
    ],
)
def test_stepping_in_backward_gives_the_same_bits(kind: Any) -> None:
    results = []
    for names in ((), (STEP,)):
        model, optimizer = build(kind)
        with pulled(model, *names, optimizer=optimizer):
            results.append(after_steps(model, optimizer, plain_step(model, optimizer)))
    assert same(*results)


@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_with_accumulation_clipping_and_a_scheduler(micro: int, clipping: str) -> None:
    results = []
    for on in (False, True):
        model, optimizer = build()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        step = plain_step(model, optimizer, micro=micro, between=CLIPPINGS[clipping], after=schedule.step)
        if on:
            before = after_steps(*(fresh := build()), plain_step(*fresh), n=0)
            batch, state = rows(), torch.get_rng_state()
            settings = dict(LEVERS[STEP].settings(StepContext(model, step, batch, optimizer)))
            assert torch.equal(state, torch.get_rng_state())
            assert settings.pop("backwards") == micro
            assert set(settings) == {"none": set(), "value": {"clip_value", "norm_type"}}.get(
                clipping, {"clip_norm", "norm_type"}
            )
            assert same(before, after_steps(model, optimizer, step, n=0))  # looking changes nothing
            schedule.last_epoch, schedule._step_count = 0, 1
            for group, lr in zip(optimizer.param_groups, (1e-2, 1e-3), strict=True):
                group["lr"] = lr
            with pulled(model, STEP, optimizer=optimizer, backwards=micro, **settings):
                results.append(after_steps(model, optimizer, step))
        else:
            results.append(after_steps(model, optimizer, step))
        if clipping != "none":
            assert any(p.abs().max() > 0 for p in model.parameters())
    assert same(*results)


def test_gradients_never_exist_all_at_once() -> None:
    model, optimizer = build(torch.optim.SGD)
    step = plain_step(model, optimizer)
    plain = peak_of(step, rows(1))
    with pulled(model, STEP, optimizer=optimizer):
        found = peak_of(step, rows(1))
        assert all(parameter.grad is None for parameter in model.parameters())
    assert plain - found >= (DEPTH - 2) * MATRIX_BYTES
    assert peak_of(step, rows(1)) == plain
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_one_backward_too_many_is_an_error() -> None:
    model, optimizer = build()
    more = pytest.raises(lowtide.LowtideError, match=r"planned for 1 backward pass.*there was one more")
    with pulled(model, STEP, optimizer=optimizer), more:
        plain_step(model, optimizer, micro=2)(rows())


def _by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


@pytest.mark.parametrize(
    ("kind", "between", "why"),
    [
        (torch.optim.AdamW, _by_hand, "gradients are changed between backward and optimizer.step"),
        (torch.optim.AdamW, lambda m: clip_grad_value_(m[0].parameters(), 1.0), "some gradients are clipped"),
        (torch.optim.AdamW, lambda m: [clip_grad_value_(p, 1.0) for p in m.parameters()], "several sets of param"),
        (torch.optim.LBFGS, None, "LBFGS may read several parameters at once"),
    ],
)
def test_loops_that_need_all_gradients_are_refused_with_the_reason(kind: Any, between: Any, why: str) -> None:
    model, optimizer = build(kind) if kind is not torch.optim.LBFGS else (build()[0], None)
    optimizer = optimizer or torch.optim.LBFGS(model.parameters())
    with pytest.raises(LeverNotApplicable, match=why):
        LEVERS[STEP].settings(StepContext(model, plain_step(model, optimizer, between=between), rows(), optimizer))
    assert all(parameter.grad is None for parameter in model.parameters())


def sharpness_aware(model: nn.Module, optimizer: Any, *, through_data: bool = False) -> Step:
    """SAM: gradients are those of moved weights, the update is of the weights before."""

    def step(batch: Tensor) -> Tensor:
        model(batch).square().mean().backward()
        parameters = list(model.parameters())
        before = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=10.0)
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter, saved in zip(parameters, before, strict=True):
                (parameter.data if through_data else parameter).copy_(saved)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.mark.parametrize("through_data", [False, True])
def test_weights_that_are_moved_back_before_the_update_are_no_reason_to_fail(through_data: bool) -> None:
    model, optimizer = build()
    step = sharpness_aware(model, optimizer, through_data=through_data)
    with lowtide.fit(model, step, rows(512), budget="90%", levers=[STEP]) as fitted:
        assert not fitted.plan.levers
        assert any("parameters are written to between backward and optim" in note for note in fitted.plan.notes)
        assert fitted.verdict.proven
    with pytest.raises(lowtide.Infeasible) as refused:
        lowtide.fit(model, step, rows(1), budget="10%")
    assert FUSED in str(refused.value)
    assert STEP not in str(refused.value)


def test_a_lever_that_was_requested_in_vain_is_noted_and_not_suggested() -> None:
    model, optimizer = build(torch.optim.AdamW, foreach=True)
    step = sharpness_aware(model, optimizer, through_data=False)
    with pytest.raises(lowtide.Infeasible) as refused:
        lowtide.fit(model, step, rows(1), budget="10%", levers=[STEP])
    *_, nearest, little, note = str(refused.value).splitlines()
    assert f"levers=({FUSED!r},)" in nearest
    assert little.startswith("  Note: plans save next to nothing of this step: ")
    assert little.endswith("at its peak, after backward, are temporaries, as of the update.")
    assert note.startswith(f"  Note: lever {STEP!r} is not used: ")
    assert "parameters are written to between" in note


def test_a_step_that_gives_something_else_without_gradients_keeps_them() -> None:
    model, optimizer = build()

    def step(batch: Tensor) -> tuple[Tensor, Tensor]:
        loss = model(batch).square().mean()
        loss.backward()
        norm = sum((p.grad.norm() for p in model.parameters() if p.grad is not None), start=torch.zeros(()))
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    with lowtide.fit(model, step, rows(256), budget="90%", levers=[FUSED, STEP]) as fitted:
        assert STEP not in [lever.name for lever in fitted.plan.levers]
        assert any("with it, bits of the loss differ" in note for note in fitted.plan.notes)
        assert fitted.verdict.proven


def _the_same_again(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = float(group["lr"])


def _warmed_up(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group.update(lr=group["lr"] / 2)


def _in_place(optimizer: Any) -> None:
    optimizer.param_groups[1]["lr"].mul_(2)


@pytest.mark.parametrize("sets", [_the_same_again, _warmed_up, _in_place])
def test_a_learning_rate_that_is_set_after_backward_is_refused(sets: Any) -> None:
    model, optimizer = build()
    if sets is _in_place:
        optimizer.param_groups[1]["lr"] = torch.tensor(1e-3)
    groups, before = [*optimizer.param_groups], [float(group["lr"]) for group in optimizer.param_groups]
    late = plain_step(model, optimizer, between=lambda _: sets(optimizer))
    with pytest.raises(LeverNotApplicable, match="'lr' of a parameter group is set between"):
        LEVERS[STEP].settings(StepContext(model, late, rows(), optimizer))
    assert all(one is other for one, other in zip(groups, optimizer.param_groups, strict=True))
    assert before == [float(group["lr"]) for group in optimizer.param_groups]
    early = plain_step(model, optimizer, after=lambda: sets(optimizer))
    LEVERS[STEP].settings(StepContext(model, early, rows(), optimizer))
    with pulled(model, STEP, optimizer=optimizer):
        early(rows())
        if sets is _the_same_again:
            late(rows())
        else:
            with pytest.raises(lowtide.LowtideError, match="already updated the parameters"):
                late(rows())


def test_a_gradient_scaler_is_refused() -> None:
    model, optimizer = build()
    scaler = torch.amp.GradScaler("cpu")

    def step(batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    with pytest.raises(LeverNotApplicable, match="GradScaler"):
        LEVERS[STEP].settings(StepContext(model, step, rows(), optimizer))


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_fused_kernels_take_no_temporaries_and_go_again(kind: Any) -> None:
    model, optimizer = build(kind, foreach=True)
    step = plain_step(model, optimizer)
    before = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    step(rows(1))
    plain = peak_of(step, rows(1))
    with pulled(model, FUSED, optimizer=optimizer):
        step(rows(1))
        found = peak_of(step, rows(1))
    assert before == [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        temporaries = (DEPTH - 2) * MATRIX_BYTES  # of the larger group
        assert temporaries <= plain - found <= 1.1 * PARAMETER_BYTES
    assert peak_of(step, rows(1)) == plain


def test_an_optimizer_that_is_fused_or_has_no_such_kernels() -> None:
    for kind, settings, why in (
        (torch.optim.RMSprop, {}, "torch has no fused RMSprop"),
        (torch.optim.AdamW, {"fused": True}, "fused already"),
    ):
        model, optimizer = build(kind, **settings)
        with pytest.raises(LeverNotApplicable, match=why):
            LEVERS[FUSED].settings(StepContext(model, plain_step(model, optimizer), rows(), optimizer))
    with pytest.raises(LeverNotApplicable, match="none or several were found"):
        LEVERS[FUSED].settings(StepContext(model, plain_step(model, optimizer), rows(), None))


@pytest.mark.parametrize("name", [FUSED, STEP])
def test_fit_finds_the_optimizer_and_verifies(name: str) -> None:
    model, optimizer = build(torch.optim.AdamW, foreach=True)
    step, batch = plain_step(model, optimizer), rows(64)
    step(batch)
    known = after_steps(model, optimizer, step, n=0)
    gc.freeze()  # what is compared with does not count
    profile = lowtide.rehearse(model, step, batch)
    with pytest.raises(lowtide.Infeasible, match=f"levers=.*'{FUSED}'"):
        lowtide.fit(model, step, batch, budget="90%", profile=profile)
    with lowtide.fit(model, step, batch, budget="90%", profile=profile, levers=[name]) as fitted:
        (lever,) = fitted.plan.levers
        assert lever.name == name
        assert profile.measured_plain_peak_bytes is not None
        assert lever.bytes == profile.measured_plain_peak_bytes - (fitted.profile.measured_plain_peak_bytes or 0)
        assert fitted.verdict.within_budget
        assert fitted.verdict.identical
        assert (fitted.verdict.levers == (FUSED,)) == (name == FUSED)
        if name == FUSED:
            assert fitted.verdict.relative_differences is not None
            assert fitted.verdict.relative_differences["loss"] == 0
            assert fitted.verdict.relative_differences["gradients"] == 0
            assert 0 < fitted.verdict.relative_differences["parameters"] < 1e-6
        else:
            assert fitted.verdict.differences is not None
            assert "gradients" not in fitted.verdict.differences
            assert "parameters" in fitted.verdict.differences
    assert same(known, after_steps(model, optimizer, step, n=0))
    with pytest.raises(lowtide.LowtideError, match="pass optimizer="):
        lowtide.apply(model, fitted.plan)
    with lowtide.apply(model, fitted.plan, optimizer=optimizer):
        step(batch)
