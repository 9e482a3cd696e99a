"""A budget around any loop of this process: the same bits, a peak within the budget, and the model as it was after."""

import contextlib
import gc
import logging
import re
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from comparing import equal
from lowtide.memory.measure import make_recorder
from lowtide.memory.memory_timeline import Timeline
from lowtide.script.post_plan_monitor import N_TIMED, N_UNTIMED
from lowtide.script.run_listened import watched
from lowtide.script.step_listener import StepListener

X = torch.randn(256, 64)
Loop = Callable[["Made"], object]


class Made:
    """A model with its optimizer, and the losses of its steps."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(*[block() for _ in range(4)])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.losses: list[float] = []

    def loss(self, x: Tensor = X) -> Tensor:
        loss: Tensor = (self.model(x) - x).square().mean()
        self.losses.append(loss.item())
        return loss

    def step(self, x: Tensor = X) -> None:
        self.optimizer.zero_grad()
        self.loss(x).backward()
        self.optimizer.step()


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64))


def is_as_it_was(model: nn.Module) -> bool:
    return not any("_compiled_call_impl" in module.__dict__ for module in model.modules())


def plain(loop: Loop) -> Made:
    made = Made()
    loop(made)
    return made


def under(loop: Loop, budget: int | str = "80%", **settings: Any) -> tuple[Made, lowtide.Run]:
    """The same loop within a budget; it has the bits of the plain one and leaves the model as it was."""
    made = Made()
    before = nn.Module.__call__
    with lowtide.within(budget, **settings) as run:
        loop(made)
    assert nn.Module.__call__ is before
    expected = plain(loop)
    assert made.losses == expected.losses
    assert equal(made.model.state_dict(), expected.model.state_dict())
    assert is_as_it_was(made.model)
    return made, run


def steps(n: int) -> Loop:
    def loop(made: Made) -> None:
        for _ in range(n):
            made.step()

    return loop


def test_a_plain_loop_runs_within_its_budget_to_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    _, run = under(steps(5))
    assert run.plan is not None
    assert run.verdict is not None
    assert run.verdict.within_budget
    assert run.verdict.is_of_planned_size
    assert run.verdict.budget_bytes == run.plan.budget_bytes
    assert run.plan.recompute
    text = str(run)
    assert text.startswith("Sequential: ")
    assert "peak measured: within the budget of" in text
    said = capsys.readouterr()
    assert not said.out
    assert said.err.count("lowtide: Sequential: ") == 1
    assert said.err.count("within the budget") == 1


def test_steps_are_told_apart_where_the_optimizer_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    def loop(made: Made) -> None:
        made.optimizer = torch.optim.SGD(made.model.parameters(), 0.1)  # type: ignore[assignment]
        for n in range(10):
            if n in (4, 6):
                made.optimizer = torch.optim.AdamW(made.model.parameters())
            made.step()

    _, run = under(loop, "90%")
    assert run.verdict is not None
    assert run.verdict.within_budget
    said = capsys.readouterr().err
    assert "more is in memory when a step begins" in said
    assert "calls of the model" not in said


def test_the_mean_time_of_a_step_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Not that of the measured step, in which recording takes time. The plan's share of it stands beside it."""
    under(steps(3 + N_UNTIMED))
    assert "a step under the plan takes" not in capsys.readouterr().err
    for n_timed in (1, N_TIMED, N_UNTIMED + 2 * N_TIMED):
        _, run = under(steps(3 + N_UNTIMED + n_timed))
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "a step under the plan takes" in line]
        check_share(line, run)


def test_the_share_of_the_extra_time_is_in_the_text_once_a_step_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    for n_steps, is_timed in ((4, False), (3 + N_UNTIMED + N_TIMED, True)):
        _, run = under(steps(n_steps))
        follows = f"a step (its share follows {N_UNTIMED + N_TIMED} steps after the measured one)"
        assert follows in capsys.readouterr().err
        assert (" % time predicted" in str(run)) == is_timed


def check_share(line: str, run: lowtide.Run) -> None:
    assert run.plan is not None
    said = re.search(r"takes ([\d.]+) ms, ([\d.]+) % of it added by the plan, as predicted$", line)
    assert said is not None, line
    step_ms, share = (float(number) for number in said.groups())
    assert share == pytest.approx(100 * run.plan.predicted.extra_ms / step_ms, rel=0.1, abs=0.06)


