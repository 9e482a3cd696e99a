"""A rehearsal finds what is saved, predicts the peak of the plain step, and leaves nothing behind."""

import copy
import functools
import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils._pytree import tree_leaves

import lowtide
from budgets import step_of, within
from comparing import equal
from lowtide.errors import RehearsalError
from lowtide.planner import find_smallest_peak
from lowtide.planner.records import Decisions, Profile
from lowtide.planner.simulate.simulator import predict
from models import MODELS, Case, build, same, state

pytestmark = pytest.mark.xdist_group("rehearse")  # in one worker, for `rehearsed`


@pytest.fixture(scope="module", params=MODELS)
def rehearsed(request: pytest.FixtureRequest) -> tuple[Case, Profile]:
    case = build(request.param)
    return case, lowtide.rehearse(case.model, case.step, case.batch)


@pytest.mark.default_cases(2)
def test_the_peak_of_the_plain_step_follows_from_the_trace(rehearsed):
    _, profile = rehearsed
    predicted = predict(profile, Decisions()).peak_bytes
    assert predicted == pytest.approx(profile.measured_plain_peak_bytes, rel=0.02)


@pytest.mark.default_cases(2)
def test_static_memory_is_counted_once(rehearsed):
    case, profile = rehearsed
    parameters = sum(p.numel() * p.element_size() for p in case.model.parameters())
    assert profile.static.parameters == parameters  # tied weights: parameters() has them once
    steps = sum(4 for p in case.model.parameters() if p.requires_grad)  # AdamW's step counters, float32
    assert profile.static.optimizer == 2 * parameters + steps
    assert profile.static.gradients == 0


@pytest.mark.parametrize("first", ["zero_grad", "forward"])
def test_gradients_that_the_next_step_lets_go_of_are_counted_once(first):
    model, batch = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), torch.randn(64, 256)
    optimizer = torch.optim.SGD(model.parameters())

    def step(batch):
        if first == "zero_grad":
            optimizer.zero_grad()
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    profile = lowtide.rehearse(model, step, batch)
    assert profile.static.gradients == profile.static.parameters
    assert profile.measured_plain_peak_bytes == predict(profile, Decisions()).peak_bytes
    assert not profile.notes


class Routed(nn.Module):
    """Each row goes to the expert that a router chooses for it."""

    def __init__(self, find: str) -> None:
        super().__init__()
        self.find = find
        self.router = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen, y = self.router(x).argmax(-1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if self.find == "nonzero":
                rows = (chosen == i).nonzero().squeeze(1)
                y = y.index_add(0, rows, expert(x[rows]))
            elif self.find == "where":
                (rows,) = torch.where(chosen == i)
                y = y.index_add(0, rows, expert(x[rows]))
            elif self.find == "a mask":
                y = y.masked_scatter((chosen == i)[:, None], expert(x[chosen == i]))
            else:
                y = torch.where((chosen == i)[:, None], expert(x), y)
        return y


@pytest.mark.parametrize(
    ("find", "said"),
    [
        ("nonzero", "(nonzero in 0)"),
        ("where", "(nonzero in 0)"),
        ("a mask", "(indexing with a mask in 0)"),
        ("matrix_exp", "(matrix_exp in 1.parametrizations.weight.0)"),
        ("", None),
    ],
)
def test_that_memory_depends_on_contents_is_noted(find, said):
    last = nn.Linear(32, 32)
    if find == "matrix_exp":
        last = nn.utils.parametrizations.orthogonal(last)
    model = nn.Sequential(Routed(find), last)
    profile = lowtide.rehearse(model, lambda x: model(x).square().mean().backward(), torch.randn(64, 32))
    notes = [note for note in profile.notes if "depends on the contents of tensors" in note]
    assert len(notes) == (said is not None)
    if said is not None:
        assert said in notes[0]


class Sized(nn.Module):
    """A layer, and an operator whose memory may depend on the contents of its arguments."""

    def __init__(self, work: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.work = nn.Linear(8, 8), work

    def forward(self, x: Tensor) -> Tensor:
        return self.work(self.layer(x))


LENGTHS = torch.tensor([5, 3, 2, 2])


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda x: nn.utils.rnn.pack_padded_sequence(x, LENGTHS, batch_first=True).data, "pack_padded_sequence"),
        (lambda x: x.repeat_interleave(LENGTHS, dim=0), "repeat_interleave"),
        (lambda x: torch.repeat_interleave(x, repeats=LENGTHS, dim=0), "repeat_interleave"),
        (lambda x: x.repeat_interleave(3, dim=1), None),
        (lambda x: x.repeat_interleave(LENGTHS, dim=0, output_size=12), None),
        (lambda x: x * x.detach().sign().unique().sum(), "unique"),
        (
            lambda x: F.ctc_loss(x.log_softmax(-1), torch.ones(5, 3), torch.full((5,), 4), torch.ones(5).int()),
            "ctc_loss",
        ),
    ],
)
def test_an_operator_that_is_sized_by_contents_is_noted(work, said):
    model = Sized(work)
    profile = lowtide.rehearse(model, lambda x: model(x).sum().backward(), torch.randn(4, 5, 8))
    noted = [note for note in profile.notes if "depends on the contents of tensors" in note]
    assert len(noted) == (said is not None)
    assert said is None or f"({said} in the model)" in noted[0]


