"""Steps that are really taken are rehearsed on the way: the profile is that of a rehearsal, the training unchanged."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import lowtide
from lowtide.memory.events import Recorder
from lowtide.memory.measure import make_recorder
from lowtide.planner import predict
from lowtide.planner.records import Decisions, Profile
from lowtide.profiler.online import OnlineProfiler
from models import Case, build, same, state


def train(case: Case, n_steps: int, observed: OnlineProfiler | None = None) -> None:
    """Training as a script does it: the end of a step is where the optimizer has updated."""
    hook = register_optimizer_step_post_hook(lambda *_: None if observed is None else observed.end())
    torch.manual_seed(1)
    for _ in range(n_steps):
        if observed is not None:
            observed.begin(case.batch, [case.optimizer])
        case.step(case.batch)
    hook.remove()
    if observed is not None:
        observed.leave()


@pytest.fixture(scope="module", params=["gpt2", "resnet"])
def seen(request: pytest.FixtureRequest) -> tuple[str, Case, Profile]:
    case = build(request.param)
    observed = OnlineProfiler(case.model, plain=True)
    train(case, 3, observed)
    assert observed.why == []
    assert observed.profile is not None
    return request.param, case, observed.profile


@pytest.mark.default_cases(1)
def test_the_steps_leave_what_plain_ones_leave(seen):
    name, case, _ = seen
    plain = build(name)
    train(plain, 3)
    assert same(state(plain), state(case))
    assert not any("_compiled_call_impl" in module.__dict__ for module in case.model.modules())


@pytest.mark.default_cases(1)
def test_the_profile_is_that_of_a_rehearsal(seen):
    name, _, profile = seen
    case = build(name)
    rehearsed = lowtide.rehearse(case.model, case.step, case.batch)
    assert profile.fingerprint == rehearsed.fingerprint
    assert profile.static == rehearsed.static
    assert profile.measured_plain_peak_bytes == rehearsed.measured_plain_peak_bytes
    assert [slot.address for slot in profile.slots] == [slot.address for slot in rehearsed.slots]
    assert predict(profile, Decisions()).peak_bytes == predict(rehearsed, Decisions()).peak_bytes


def test_two_steps_are_enough_without_a_plain_one():
    case = build("gpt2")
    observed = OnlineProfiler(case.model)
    train(case, 2, observed)
    assert observed.profile is not None
    assert observed.profile.measured_plain_peak_bytes is None
    assert observed.profile.notes == ("no plain step was run: its peak is predicted",)


def test_starting_the_recorder_is_not_part_of_a_steps_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def slow_to_start(place: torch.device) -> Recorder:
        now[0] += 1000
        return make_recorder(place)

    monkeypatch.setattr("lowtide.profiler.training_step.make_recorder", slow_to_start)
    monkeypatch.setattr("lowtide.profiler.training_step.now_ms", lambda place: now[0])
    case = build("gpt2")
    observed = OnlineProfiler(case.model, plain=True)
    hook = register_optimizer_step_pre_hook(lambda *_: now.__setitem__(0, now[0] + 7))
    train(case, 3, observed)
    hook.remove()
    assert observed.profile is not None
    assert observed.profile.step_ms == 7


def see(case: Case, observed: OnlineProfiler, *sizes: int) -> None:
    """Steps on the first rows of the batch, as many as `sizes` say."""
    hook = register_optimizer_step_post_hook(lambda *_: observed.end())
    for size in sizes:
        assert observed.profile is None
        batch = {name: tensor[:size] for name, tensor in case.batch.items()}
        observed.begin(batch, [case.optimizer])
        case.step(batch)
    hook.remove()
    observed.leave()


def test_of_batches_of_several_sizes_the_largest_is_rehearsed() -> None:
    case = build("gpt2")
    observed = OnlineProfiler(case.model)
    see(case, observed, 2, 4, 2, 3, 2, 4)
    assert observed.why == []
    assert observed.n_sizes == 3
    found = observed.profile
    assert found is not None
    assert found.fingerprint.batch == "[4, 64] int64, [4, 64] int64"
    gc.freeze()  # what is there by now is none of the memory that the other one sees
    case = build("gpt2")
    alone = OnlineProfiler(case.model)
    see(case, alone, 4, 4)
    assert alone.profile is not None
    # Adam's state is there since the first step.
    assert replace(found.static, inputs=0) == replace(alone.profile.static, inputs=0)
    assert predict(found, Decisions()).peak_bytes == predict(alone.profile, Decisions()).peak_bytes


@pytest.mark.slow
def test_a_step_is_traced_on_the_decisions_of_an_audit_on_another_size() -> None:
    """Saved bytes are exactly those of the size; other predicted needs are compared with measured ones."""
    case = build("gpt2")
    observed = OnlineProfiler(case.model)
    see(case, observed, 3, 4)
    assert observed.profile is None
    observed.finish()
    gc.freeze()  # as above
    alone = build("gpt2")
    exact = OnlineProfiler(alone.model)
    see(alone, exact, 4, 4)
    found, expected = observed.profile, exact.profile
    assert found is not None
    assert expected is not None
    assert found.fingerprint == expected.fingerprint
    for slot, wanted in zip(found.slots, expected.slots, strict=True):
        if found.values[slot.value].node:  # but for arguments, which are taken to grow
            assert found.values[slot.value].bytes == expected.values[wanted.value].bytes
    assert predict(found, Decisions()).peak_bytes == predict(expected, Decisions()).peak_bytes
    plain_bytes = predict(found, Decisions()).peak_bytes
    for share in (0.8, 0.6):
        plan = lowtide.plan(found, int(share * plain_bytes))
        with lowtide.apply(case.model, plan), lowtide.measure(case.model, case.optimizer) as memory:
            case.step(case.batch)
        assert found.static.total + memory.peak_bytes <= plan.budget_bytes
        assert found.static.total + memory.peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.01)


def test_a_batch_that_is_much_larger_than_the_audited_one_is_audited_itself() -> None:
    case = build("gpt2")
    observed = OnlineProfiler(case.model)
    see(case, observed, 1, 4)
    observed.finish()
    assert observed.profile is None  # the second step was an audit
    see(case, observed, 3)
    observed.finish()
    assert observed.profile is not None
    assert "a larger batch came, [4, 64]" in observed.profile.notes[-1]


def test_the_largest_batch_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.profiler.online.PATIENCE", 5)
    case = build("gpt2")
    observed = OnlineProfiler(case.model)
    see(case, observed, 4, 1, 1, 2, 2)
    assert observed.profile is not None
    assert observed.profile.fingerprint.batch == "[2, 64] int64, [2, 64] int64"
    assert "a larger batch came, [4, 64] int64, [4, 64] int64, but not often" in observed.profile.notes[-1]


def test_when_no_step_comes_any_more_the_largest_that_came_often_enough_has_to_do() -> None:
    case = build("gpt2")
    observed = OnlineProfiler(case.model)
    observed.finish()
    assert observed.profile is None
    see(case, observed, 4, 2, 2)
    assert observed.profile is None
    batch = case.batch
    observed.begin(batch, [case.optimizer])  # a step that is not seen to its end counts for nothing
    case.model(**batch)
    observed.leave()
    observed.finish()
    assert observed.profile is not None
    assert observed.profile.fingerprint.batch == "[2, 64] int64, [2, 64] int64"


@pytest.mark.slow
def test_steps_that_begin_alike_and_go_on_with_other_batches_are_not_taken_for_one() -> None:
    case = build("gpt2")
    observed = OnlineProfiler(case.model)
    hook = register_optimizer_step_post_hook(lambda *_: observed.end())
    for sizes in ((2, 4), (2, 1), (2, 4)):
        observed.begin({name: tensor[:2] for name, tensor in case.batch.items()}, [case.optimizer])
        for size in sizes:
            case.model(**{name: tensor[:size] for name, tensor in case.batch.items()}).loss.backward()
        case.optimizer.step()
        case.optimizer.zero_grad()
    hook.remove()
    observed.leave()
    assert [
        why.startswith("it called the model with [2, 64] int64, [2, 64] int64 and [1,") for why in observed.why
    ] == [True]
    assert observed.profile is not None
    assert observed.profile.input_shapes == ("[2, 64] int64, [2, 64] int64", "[4, 64] int64, [4, 64] int64")


def test_without_a_plain_step_that_was_asked_for_the_profile_says_so() -> None:
    case = build("gpt2")
    observed = OnlineProfiler(case.model, plain=True)
    see(case, observed, 4, 4)
    observed.finish()
    assert observed.profile is not None
    assert observed.profile.notes == ("no plain step was run: its peak is predicted",)


def test_a_step_without_a_backward_is_passed_over():
    case = build("gpt2")
    observed = OnlineProfiler(case.model)
    observed.begin(case.batch)
    case.model(**case.batch)
    observed.end()
    assert observed.why == ["no backward ran through the model"]
    observed.begin(case.batch)
    observed.end()
    observed.leave()
    assert observed.why[1] == "the model saved nothing for backward"
    train(case, 2, observed)
    assert observed.profile is not None


def test_a_step_that_raises_is_given_up():
    case = build("gpt2")
    observed = OnlineProfiler(case.model)
    train(case, 1, observed)
    observed.begin(case.batch)
    case.model(**case.batch)
    observed.leave()
    assert not any("_compiled_call_impl" in module.__dict__ for module in case.model.modules())
    train(case, 2, observed)
    assert observed.profile is not None


def test_outputs_of_the_step_before_do_not_hide_a_part_of_the_peak():
    """A loop that holds the model's outputs lets go of them in its next step: the level sinks, the peak does not."""
    peaks = []
    for holds in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4096))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batch, kept = torch.randn(64, 16), []
        observed = OnlineProfiler(model, plain=True)
        for _ in range(4):
            observed.begin(batch, [optimizer])
            logits = model(batch)
            kept[:] = [logits] if holds else []
            loss = logits.square().mean()
            del logits
            loss.backward()
            optimizer.step()
            observed.end()
            optimizer.zero_grad()
        assert observed.profile is not None
        assert observed.profile.static.carried_over == 4 + holds * 64 * 4096 * 4  # the loss; and the logits
        plain = predict(observed.profile, Decisions()).peak_bytes
        peaks.append((observed.profile.measured_plain_peak_bytes, plain))
    assert peaks[0][0] == pytest.approx(peaks[1][0], rel=0.001)
    assert peaks[0][1] == pytest.approx(peaks[1][1], rel=0.001)


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = torch.nn.LSTM(8, 16, batch_first=True)

    def forward(self, x, state=None):
        return self.rnn(x, state)


def test_a_first_step_that_makes_its_state_by_itself_is_not_waited_for() -> None:
    model, state = Recurrent(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observed = OnlineProfiler(model)
    hook = register_optimizer_step_post_hook(lambda *_: observed.end())
    n_steps = 0
    while observed.profile is None:
        n_steps += 1
        x = torch.randn(4, 6, 8)
        observed.begin((x, state), [optimizer])
        out, last = model(x, state)
        out.square().sum().backward()
        state = tuple(each.detach() for each in last)
        optimizer.step()
        optimizer.zero_grad()
    hook.remove()
    observed.leave()
    assert n_steps == 3
    assert observed.profile.fingerprint.batch == "[4, 6, 8] float32, [1, 4, 16] float32, [1, 4, 16] float32"
    said = "a batch that saves more came, [4, 6, 8] float32, but not often enough to be rehearsed"
    assert said in observed.profile.notes