def test_the_peak_of_the_whole_loop_is_within_the_budget() -> None:
    """By the allocator's events, all that is in memory counted: what a step needs is not only its activations."""

    def level(n_bytes: int | str, on_infeasible: Any = "raise") -> tuple[int, lowtide.Run]:
        made = Made()
        for _ in range(2):
            made.step()  # the optimizer has its state
        with lowtide.within(n_bytes, on_infeasible=on_infeasible) as run:
            for _ in range(3):
                made.step()
            with make_recorder("cpu") as recorder:
                for _ in range(4):
                    made.step()
        there = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(made)}.values())
        most = Timeline(recorder.stream).peak_bytes
        return there + most, run

    def tensors(made: Made) -> Iterator[Tensor]:
        yield from made.model.parameters()
        yield from (p.grad for p in made.model.parameters() if p.grad is not None)
        yield from (x for state in made.optimizer.state.values() for x in state.values())
        yield X

    without, _ = level(10**12)
    n_bytes = without * 8 // 10
    found, run = level(n_bytes)
    assert run.verdict is not None
    assert found <= n_bytes < without


def test_gradients_of_several_calls_belong_to_one_step() -> None:
    def loop(made: Made) -> None:
        for number in range(12):
            made.loss(X[number % 3 * 64 :][:64]).backward()
            if number % 3 == 2:
                made.optimizer.step()
                made.optimizer.zero_grad()

    _, run = under(loop, "85%")
    assert run.verdict is not None
    assert run.verdict.within_budget


def test_a_function_that_trains_in_a_thread_of_its_own() -> None:
    def loop(made: Made) -> None:
        thread = threading.Thread(target=steps(5), args=(made,))
        thread.start()
        thread.join()

    _, run = under(loop)
    assert run.verdict is not None
    assert run.verdict.within_budget


def test_a_block_that_is_entered_in_a_thread() -> None:
    found: list[lowtide.Run] = []
    thread = threading.Thread(target=lambda: found.append(under(steps(5))[1]))
    thread.start()
    thread.join()
    [run] = found
    assert run.verdict is not None


def test_a_thread_that_was_there_before_is_left_alone() -> None:
    go, done = threading.Event(), threading.Event()
    other = nn.Linear(64, 64)

    def beside() -> None:
        optimizer = torch.optim.SGD(other.parameters())
        go.wait()
        for _ in range(3):
            other(X).sum().backward()
            optimizer.step()
        done.set()

    thread = threading.Thread(target=beside)
    thread.start()

    def loop(made: Made) -> None:
        for number in range(6):
            made.step()
            if number == 1:
                go.set()
                done.wait()

    _, run = under(loop)
    thread.join()
    assert run.verdict is not None
    assert run.plan is not None
    assert run.plan.fingerprint.model.startswith("Sequential")


class Stop(Exception):
    """Raised in the middle of a step."""


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("n_steps", range(4))
@pytest.mark.parametrize("where", ["forward", "backward", "update"])
def test_an_exception_at_any_place_leaves_the_model_as_it_was(n_steps: int, where: str) -> None:
    made = Made()

    def fail(*_: Any) -> None:
        raise Stop

    def loop() -> None:
        for _ in range(n_steps):
            made.step()
        if where == "forward":
            made.model[1].register_forward_pre_hook(fail)
        elif where == "backward":
            made.model[0][0].weight.register_hook(fail)
        else:
            made.optimizer.register_step_pre_hook(fail)
        made.step()

    before = nn.Module.__call__
    with pytest.raises(Stop), lowtide.within("80%"):
        loop()
    assert nn.Module.__call__ is before
    assert is_as_it_was(made.model)
    assert lowtide.fitted(made.model) is None
    with lowtide.within("80%"):  # and another block may follow
        pass