def test_most_saved_bytes_can_be_recomputed_or_replayed(rehearsed):
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


@pytest.mark.default_cases(1)
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


class _Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.BatchNorm1d(64))

    def forward(self, x):
        sys.stdout.write("runs ")
        y = self.layers(x)
        raise KeyError(f"the layer fails for {list(y.shape)}")


def test_a_call_that_raised_is_not_run_again(capsys):
    model, x = nn.Sequential(nn.Linear(64, 64), _Failing()), torch.randn(64, 64)
    with pytest.raises(KeyError, match="the layer fails"):
        lowtide.rehearse(model, lambda x: model(x).sum().backward(), x)
    assert capsys.readouterr().out.split() == ["runs"]


def test_an_optimizer_is_noticed_and_its_settings_come_back():
    case = build("gpt2")
    schedule = torch.optim.lr_scheduler.StepLR(case.optimizer, 1)

    def step(batch):
        case.step(batch)
        schedule.step()

    lowtide.rehearse(case.model, step, case.batch)
    assert case.optimizer.param_groups[0]["lr"] == 1e-3
    assert not case.optimizer.state


class _Average:
    """As many write it: a dict that every step binds again."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * parameter.detach()


class _Trainer:
    """A step as a method that reaches for more than its model."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        parts = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 64)
        self.model = nn.Sequential(*parts)
        self.teacher, self.slow = copy.deepcopy(self.model), copy.deepcopy(self.model)
        self.average = _Average(self.model)
        self.queue = torch.zeros(64)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(batch)
        output = self.model(batch)
        loss = (output - target).square().mean() + (output - self.slow(batch)).square().mean() + self.queue.sum()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        self.average.update(self.model)
        self.queue = 0.5 * self.queue + output.detach().mean(0)
        return loss.detach()

    def state(self) -> dict[str, torch.Tensor]:
        found = {"queue": self.queue.clone(), "scale": torch.tensor(self.scaler.get_scale())}
        found["schedule"] = torch.tensor([self.schedule.last_epoch, *self.schedule.get_last_lr()])
        for name in ("model", "teacher", "slow"):
            module = getattr(self, name)
            found |= {f"{name} {key}": value.clone() for key, value in module.state_dict().items()}
            found |= {f"{name} {n}.grad": p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        return found | {f"average {key}": value.clone() for key, value in self.average.shadow.items()}


class _Scaled:
    """A step with a gradient scaler, whose optimizer runs out of memory at one of its steps."""

    def __init__(self, scale: float, fails_at: int = 0, *, unscales: bool = False) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]
        self.model, self.batch = nn.Sequential(*layers), torch.randn(512, 64)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        self.numbers, self.fails_at, self.unscales = itertools.count(1), fails_at, unscales  # no rehearsal puts it back
        self.optimizer.register_step_pre_hook(self.fail)

    def fail(self, *_: object) -> None:
        if next(self.numbers) == self.fails_at:
            torch.empty(1 << 50)

    def step(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(batch).square().mean()).backward()
        if self.unscales:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def test_where_a_large_scale_would_leave_the_update_out_its_memory_is_seen_all_the_same():
    large, small = _Scaled(2.0**127), _Scaled(1.0)
    profiles = [lowtide.rehearse(made.model, made.step, made.batch) for made in (large, small)]
    assert profiles[0].static == profiles[1].static
    assert profiles[0].static.optimizer > 2 * sum(p.nbytes for p in large.model.parameters())
    assert profiles[0].measured_plain_peak_bytes == profiles[1].measured_plain_peak_bytes
    assert large.scaler.get_scale() == 2.0**127
    with lowtide.fit(large.model, large.step, large.batch, budget="95%", profile=profiles[0]) as fitted:
        assert fitted.verdict.identical
        assert fitted.verdict.within_budget
        assert large.scaler.get_scale() == 2.0**127


