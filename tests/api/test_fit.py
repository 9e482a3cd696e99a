"""The whole way: a budget in bytes, a plan, a measured peak below it, and the same bits."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from comparing import equal
from lowtide.api.plan_attempts import REPAIRS, prove
from lowtide.api.verify import Verdict
from lowtide.levers.lever import StepContext
from lowtide.planner import find_smallest_peak
from lowtide.planner.records import Plan
from models import MODELS, build, same, state


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "share", [pytest.param(0.15, marks=pytest.mark.slow), 0.5, pytest.param(0.85, marks=pytest.mark.slow)]
)
def test_a_fitted_step_stays_within_its_budget_and_gives_the_same_bits(name, share):
    """The budget is at `share` of the way from the smallest reachable peak to the plain one."""
    plain, planned = build(name), build(name)
    torch.manual_seed(7)
    expected = [plain.step(plain.batch) for _ in range(3)]  # first: its state counts, too
    profile = lowtide.rehearse(planned.model, planned.step, planned.batch)
    _, least = find_smallest_peak(profile)
    most = profile.measured_plain_peak_bytes
    budget = int(least.peak_bytes + share * (most - least.peak_bytes))
    with lowtide.fit(planned.model, planned.step, planned.batch, budget=budget, profile=profile) as fitted:
        assert fitted.verdict.measured_peak_bytes <= budget
        assert fitted.verdict.predicted_peak_bytes == pytest.approx(fitted.verdict.measured_peak_bytes, rel=0.02)
        assert fitted.verdict.identical
        torch.manual_seed(7)
        losses = [planned.step(planned.batch) for _ in range(3)]
        assert not fitted.applied.drifted
    assert equal(expected, losses)
    assert same(state(plain), state(planned))


def test_nothing_of_the_trial_steps_waits_for_the_garbage_collector():
    case = build("gpt2")
    optimizer = torch.optim.AdamW(case.model.parameters())
    found = []

    def step(batch):
        loss = case.model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.extend(weakref.ref(x) for x in (loss, *(entry["exp_avg"] for entry in optimizer.state.values())))
        return {"loss": loss}

    try:
        gc.disable()
        lowtide.fit(case.model, step, case.batch, budget="70%").remove()
        assert not [x() for x in found if x() is not None]
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def fitted():
    case = build("gpt2")
    fitted = lowtide.fit(case.model, case.step, case.batch, budget="70%")
    yield case, fitted
    fitted.remove()


def test_the_model_looks_as_before_while_a_plan_is_applied(fitted):
    case, _ = fitted
    fresh = build("gpt2").model
    assert [*case.model.state_dict()] == [*fresh.state_dict()]
    assert [n for n, _ in case.model.named_modules()] == [n for n, _ in fresh.named_modules()]
    assert [n for n, _ in case.model.named_parameters()] == [n for n, _ in fresh.named_parameters()]
    assert [type(m) for m in case.model.modules()] == [type(m) for m in fresh.modules()]
    for one, other in zip(case.model.modules(), fresh.modules(), strict=True):
        assert len(one._forward_hooks) == len(other._forward_hooks)
        assert len(one._forward_pre_hooks) == len(other._forward_pre_hooks)
    for clone in (copy.deepcopy(case.model), pickle.loads(pickle.dumps(case.model))):
        assert same(dict(clone.named_parameters()), dict(case.model.named_parameters()))
        clone(**case.batch).loss.backward()
        assert not any("_compiled_call_impl" in module.__dict__ for module in clone.modules())


def test_the_summary_says_what_was_reached_and_proven(fitted):
    text = str(fitted[1])
    assert "peak (budget" in text
    assert "bit-identical to the plain step: loss, gradients, parameters, optimizer state and random numbers" in text


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_fitted_object_can_not_be_copied_and_the_error_says_what_can(fitted, copied):
    with pytest.raises(lowtide.LowtideError, match=r"lowtide\.apply\(copy, fitted\.plan\)"):
        copied(fitted[1])


def test_records_survive_json(fitted):
    _, fitted = fitted
    assert Plan.from_json(fitted.plan.to_json()) == fitted.plan
    assert Verdict.from_json(fitted.verdict.to_json()) == fitted.verdict


def test_a_plan_from_a_file_applies_to_an_equal_model(fitted, tmp_path):
    _, fitted = fitted
    fitted.plan.to_json(tmp_path / "plan.json")
    other = build("gpt2")
    known = state(other)
    gc.freeze()  # what is compared with does not count
    verdict = lowtide.verify(other.model, other.step, other.batch, Plan.from_json(tmp_path / "plan.json"))
    assert verdict.within_budget
    assert verdict.identical
    assert same(known, state(other))


def test_a_plan_for_something_else_is_refused_with_the_differences(fitted):
    _, fitted = fitted
    other = build("bert")
    with pytest.raises(lowtide.StalePlan, match="model: made for GPT2LMHeadModel"):
        lowtide.apply(other.model, fitted.plan)
    same_model = build("gpt2")
    shorter = {name: tensor[:, :32] for name, tensor in same_model.batch.items()}
    with pytest.raises(lowtide.StalePlan, match="batch: made for"):
        lowtide.verify(same_model.model, same_model.step, shorter, fitted.plan)
    with pytest.raises(lowtide.StalePlan, match="batch: made for"):
        lowtide.fit(same_model.model, same_model.step, shorter, budget="70%", profile=fitted.profile)


@pytest.mark.filterwarnings(
    "ignore:this step saves different tensors than the rehearsed step"
)  # another attention kernel
def test_a_plan_holds_for_smaller_batches_and_shorter_sequences():
    planned, plain = build("gpt2"), build("gpt2")
    with lowtide.fit(planned.model, planned.step, planned.batch, budget="60%") as fitted:
        for rows, length in [(4, 64), (2, 64), (4, 24), (1, 7)]:
            torch.manual_seed(7)
            expected = plain.step({key: tensor[:rows, :length] for key, tensor in plain.batch.items()})
            torch.manual_seed(7)
            with lowtide.measure() as memory:
                loss = planned.step({key: tensor[:rows, :length] for key, tensor in planned.batch.items()})
            assert torch.equal(loss, expected)
            assert fitted.profile.static.total + memory.peak_bytes <= fitted.plan.budget_bytes
    assert same(state(plain), state(planned))


def test_calls_beyond_the_rehearsed_ones_are_recomputed_and_reported_once():
    """As in a solver of differential equations that takes more steps than in the rehearsal."""

    class Solver(nn.Module):
        n_steps = 3

        def __init__(self):
            super().__init__()
            self.field = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16))

        def forward(self, x):
            for _ in range(self.n_steps):
                x = x + self.field(x)
            return x

    torch.manual_seed(0)
    model, batch = Solver(), torch.randn(256, 16)

    def step(batch):
        model.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss.detach()

    def longer():
        model.n_steps = 6
        with lowtide.measure() as memory:
            loss = step(batch)
        model.n_steps = 3
        return [loss, *(parameter.grad.clone() for parameter in model.parameters())], memory.peak_bytes

    expected, plain_peak_bytes = longer()
    with lowtide.fit(model, step, batch, budget="70%") as fitted:
        kept = plain_peak_bytes - (fitted.profile.measured_plain_peak_bytes - fitted.plan.predicted.peak_bytes)
        step(batch)
        with pytest.warns(UserWarning, match="calls modules more often") as said:
            (values, peak_bytes), (again, _) = longer(), longer()
        assert len([each for each in said if "calls modules" in str(each.message)]) == 1
    assert equal(values, expected)
    assert equal(again, expected)
    assert peak_bytes < kept  # less than if only the rehearsed calls were recomputed


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*the peak may be above the budget")
def test_batches_that_are_larger_than_the_planned_one_are_said_once_and_unfrozen_parameters_are_not(tmp_path):
    case = build("gpt2")
    model, step = case.model, case.step
    larger = {key: tensor.repeat(2, 1) for key, tensor in case.batch.items()}
    with lowtide.fit(model, step, case.batch, budget="70%") as fitted:
        fitted.plan.to_json(tmp_path / "plan.json")
        model.eval()
        model(**larger)  # nothing is saved for backward there
        model.train()
        with pytest.warns(
            UserWarning, match=r"given \[8, 64\] int64, .*plan is for \[4, 64\] int64, .*peak may be above"
        ):
            step(larger)
        step(larger)  # another warning would be an error
    model.transformer.wte.requires_grad_(False)
    with lowtide.fit(model, step, case.batch, budget="70%"):
        model.transformer.wte.requires_grad_(True)
        step(case.batch)  # no warning: parameters that were updated are counted while they are frozen
    said = []
    with lowtide.apply(model, Plan.from_json(tmp_path / "plan.json"), say=said.append):
        step(case.batch)
        assert not said
        step(larger)
        step(larger)
    assert len(said) == 1
    step(larger)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*the peak may be above the budget")
def test_a_block_that_takes_the_place_of_a_planned_one_is_said_once():
    case = build("gpt2")
    blocks = case.model.transformer.h
    with lowtide.fit(case.model, case.step, case.batch, budget="70%"):
        case.step(case.batch)
        blocks[1] = copy.deepcopy(blocks[1])
        with pytest.warns(UserWarning, match=r"another module at transformer\.h\.1, .*peak may be above"):
            case.step(case.batch)
        case.step(case.batch)  # another warning would be an error


@pytest.mark.parametrize("unfrozen", [False, True])
def test_larger_batches_are_reported_also_for_parts_of_the_model(unfrozen):
    torch.manual_seed(0)
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))})
    model["decoder"] = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 64))
    model["encoder"][0].weight.requires_grad_(not unfrozen)

    def step(batch):
        loss = model["decoder"](model["encoder"](batch)).square().mean()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    batch = torch.randn(256, 64)
    with lowtide.fit(model, step, batch, budget="90%"):
        model["encoder"][0].weight.requires_grad_(True)
        with pytest.warns(UserWarning, match=r"ModuleDict (was given \[300, 64\]|has 8 parameters).*may be above"):
            step(batch if unfrozen else torch.randn(300, 64))
        step(torch.randn(400, 64))  # another warning would be an error


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*the peak may be above the budget")
@pytest.mark.parametrize("budget", ["70%", "100%"])
def test_a_batch_larger_than_planned_gets_the_plan_with_the_smallest_peak(tmp_path, budget):
    planned, plain = build("gpt2"), build("gpt2")
    larger = {key: tensor.repeat(2, 1) for key, tensor in planned.batch.items()}
    profile = lowtide.rehearse(planned.model, planned.step, planned.batch)
    asked = lowtide.plan(profile, budget)
    asked.to_json(tmp_path / "plan.json")
    made = Plan.from_json(tmp_path / "plan.json")
    assert made == asked
    assert made.fallback.decisions == find_smallest_peak(profile)[0]
    torch.manual_seed(7)
    expected = [plain.step(batch) for batch in (planned.batch, larger, planned.batch)]

    def peak(plan, batch):
        with lowtide.apply(planned.model, plan), lowtide.measure() as memory:
            planned.model(**batch).loss.backward()
        planned.model.zero_grad()
        return memory.peak_bytes

    most_saving = lowtide.plan(profile, find_smallest_peak(profile)[1].peak_bytes)
    assert most_saving.fallback is None
    assert peak(made, larger) == peak(most_saving, larger) < 0.95 * peak(replace(made, fallback=None), larger)
    assert peak(made, planned.batch) == peak(replace(made, fallback=None), planned.batch)
    torch.manual_seed(7)
    with lowtide.apply(planned.model, made) as applied:
        found = [planned.step(batch) for batch in (planned.batch, larger, planned.batch)]
    assert equal(expected, found)
    assert same(state(plain), state(planned))
    assert not applied.drifted


def test_a_batch_that_is_longer_and_has_fewer_rows_is_no_larger_one():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)])

    def peak(plan, *shape):
        with lowtide.apply(model, plan, say=lambda what: None), lowtide.measure() as memory:
            model(torch.zeros(*shape, 64)).sum().backward()
        model.zero_grad()
        return memory.peak_bytes

    profile = lowtide.rehearse(model, lambda x: model(x).sum().backward(), torch.zeros(16, 32, 64))
    made = lowtide.plan(profile, "85%")
    alone = replace(made, fallback=None)
    assert peak(made, 8, 64) == peak(alone, 8, 64)
    assert peak(made, 8, 65) < peak(alone, 8, 65)


@pytest.mark.slow
def test_training_in_eval_mode_under_a_plan_is_reported() -> None:
    case = build("gpt2")
    with lowtide.fit(case.model, case.step, case.batch, budget="70%"):
        case.step(case.batch)
        case.model.eval()
        for _ in range(2):
            case.step(case.batch)
        with pytest.warns(UserWarning, match=r"GPT2LMHeadModel is trained in eval mode, where a plan does nothing"):
            case.step(case.batch)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*outside the plan")
def test_several_optimizers_and_gradients_from_before_the_plan_are_no_reason_to_say_so() -> None:
    case = build("gpt2")
    model, parameters = case.model, [*case.model.parameters()]
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in (parameters[::2], parameters[1::2])]
    with lowtide.fit(model, case.step, case.batch, budget="70%") as fitted:
        plan = fitted.plan
    model(**case.batch).loss.backward()
    with lowtide.apply(model, plan):
        for _ in range(4):
            for optimizer in (*optimizers, optimizers[0]):
                optimizer.step()
            model(**case.batch).loss.backward()


@pytest.mark.parametrize(
    ("part", "says"),
    [
        pytest.param(None, "GPT2LMHeadModel is trained outside the plan", marks=pytest.mark.slow),
        ("transformer.h.1", r"transformer.h.1 \(GPT2Block\) is"),
    ],
)
def test_code_compiled_under_a_plan_is_reported_once(part: str | None, says: str) -> None:
    case = build("gpt2")
    model = case.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(called: Callable[..., Any]) -> None:
        called(**case.batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with lowtide.fit(model, case.step, case.batch, budget="70%"):
        if part is None:
            called = torch.compile(model, backend="eager")
        else:
            called = model
            model.get_submodule(part).compile(backend="eager")
        optimizer.step()  # nothing has a gradient: that was no training
        for _ in range(2 if part is None else 0):  # which may use gradients from before
            step(called)
        with pytest.warns(UserWarning, match=f"{says}.* compiled code"):
            step(called)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*outside the plan")
            step(called)
    assert part is None or model.get_submodule(part)._compiled_call_impl is not None


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"offload": True}, "on the CPU"),
        ({"shapes": "auto", "levers": ["loss head"]}, "combined with levers or offload"),
    ],
)
def test_contradicting_arguments_are_refused_before_anything_runs(asked, why):
    model = nn.Linear(2, 2)
    with pytest.raises(lowtide.LowtideError, match=why):
        lowtide.fit(model, lambda batch: pytest.fail("the step ran"), torch.ones(2), budget="50%", **asked)


def test_records_of_another_kind_are_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(lowtide.LowtideError, match=r"found str; Plan.from_json\(path\) reads one"):
        lowtide.apply(model, "plan.json")
    with pytest.raises(lowtide.LowtideError, match="found dict"):
        lowtide.fit(model, lambda batch: pytest.fail("the step ran"), torch.ones(2), budget="50%", profile={})


@pytest.mark.parametrize("budget", [0, -1, "0%", "some", "8 parsecs", 3.5, None])
def test_an_invalid_budget_is_refused_before_anything_runs(budget):
    def never(batch):
        raise AssertionError("the step ran")

    case = build("gpt2")
    with pytest.raises(lowtide.BudgetError):
        lowtide.fit(case.model, never, case.batch, budget=budget)


def test_a_budget_that_can_not_be_met_says_the_nearest_that_can():
    case = build("gpt2")
    known = state(case)
    with pytest.raises(lowtide.Infeasible) as caught:
        lowtide.fit(case.model, case.step, case.batch, budget="1MiB")
    assert same(known, state(case))
    assert not any("_compiled_call_impl" in module.__dict__ for module in case.model.modules())
    smallest = caught.value.smallest_peak_bytes
    assert sum(caught.value.parts.values()) == smallest
    with lowtide.fit(case.model, case.step, case.batch, budget=smallest + smallest // 100) as fitted:
        assert fitted.verdict.within_budget


def test_a_step_that_does_not_even_fit_while_it_is_rehearsed_is_refused_with_what_to_do_next():
    case = build("gpt2")
    known = state(case)

    def step(batch):
        case.step(batch)
        torch.empty(1 << 50)

    with pytest.raises(
        lowtide.RehearsalError, match=r"can't allocate memory.*\n  Rehearse it with a smaller batch"
    ) as caught:
        lowtide.fit(case.model, step, case.batch, budget="70%")
    assert caught.value.__context__ is None  # which would hold the failed step's tensors
    assert same(known, state(case))


def test_a_model_that_fits_anyway_is_left_alone():
    case = build("gpt2")
    with lowtide.fit(case.model, case.step, case.batch, budget="100%") as fitted:
        assert not fitted.plan.recompute
        assert not fitted.plan.replay
        assert "everything is kept" in str(fitted)


class Dropped(nn.Module):
    """A layer that is left out at random."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x if torch.rand(()) < 0.3 else x + self.down(torch.tanh(self.up(x)))


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("seed", range(4))
def test_where_layers_are_dropped_at_random_the_rehearsed_ones_are_measured(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(*[Dropped() for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    with lowtide.fit(model, step, torch.randn(16, 32, 64), budget="85%", optimizer=optimizer) as fitted:
        assert fitted.verdict.within_budget
        assert fitted.verdict.identical
        assert not fitted.verdict.drifted


def test_a_step_that_raises_under_a_plan_leaves_the_model_usable():
    case = build("resnet")
    with lowtide.fit(case.model, case.step, case.batch, budget="95%"):
        wrong = {"pixel_values": torch.randn(8, 5, 48, 48), "labels": case.batch["labels"]}
        with pytest.raises((RuntimeError, ValueError)):
            case.step(wrong)
        case.step(case.batch)
    reference = build("resnet")
    with pytest.raises((RuntimeError, ValueError)):
        reference.step(wrong)
    reference.step(reference.batch)
    assert same(state(reference), state(case))


class _Outside(nn.Module):
    """A model whose training step calls its parts, and whose loss is outside."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU()) for _ in range(6)))
        self.head = nn.Linear(256, 256)


def test_a_step_may_call_the_parts_of_a_model():
    torch.manual_seed(0)
    model, batch = _Outside(), torch.randn(512, 256)

    def step(batch):
        loss = model.head(model.body(batch)).square().mean()
        loss.backward()
        return loss.detach()

    with lowtide.fit(model, step, batch, budget="75%") as fitted:
        assert fitted.plan.recompute
        assert fitted.verdict.identical


_TOO_LITTLE = """
import resource, torch, lowtide
from models import build
torch.set_num_threads(1)
case = build("gpt2 fused")
case.batch["input_ids"] = torch.randint(0, 500, (256, 64)); case.batch["labels"] = case.batch["input_ids"].clone()
case.step({k: v[:1] for k, v in case.batch.items()})
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 330 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    case.step(case.batch)
    raise SystemExit("the plain step fits")
except RuntimeError as error:
    assert "can't allocate memory" in str(error)
case.optimizer.zero_grad()
profile = lowtide.rehearse(case.model, case.step, case.batch)
assert profile.measured_plain_peak_bytes is None and profile.notes
from lowtide.planner.simulate.simulator import predict
from lowtide.planner.records import Decisions
print(predict(profile, Decisions()).peak_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the address space is limited as Linux does it")
@pytest.mark.skipif(
    torch.__version__.startswith(("2.10.", "2.11.")),
    reason="its profiler does not start again once it ran out of memory",
)
def test_a_step_that_does_not_fit_is_rehearsed_under_the_plan_with_the_smallest_peak(run_python, monkeypatch):
    """In a process with too little address space: a real out-of-memory error, and the peak that would have been."""
    case = build("gpt2 fused")
    ids = torch.randint(0, 500, (256, 64))
    batch = {"input_ids": ids, "labels": ids.clone()}
    case.step({k: v[:1] for k, v in batch.items()})
    true = lowtide.rehearse(case.model, case.step, batch).measured_plain_peak_bytes
    for threshold in ("MMAP", "TRIM"):  # so that freed memory leaves the address space at once
        monkeypatch.setenv(f"MALLOC_{threshold}_THRESHOLD_", "65536")
    ran: subprocess.CompletedProcess[str] = run_python("-c", _TOO_LITTLE, path=Path(__file__).parents[1])
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) == pytest.approx(true, rel=0.02)


def noisy(model: nn.Module, loss_of):
    """A step whose gradients are never the same twice, as where a device adds up in any order."""

    def step(batch):
        model.zero_grad(set_to_none=True)
        loss = loss_of(batch)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad += int.from_bytes(os.urandom(3)) / 2**24
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        return loss.detach()

    return step


def _stepped(model: nn.Module, **settings: Any) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **settings)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


def _moved_by_hand(model: nn.Module) -> Callable[[], None]:
    other = torch.nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    optimizer = torch.optim.SGD([other], lr=0.1)

    def update() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        optimizer.step()

    return update


@pytest.mark.parametrize(
    ("ends", "compared"),
    [
        (lambda model: lambda: None, ("gradients",)),
        (lambda model: model.zero_grad, ("gradients",)),
        (_stepped, ("gradients", "parameters")),
        (_moved_by_hand, ("gradients", "parameters")),
        (lambda model: _stepped(model, momentum=0.9), ("gradients", "parameters", "optimizer state")),
    ],
)
@pytest.mark.parametrize("norm", [False, True])
def test_a_verdict_names_only_what_the_step_has_made(ends, compared, norm):
    torch.manual_seed(0)
    layers = [layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.GELU())]
    model = nn.Sequential(*layers, *([nn.BatchNorm1d(64)] if norm else []))
    end = ends(model)

    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        end()

    with lowtide.fit(model, step, torch.randn(256, 64), budget="90%") as fitted:
        assert fitted.verdict.proven
        wanted = {*compared, "random numbers", *(["buffers"] if norm else [])}
        assert fitted.verdict.differences == dict.fromkeys(wanted, ())


def test_nondeterministic_results_are_not_held_against_a_plan():
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))
    batch = torch.randn(256, 64)
    step = noisy(model, lambda batch: model(batch).square().mean())
    with lowtide.fit(model, step, batch, budget="80%") as fitted:
        verdict = fitted.verdict
        assert fitted.plan.recompute
        assert verdict.identical
        assert verdict.differences["gradients"]
        assert tuple(verdict.nondeterministic) == ("gradients", "parameters")
        assert not verdict.differences["loss"]
        varying = [f"{kind} ({len(verdict.differences[kind])} differ)" for kind in verdict.nondeterministic]
        said = f"loss and random numbers; it is not deterministic in its {' and '.join(varying)}"
        assert f"bit-identical to the plain step: {said}" in str(fitted)
    assert Verdict.from_json(verdict.to_json()) == verdict
    compiled = replace(verdict, audited=False, differences=None, nondeterministic={})
    assert not compiled.proven
    assert compiled.proof == "NOT PROVEN: the plain step does not fit"
    gradients = {"gradients": ("0.weight",)}
    one = replace(verdict, differences={"loss": (), **gradients}, nondeterministic=gradients)
    assert one.proof.endswith("it is not deterministic in its gradients (1 differs: 0.weight)")
    other = replace(one, differences={"loss": (), "gradients": ("0.bias", "0.weight")})
    assert other.differing == ("gradients",)
    assert other.proof == "NOT bit-identical to the plain step: gradients"