@pytest.mark.parametrize("n_steps", range(4))
def test_ctrl_c_leaves_the_model_as_it_was(n_steps: int) -> None:
    made = Made()

    def interrupt(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)

    def loop() -> None:
        steps(n_steps)(made)
        made.model[1].register_forward_hook(interrupt)
        made.step()

    with pytest.raises(KeyboardInterrupt), lowtide.within("80%"):
        loop()
    assert is_as_it_was(made.model)
    assert signal.getsignal(signal.SIGINT) is before


def test_where_nothing_fits_training_ends_with_the_updates_so_far() -> None:
    made = Made()
    with pytest.raises(lowtide.Infeasible, match="no plan fits") as refused, lowtide.within("1MB") as run:
        steps(5)(made)
    assert refused.value.__notes__ == ["Training was ended after update 2."]
    assert len(made.losses) == 2
    assert equal(made.model.state_dict(), plain(steps(2)).model.state_dict())
    assert is_as_it_was(made.model)
    assert run.plan is None
    assert str(run).startswith("ended: no plan fits")
    made.step()  # the model goes on
    assert equal(made.model.state_dict(), plain(steps(3)).model.state_dict())


def test_a_loop_that_catches_every_exception_goes_on_plainly_and_is_told_in_the_end() -> None:
    made = Made()
    caught: list[Exception] = []

    def loop() -> None:
        for _ in range(5):
            try:
                made.step()
            except lowtide.Infeasible as error:
                caught.append(error)
        assert is_as_it_was(made.model)

    with pytest.raises(lowtide.Infeasible), lowtide.within("1MB"):
        loop()
    assert len(caught) == 1
    assert equal(made.model.state_dict(), plain(steps(5)).model.state_dict())


def test_memory_made_after_the_rehearsal_is_named_in_the_error() -> None:
    made, copies = Made(), list[Tensor]()

    def train() -> None:
        with lowtide.within("90%"):
            for number in range(6):
                made.step()
                if number == 1:
                    copies.append(torch.zeros(2**18))

    with pytest.raises(lowtide.OverBudget) as raised:
        train()
    assert "Note: 1 MiB more is in memory when a step begins than when it was rehearsed." in str(raised.value)
    assert "this batch needs more" not in str(raised.value)


def test_where_nothing_fits_smallest_keeps_the_plan_with_the_smallest_peak(capsys: pytest.CaptureFixture[str]) -> None:
    _, run = under(steps(30), "1MB", on_infeasible="smallest")  # steps after 12 and 24 updates are measured again
    assert run.plan is not None
    assert run.verdict is not None
    assert not run.verdict.within_budget
    assert run.plan.predicted.peak_bytes < run.plan.plain.peak_bytes
    assert "OVER the budget of 977 KiB" in str(run)
    said = capsys.readouterr().err
    assert "As asked, the plan with the smallest peak is in force" in said
    assert said.lower().count("no plan fits") == 1


@pytest.mark.parametrize("reaction", ["raise", "smallest", "plain"])
def test_where_nothing_fits_no_error_holds_the_tensors_of_a_step(reaction: str) -> None:
    made, outputs = Made(), list[weakref.ref[Tensor]]()

    def step() -> None:
        output = made.model(X)
        outputs.append(weakref.ref(output))
        output.square().mean().backward()
        made.optimizer.step()

    gc.disable()  # a reference cycle is freed at some later time only
    try:
        run = lowtide.within("1MB", on_infeasible=reaction, progress=False)  # type: ignore[arg-type]
        with contextlib.suppress(lowtide.Infeasible), run:
            for _ in range(4):
                step()
        assert [output() for output in outputs] == [None] * (2 if reaction == "raise" else 4)
    finally:
        gc.enable()


def test_where_nothing_fits_plain_goes_on_without_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    def loop(made: Made) -> None:
        steps(4)(made)
        assert is_as_it_was(made.model)

    _, run = under(loop, "1MB", on_infeasible="plain")
    assert run.plan is None
    assert str(run) == "No plan fits 977 KiB. Training went on without a plan."
    assert capsys.readouterr().err.count("Training continues without a plan, as asked") == 1


def test_an_unknown_on_infeasible_is_refused() -> None:
    with pytest.raises(lowtide.LowtideError, match="'raise', 'smallest', 'plain'"):
        lowtide.within("80%", on_infeasible="smaller")  # type: ignore[arg-type]