def test_a_scaler_whose_every_step_overflows_is_said():
    made = _Scaled(1.0)
    profile = lowtide.rehearse(made.model, lambda batch: made.step(batch * torch.inf), made.batch)
    assert [note for note in profile.notes if "no optimizer stepped in the rehearsal" in note]


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("fails_at", [1, 3])
def test_an_update_that_runs_out_of_memory_leaves_no_mark_on_the_scaler(fails_at, unscales):
    made, plain = (_Scaled(1024.0, at, unscales=unscales) for at in (fails_at, 0))
    lowtide.rehearse(made.model, made.step, made.batch)
    for trainer in (made, plain):
        trainer.step(trainer.batch)
    assert same(made.model.state_dict(), plain.model.state_dict())


def test_other_objects_of_the_step_are_restored():
    plain, fitted, batch = _Trainer(), _Trainer(), torch.randn(256, 64)
    known = fitted.state()
    lowtide.rehearse(fitted.model, fitted.step, batch)
    assert same(known, fitted.state())
    with lowtide.fit(fitted.model, fitted.step, batch, budget="90%"):
        assert same(known, fitted.state())
        for trainer in (plain, fitted):
            torch.manual_seed(1)
            for _ in range(4):
                trainer.step(batch)
    assert same(plain.state(), fitted.state())


_carried: torch.Tensor | None = None


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("kind", ["global", "nonlocal", "attribute", "in a dict", "a pair", "a list", "a dict"])
def test_a_state_that_is_carried_on_begins_anew(kind, begun):
    global _carried
    model, batch = nn.RNN(64, 64), torch.randn(16, 8, 64)
    first = torch.zeros(1, 8, 64) if begun else None
    several = {"a pair": tuple, "a list": list, "a dict": lambda pair: dict(zip("hc", pair, strict=True))}.get(kind)
    where, cell, _carried = {"state": several((first, first)) if begun and several else first}, first, first
    model.state = first

    def step(batch):
        global _carried
        nonlocal cell
        pair = tree_leaves(where["state"], is_leaf=lambda x: x is None)
        state = {"global": _carried, "nonlocal": cell, "attribute": model.state}.get(kind, pair[-1])
        output, state = model(batch, state)
        output.square().mean().backward()
        cell = _carried = model.state = state.detach()
        where["state"] = several((cell, cell.clone())) if several else cell

    known = where["state"]
    lowtide.rehearse(model, step, batch)
    assert where["state"] is known
    assert cell is _carried is model.state is first
    assert first is None or not first.any()


def test_a_teacher_and_its_like_are_in_memory_too():
    trainer, batch = _Trainer(), torch.randn(256, 64)
    profile = lowtide.rehearse(trainer.model, trainer.step, batch)
    parameters = sum(4 * p.numel() for p in trainer.model.parameters())
    buffers = sum(b.nbytes for b in trainer.model.buffers())
    assert (profile.static.parameters, profile.static.buffers) == (parameters, buffers)
    assert profile.static.others + profile.static.carried_over >= 2 * (
        parameters + buffers
    )  # its teacher and the slow copy


def test_lists_in_the_state_of_an_optimizer_are_as_they_were():
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)), torch.randn(32, 64)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3, history_size=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    def step(batch: torch.Tensor) -> torch.Tensor:
        return optimizer.step(closure).detach()

    step(batch)
    known = copy.deepcopy(optimizer.state_dict())
    lowtide.rehearse(model, step, batch)
    assert repr(optimizer.state_dict()) == repr(known)


@dataclass
class _Named:
    pixels: torch.Tensor


class _Plain:
    def __init__(self, pixels: torch.Tensor) -> None:
        self.parts = {"pixels": pixels}

    @property
    def pixels(self) -> torch.Tensor:
        return self.parts["pixels"]