def test_copies_on_several_devices_are_refused():
    model = nn.DataParallel(nn.Linear(2, 2))
    model.device_ids = [0, 1]  # as on a machine with two GPUs
    with pytest.raises(lowtide.RehearsalError, match=r"on 2 devices.*CUDA_VISIBLE_DEVICES=0"):
        lowtide.fit(model, lambda batch: pytest.fail("the step ran"), torch.ones(2), budget="50%")


def test_a_model_on_two_devices_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(lowtide.RehearsalError, match="are on cpu and meta: memory is planned for one"):
        lowtide.rehearse(model, lambda batch: model(batch).sum().backward(), torch.ones(2, 4))


def test_a_budget_that_the_device_has_no_room_for_is_refused_in_words():
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(64, 64)

    def step(batch):
        model(batch).sum().backward()
        if step.fails:
            torch.empty(2**60, dtype=torch.uint8)

    step.fails = False
    profile = lowtide.rehearse(model, step, batch)
    step.fails = True
    with pytest.raises(lowtide.RehearsalError, match=r"under a plan for 1 GiB ran out of memory(.|\n)*smaller budget"):
        lowtide.fit(model, step, batch, budget="1GiB", profile=profile, levers=())
    assert not any("_compiled_call_impl" in module.__dict__ for module in model.modules())