def test_the_model_that_is_given_is_planned_for_among_several() -> None:
    other, made = nn.Linear(64, 64), Made()
    optimizer = torch.optim.SGD(other.parameters())
    with lowtide.within("95%", model=made.model) as run:
        for _ in range(5):
            other(X).sum().backward()
            optimizer.step()
            made.step()
        assert lowtide.fitted(made.model) is not None
        assert lowtide.fitted(other) is None
    assert run.plan is not None
    assert run.plan.fingerprint.model.startswith("Sequential")
    assert equal(made.model.state_dict(), plain(steps(5)).model.state_dict())


def test_another_model_than_the_one_that_is_given_is_trained_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    other, made = Made(1), Made()
    with lowtide.within("80%", model=other.model) as run:
        steps(3)(made)
    assert made.losses == plain(steps(3)).losses
    for text in (capsys.readouterr().err, str(run)):
        assert "the Sequential that was given took no step, although a model was updated" in text


def test_a_model_that_is_given_may_be_called_through_a_wrapper() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.last = inner, nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Any:
            return self.last(self.inner(x))

    made = Made()
    wrapper = Wrapper(made.model)
    optimizer = torch.optim.AdamW(wrapper.parameters())
    with lowtide.within("90%", model=made.model) as run:
        for _ in range(5):
            optimizer.zero_grad()
            wrapper(X).sum().backward()
            optimizer.step()
        assert is_as_it_was(wrapper.last)
        assert not is_as_it_was(made.model)
    assert run.verdict is not None


class Adversaries(nn.Module):
    """A generator and a critic, each of which is frozen while the other is trained."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.generator, self.critic, self.losses = block(), block(), list[float]()
        self.optimizers = [torch.optim.AdamW(part.parameters()) for part in (self.generator, self.critic)]

    def step(self) -> None:
        generates, judges = self.optimizers
        self.critic.requires_grad_(False)
        self._update(generates, -self.critic(self.generator(X)).mean())
        self.critic.requires_grad_(True)
        self.generator.requires_grad_(False)
        self._update(judges, self.critic(self.generator(X)).mean() - self.critic(X).mean())
        self.generator.requires_grad_(True)

    def _update(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        self.losses.append(loss.item())


def test_calls_of_a_frozen_part_between_two_steps_belong_to_neither() -> None:
    without, under = Adversaries(), Adversaries()
    for made in (without, under):
        torch.manual_seed(1)
        with contextlib.nullcontext() if made is without else lowtide.within("95%", model=made) as run:
            for _ in range(6):
                made.step()
    assert under.losses == without.losses
    assert equal(under.state_dict(), without.state_dict())
    assert run is not None
    assert run.verdict is not None
    assert run.verdict.within_budget


@pytest.mark.parametrize(
    ("model", "words"),
    [("bert", "found str"), (nn.Linear(2, 2).requires_grad_(False), "requires a gradient"), (nn.GELU(), "gradient")],
)
def test_a_block_without_training_steps_is_refused(model: Any, words: str) -> None:
    with pytest.raises(lowtide.LowtideError, match=words):
        lowtide.within("80%", model=model)


def test_there_is_one_block_at_a_time() -> None:
    with lowtide.within("80%"):
        with pytest.raises(lowtide.LowtideError, match="watched already"), lowtide.within("80%"):
            pass
        failed: list[Exception] = []

        def beside() -> None:
            try:
                lowtide.within("80%").__enter__()
            except lowtide.LowtideError as error:
                failed.append(error)

        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        assert "watched already" in str(failed[0])
    with watched(StepListener()), pytest.raises(lowtide.LowtideError, match="`lowtide run`"), lowtide.within("80%"):
        pass


def test_a_fit_inside_a_block_is_refused() -> None:
    made = Made()
    with lowtide.within("80%"), pytest.raises(lowtide.LowtideError, match="leave one of the two out"):
        lowtide.fit(made.model, made.step, X, budget="80%")
    lowtide.fit(made.model, made.step, X, budget="100%", progress=False).remove()


def test_a_block_says_what_it_waits_for() -> None:
    with lowtide.within("80%", progress=False) as run:
        assert str(run).startswith("no plan yet: a model gets one when it was rehearsed")


def test_a_block_is_entered_once() -> None:
    run = lowtide.within("80%")
    with run:
        pass
    with pytest.raises(lowtide.LowtideError, match="entered before"), run:
        pass


def test_the_error_for_a_budget_below_existing_memory_lists_that_memory() -> None:
    made = Made()
    held = torch.zeros(2**20)
    with pytest.raises(lowtide.Infeasible, match="other tensors") as refused, lowtide.within("3MB"):
        steps(5)(made)
    assert refused.value.smallest_peak_bytes > held.nbytes


@pytest.mark.parametrize(
    ("n_steps", "words"),
    [
        (0, "the block ended, and no model was trained"),
        (1, "the block ended after 1 step, before Sequential was rehearsed"),
        (2, "the block ended after 2 steps, before Sequential took a step under its plan"),
    ],
)
def test_a_block_with_too_few_steps_is_noted(n_steps: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, run = under(steps(n_steps))
    assert run.verdict is None
    assert f"{'not measured' if run.plan else 'no plan was made'}: {words}" in str(run)
    assert words in capsys.readouterr().err


def test_a_block_that_an_error_ended_has_no_plan_yet_to_come() -> None:
    run = lowtide.within("80%", progress=False)
    assert str(run).startswith("not begun: the training loop belongs in a block")
    with pytest.raises(KeyError), run:
        {}["no such key"]
    assert str(run) == "no plan was made: the block was ended by KeyError"


class Mixing(nn.Module):
    """Layers over tokens, whose operators save other tensors for a batch of one row, or of another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(x.transpose(0, 1)))
        return x + self.down(hidden.transpose(0, 1))