@pytest.mark.parametrize("kind", [lambda p: transformers.BatchEncoding({"pixels": p}), _Named, _Plain])
def test_a_batch_of_any_kind_is_counted_recognized_and_restored(kind):
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    batch = kind(torch.ones(512, 64))

    def step(batch):
        model(batch.pixels.mul_(2)).sum().backward()

    profile = lowtide.rehearse(model, step, batch)
    assert profile.static.inputs == 512 * 64 * 4
    assert profile.fingerprint.batch == "[512, 64] float32"
    assert torch.equal(batch.pixels, torch.ones(512, 64))


def _step_of(model: nn.Module):
    return lambda batch: model(batch).sum().backward()


def _refused(model, step, batch) -> str:
    with pytest.raises(lowtide.RehearsalError) as caught:
        lowtide.rehearse(model, step, batch)
    return str(caught.value)


@pytest.mark.parametrize("switched_off", [torch.no_grad, torch.inference_mode])
def test_a_call_without_gradients_is_refused_in_words(switched_off):
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(32, 64)
    with switched_off(), pytest.raises(lowtide.RehearsalError, match=f"inside torch.{switched_off.__name__}"):
        lowtide.fit(model, _step_of(model), batch, budget="50%")


def test_what_can_not_be_rehearsed_is_refused_in_words():
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(32, 64)
    assert "eval mode" in _refused(nn.Sequential(nn.Linear(64, 64)).eval(), _step_of(model), batch)
    assert "without a call of Sequential" in _refused(model, lambda batch: batch.sum(), batch)
    assert "no backward" in _refused(model, lambda batch: model(batch).sum(), batch)
    assert "under no_grad" in _refused(model, torch.no_grad()(lambda batch: model(batch).sum()), batch)
    assert "function of the batch" in _refused(model, 3, batch)
    assert "torch.nn.Module" in _refused(lambda batch: batch, _step_of(model), batch)
    frozen = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
    assert "requires a gradient" in _refused(frozen, _step_of(frozen), batch)


@pytest.mark.parametrize("call", ["rehearse", "timeline", "fit", "estimate"])
def test_a_batch_is_no_leaf_to_differentiate_by_afterwards_unless_it_was_one(call):
    model, plain = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(256, 64)
    leaf = torch.randn(256, 64, requires_grad=True)
    gradient = leaf.grad = torch.ones(256, 64)

    def step(batch):
        model(batch[0].requires_grad_() + batch[1]).square().mean().backward()
        model[0].bias.requires_grad_(False)

    more = {"budget": "95%"} if call == "fit" else {}
    found = getattr(lowtide, call)(model, step, (plain, leaf), **more)
    if call == "fit":
        found.remove()
    assert not plain.requires_grad
    assert plain.grad is None
    assert leaf.requires_grad
    assert leaf.grad is gradient
    assert torch.equal(gradient, torch.ones(256, 64))
    assert model[0].bias.requires_grad


@pytest.mark.parametrize("when", ["before the forward", "before backward", "after the update"])
def test_gradients_that_go_are_gradients_no_longer(when):
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 4))
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)  # whose temporaries are the peak

    def step(batch):
        if when == "before the forward":
            optimizer.zero_grad()
        loss = model(batch).square().mean()
        if when == "before backward":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if when == "after the update":
            optimizer.zero_grad()

    batch = torch.randn(16, 64)
    step(batch)
    parts = predict(lowtide.rehearse(model, step, batch, optimizer=optimizer), Decisions()).parts
    n_bytes = sum(p.nbytes for p in model.parameters())
    assert parts["parameters"] == parts["gradients"] == n_bytes
    assert n_bytes < parts["temporaries"] < 2.1 * n_bytes


class Chain(nn.Sequential):
    """A frozen model, through which a gradient goes."""

    def __init__(self):
        torch.manual_seed(0)
        parts = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
        super().__init__(*parts)
        self.requires_grad_(False)