class Dropping(nn.Module):
    """Layers of which every second run passes over the first half."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(8))
        self.short = True

    def forward(self, x):
        for layer in self.layers[4:] if self.short else self.layers:
            x = x + layer(x)
        return x.square().mean()


def test_a_step_that_does_more_than_the_rehearsed_one_is_said_to_be_over_the_budget_and_what_may_be_behind_it():
    model, x = Dropping(), torch.randn(4096, 32)

    def step(x):
        model(x).backward()

    profile = lowtide.rehearse(model, step, x)
    model.short = False
    with pytest.raises(lowtide.OverBudget, match="LayerDrop"):
        lowtide.fit(model, step, x, budget="70%", profile=profile)


def test_the_last_plan_that_is_tried_for_a_budget_is_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other plan is measured a little over the budget."""
    model, batch = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(24))), torch.ones(256, 32)

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    profile = lowtide.rehearse(model, step, batch, in_place=False)
    decisions, tried = find_smallest_peak(profile)[0], []

    def measured_over(site: StepContext, plan: Plan) -> Verdict:
        verdict = prove(site, plan)
        tried.append(plan)
        is_over = plan.decisions != decisions
        return replace(verdict, measured_peak_bytes=plan.budget_bytes + 1) if is_over else verdict

    monkeypatch.setattr("lowtide.api.fit.prove", measured_over)
    with lowtide.fit(model, step, batch, budget="85%", profile=profile, in_place=False) as fitted:
        assert fitted.plan.decisions == decisions
        assert fitted.verdict.within_budget
    assert len(tried) == REPAIRS


def test_the_error_does_not_speak_of_temporaries_where_there_are_none() -> None:
    """Beside weights, and what is read in backward, there is nothing to save."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    profile = lowtide.rehearse(model, step, torch.randn(16, 32))
    with pytest.raises(lowtide.Infeasible) as caught:
        lowtide.plan(profile, 1)
    assert not caught.value.parts.get("temporaries")
    assert "next to nothing" not in str(caught.value)