@pytest.mark.parametrize(("n_rows", "is_reported"), [(1, False), (16, True)])
def test_other_tensors_of_a_small_last_batch_are_not_reported(
    n_rows: int, is_reported: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Mixing() for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters())
    with lowtide.within("80%", model=model) as run:
        for step in range(8):
            is_odd = step % 4 == 2
            x = torch.randn(20, n_rows, 32).transpose(0, 1) if is_odd else torch.randn(16, 20, 32)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert run.verdict is not None
    assert run.verdict.within_budget
    assert ("saves different tensors" in capsys.readouterr().err) == is_reported


def test_steps_that_differ_at_the_beginning_leave_later_ones_to_be_rehearsed() -> None:
    """As with batches that are skipped after their forward."""

    def loop(made: Made) -> None:
        for n_calls in [1, 2, 3, 1, 4, 3, 4, *[1] * 16]:
            for _ in range(n_calls):
                made.loss().backward()
            made.optimizer.step()
            made.optimizer.zero_grad()

    _, run = under(loop)
    assert run.verdict is not None
    assert run.verdict.within_budget


def test_a_larger_batch_gets_a_plan_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [256, 256, 256, 200, 300, 400, 300, 400, 256, 200]
    x = torch.randn(400, 64)

    def loop(made: Made) -> None:
        for n in rows:
            made.step(x[:n])

    _, run = under(loop, "85%")
    said = capsys.readouterr().err
    small, large = run.plans
    assert small.input_shapes == ("[256, 64] float32",)
    assert large.input_shapes == ("[400, 64] float32",)
    assert large is run.plan
    assert large.budget_bytes == small.budget_bytes
    assert run.verdict is not None
    assert run.verdict.within_budget
    assert said.count("was given [300, 64] float32, and the plan is for [256, 64] float32") == 1
    assert "saves different tensors than the rehearsed step" not in said
    assert "up to [400, 64] float32" in str(run)


def test_each_size_runs_under_its_plan() -> None:
    """A small batch has the same peak as before: it pays nothing for what large ones need."""
    x, made = torch.randn(400, 64), Made()

    def peak_bytes(n: int) -> int:
        with make_recorder("cpu") as recorder:
            made.step(x[:n])
        return Timeline(recorder.stream).peak_bytes

    with lowtide.within("85%") as run:
        for n in (256, 256, 256, 256):
            made.step(x[:n])
        before, most_saving = peak_bytes(256), peak_bytes(400)
        for n in (400, 400, 400):
            made.step(x[:n])
        assert peak_bytes(256) == before
        assert peak_bytes(400) > most_saving
    small, large = run.plans
    assert small.decisions != large.decisions