def _of_a_prompt(model):
    prompt = torch.randn(8, 64, requires_grad=True)
    optimizer = torch.optim.Adam([prompt])

    def step(batch):
        loss = model(prompt + batch[:, None]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, torch.randn(32, 64)


def _of_a_prompt_by_hand(model):
    prompt = torch.randn(8, 64, requires_grad=True)

    def step(batch):
        loss = model(prompt + batch[:, None]).square().mean()
        loss.backward()
        with torch.no_grad():
            prompt.sub_(prompt.grad)
        prompt.grad = None
        return loss

    return step, torch.randn(32, 64)


def _of_the_batch(model):
    return _step_of(model), torch.randn(256, 64, requires_grad=True)


def _said_in_the_step(model):
    def step(batch):
        loss = model(batch.clone().requires_grad_()).square().mean()
        loss.backward()
        return loss

    return step, torch.randn(256, 64)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("what", [_of_a_prompt, _of_a_prompt_by_hand, _of_the_batch, _said_in_the_step])
def test_a_gradient_may_go_through_a_model_that_is_frozen(what):
    model = Chain()
    step, batch = what(model)
    profile = lowtide.rehearse(model, step, batch)
    verdict = lowtide.verify(model, step, batch, lowtide.plan(profile, find_smallest_peak(profile)[1].peak_bytes))
    assert verdict.identical
    assert verdict.measured_peak_bytes <= verdict.predicted_peak_bytes < profile.measured_plain_peak_bytes
    peak_bytes = lowtide.estimate(model, step, batch).peak_bytes
    assert peak_bytes == profile.measured_plain_peak_bytes - profile.static.others  # a prompt's, a batch's gradient
    assert lowtide.estimate(model, step, batch, device="T4").verdict == "fits"


def test_a_step_that_differs_each_time_is_refused():
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(32, 64)
    times = 0

    def step(batch):
        nonlocal times
        times += 1
        for _ in range(times):
            model(batch).sum().backward()

    assert "the same work each time" in _refused(model, step, batch)


def test_a_step_whose_first_run_fills_a_cache_is_rehearsed():
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(32, 64)

    @functools.cache
    def scale(rows):
        return float(model(torch.ones(rows, 64)).detach().abs().mean())

    def step(batch):
        model(batch * scale(len(batch))).sum().backward()

    profile = lowtide.rehearse(model, step, batch)
    assert scale.cache_info().misses == 0
    assert [slot.address for slot in profile.slots] == ["0#0:0", "1#0:0"]


def test_a_step_that_draws_its_own_batch_is_refused():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)).train()
    batches = itertools.cycle([torch.randn(rows, 32) for rows in (512, 300, 700)])
    before = copy.deepcopy(model.state_dict())

    def step(batch):
        model(next(batches)).square().mean().backward()

    said = r"with \[512, 32\] float32 in one run and with \[300, 32\] float32 .*pass it in"
    with pytest.raises(RehearsalError, match=said):
        lowtide.rehearse(model, step, torch.randn(512, 32))
    assert equal(model.state_dict(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_tensor_passed_through_two_calls_is_one_value():
    torch.manual_seed(0)
    blocks = (nn.Sequential(parametrizations.weight_norm(nn.Linear(64, 64)), nn.GELU()) for _ in range(3))
    model, x = nn.Sequential(*(layer for block in blocks for layer in block)).train(), torch.randn(64, 64)

    def step(x):
        with parametrize.cached():
            loss = model(x).square().mean() + model(2 * x).mean()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    _, plan, verdict = within(model, step, x, 0)
    assert verdict.identical
    assert verdict.measured_peak_bytes <= plan.predicted.peak_bytes


def test_a_block_whose_argument_is_a_view_of_an_operator_s_result_can_be_replayed():
    """A linear layer's result on three dimensions is a view of a matrix, which the block's first linear saves."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.Softsign(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(nn.Linear(32, 64), *blocks)
    profile, plan, verdict = within(model, step_of(model), torch.randn(4, 64, 32), 0)
    assert [call.refused for call in profile.calls if call.cls == "Sequential"][1:] == 4 * [None]
    assert plan.replay
    assert verdict.identical
    assert verdict.within_budget


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * torch.sigmoid(x) + x


def test_torchscript_is_rehearsed_as_it_is_from_its_second_run_on():
    torch.manual_seed(0)
    model = nn.Sequential(torch.jit.script(Gated()), Gated(), torch.jit.script(Gated())).train()
    step = step_of(model)
    profile, plan, verdict = within(model, step, torch.randn(256, 64), 0)
    assert verdict.identical
    assert verdict.measured_peak_bytes == plan.predicted.peak_bytes < profile.measured_plain_peak_bytes


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_batches_buffers_and_gradients_are_counted_and_restored(layout):
    torch.manual_seed(0)
    adjacency = (torch.rand(128, 128) > 0.95).float().to_sparse(layout=layout).clone()
    model = nn.Sequential(nn.Embedding(128, 64, sparse=True), nn.Linear(64, 64), nn.Tanh())
    model.register_buffer("adjacency", adjacency.clone())
    tokens = torch.randint(0, 128, (128,))

    def step(batch):
        torch.sparse.mm(batch + model.adjacency, model(tokens)).sum().backward()

    step(adjacency)
    gradient = model[0].weight.grad
    known = gradient.to_dense()
    profile = lowtide.rehearse(model, step, adjacency)
    n = adjacency.values().numel()
    indices = 2 * n if layout is torch.sparse_coo else 129 + n
    assert profile.static.inputs == profile.static.buffers == 8 * indices + 4 * n
    assert model[0].weight.grad is gradient
    assert torch.equal(gradient.to_dense(), known)


class _Convolution(nn.Module):
    """Of a graph: the model itself saves a sparse matrix for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, adjacency: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second):
            nodes = torch.nn.functional.gelu(torch.sparse.mm(adjacency, layer(nodes)))
        return nodes


def test_a_model_that_saves_sparse_matrices_is_fitted():
    torch.manual_seed(0)
    adjacency = (torch.rand(512, 512) > 0.99).float().to_sparse()
    model, batch = _Convolution(), (adjacency, torch.randn(512, 64))

    def step(batch):
        loss = model(*batch).square().mean()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    with lowtide.fit(model, step, batch, budget="90%") as fitted:
        assert fitted.verdict.within_budget


class _Correlation(nn.Module):
    """By Fourier transforms: what it multiplies by is a conjugate that was not computed."""

    def __init__(self):
        super().__init__()
        self.linear, self.act = nn.Linear(64, 64), nn.Tanh()

    def forward(self, x):
        y = self.act(self.linear(x))
        return x + torch.fft.irfft(torch.fft.rfft(y) * torch.fft.rfft(y.sin()).conj(), n=64)


def test_a_model_that_saves_conjugates_is_planned():
    torch.manual_seed(0)
    model, x = nn.Sequential(_Correlation(), _Correlation(), _Correlation()), torch.randn(32, 64)

    def step(x):
        model(x).square().mean().backward()
        model.zero_grad()

    profile = lowtide.rehearse(model, step, x)
    verdict = lowtide.verify(model, step, x, lowtide.plan(profile, "80%"))
    assert verdict.identical
    assert verdict.within_budget


def test_a_state_that_can_not_be_compared_is_given_back() -> None:
    """Arrays have no truth: what has them counts as changed."""

    class Running:
        def __init__(self) -> None:
            self.mean = np.zeros(3)

        def state_dict(self) -> dict[str, object]:
            return {"mean": self.mean.copy()}

        def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
            self.mean = state["mean"]

    running, model = Running(), nn.Linear(64, 64)

    def step(x: Tensor) -> None:
        running.mean = running.mean + 1
        model(x).sum().backward()

    lowtide.rehearse(model, step, torch.randn(512, 64))
    assert running.mean.tolist() == [0, 0, 0]


class Dropping(nn.Module):
    """LayerDrop: in each step another half of the layers, more or less."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(()) < 0.5:
                x = layer(x).tanh()
        return x


def test_it_is_said_where_the_work_depends_on_random_numbers() -> None:
    torch.manual_seed(0)
    model = Dropping()
    x = torch.randn(1024, 256, requires_grad=True)
    profile = lowtide.rehearse(model, lambda x: model(x).sum().backward(), x)
    assert any("LayerDrop" in note for note in profile.notes)
    assert lowtide.plan(profile, "100%").notes == profile.notes
    torch.manual_seed(0)
    steady = nn.Sequential(nn.Linear(256, 256), nn.Dropout(), nn.Linear(256, 256))
    notes = lowtide.rehearse(steady, lambda x: steady(x).sum().backward(), x).notes
    assert not any("LayerDrop" in note for note in notes)


def test_an_optimizer_that_is_none_of_torch_s_is_refused_in_words():
    class Own:
        """No base class, no param_groups."""

    model = nn.Linear(64, 64).train()
    said = r"takes a torch\.optim\.Optimizer or a list of them, found Own\. Leave optimizer= out"
    with pytest.raises(RehearsalError, match=said):
        lowtide.rehearse(model, lambda x: model(x).sum().backward(), torch.randn(8, 64), optimizer=Own())