def test_larger_batches_that_do_not_fit_run_under_the_plan_with_the_smallest_peak(
    capsys: pytest.CaptureFixture[str],
) -> None:
    x = torch.randn(4096, 64)

    def loop(made: Made) -> None:
        for n in (256, 256, 256, *[500] * 3, *[4096] * 5):
            made.step(x[:n])

    _, run = under(loop, "85%")
    assert run.plan is not None
    assert "The plan with the smallest peak is in force for these batches" in capsys.readouterr().err


def test_one_batch_alone_that_is_larger_is_only_said(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(300, 64)

    def loop(made: Made) -> None:
        for n in (256, 256, 256, 300, *[256] * 24):
            made.step(x[:n])

    _, run = under(loop, "85%")
    assert len(run.plans) == 1
    assert capsys.readouterr().err.count("was given") == 1


def test_no_object_is_kept_alive_once_the_plan_is_final() -> None:
    def loop() -> weakref.ref[nn.Module]:
        made = Made()
        steps(5)(made)
        return weakref.ref(made.model)

    with lowtide.within("80%") as run:
        gone = loop()
        gc.collect()
        assert gone() is None
    assert run.verdict is not None


def test_progress_goes_to_a_visible_log_only(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="lowtide"):
        under(steps(5))
    assert any("peak predicted" in message for message in caplog.messages)
    assert not capsys.readouterr().err
    under(steps(5), progress=False)
    assert not capsys.readouterr().err


def test_an_existing_plan_is_named_in_the_error() -> None:
    made = Made()
    lowtide.fit(made.model, made.step, X, budget="90%")
    with (
        pytest.raises(lowtide.LowtideError, match=r"lowtide\.remove\(model\)"),
        lowtide.within("80%", model=made.model),
    ):
        pass
    lowtide.remove(made.model)
    with lowtide.within("80%", model=made.model):
        pass


@pytest.mark.parametrize("budget", ["8G", "0", "much"])
def test_an_invalid_budget_is_refused_before_any_step(budget: str) -> None:
    with pytest.raises(lowtide.BudgetError):
        lowtide.within(budget)


class Dropping(nn.Module):
    """LayerDrop: each step skips other layers."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.layers = nn.ModuleList(block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand(()) >= self.rate:
                x = x + layer(x)
        return x


def train_dropping(rate: float) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Dropping(rate), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(18):
        model(torch.randn(256, 64)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_where_few_layers_are_skipped_at_random_the_plan_is_for_a_step_that_skips_none() -> None:
    with lowtide.within("70%") as run:
        model = train_dropping(0.1)
    assert run.plan is not None
    assert run.verdict is not None
    assert run.verdict.within_budget
    assert {f"1.layers.{n}" for n in range(6)} <= {".".join(address.split(".")[:3]) for address in run.plan.recompute}
    assert any("as with LayerDrop" in note for note in run.plan.notes)
    assert equal(model.state_dict(), train_dropping(0.1).state_dict())


def test_where_no_step_comes_again_the_error_tells_what_plans_for_them() -> None:
    with pytest.raises(lowtide.Infeasible) as caught, lowtide.within("70%"):
        train_dropping(0.5)
    assert "left alone, as it calls other modules in each step: 1." in str(caught.value)
    assert "lowtide.fit plans for the step in which every layer runs" in str(caught.value)
    assert "smaller batches need less" not in str(caught.value)


class SettingUp(nn.Module):
    """A part that calls one more module in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.first = nn.Sequential(*[block() for _ in range(4)]), nn.Linear(64, 64)
        self.is_set_up = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set_up:
            self.is_set_up = True
            self.first(x)
        return self.layers(x)  # type: ignore[no-any-return]


def test_a_part_that_calls_other_modules_only_in_its_first_call_is_planned() -> None:
    model = nn.Sequential(nn.Linear(64, 64), SettingUp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowtide.within("70%") as run:
        for _ in range(8):
            model(X).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert run.plan is not None
    assert run.verdict is not None
    assert run.verdict.within_budget
    assert not any("left alone" in note for note in run.plan.notes)
