"""Ctrl-C at any moment leaves everything as it was, and a session in which a model can be fitted."""

import contextlib
import gc
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from conftest import RunPython
from interrupting import Interrupting, find_places
from lowtide import cli
from lowtide._torch import patching as _standins
from lowtide._torch.modes import saved_tensor_hooks
from lowtide._torch.modules import CALL
from lowtide.api import fit
from lowtide.runtime.guards import remove_expired
from lowtide.script.runner import _LAST
from lowtide.utils import interrupts as _interrupts
from lowtide.utils.interrupts import interrupts_delayed, uninterrupted

WIDTH = 32

_optimizers = sys.modules["torch.optim.optimizer"]


@pytest.fixture(autouse=True, scope="module")
def _alone() -> None:
    """Remove what stands in for torch's functions for plans of earlier tests' models, which await the collector."""
    gc.collect()
    remove_expired()


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Interrupts as ever, also where the tests run in the background, for which shells have them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.narrow(nn.functional.gelu(self.wide(self.norm(x)))))


class Training:
    """A small model, its optimizer, and a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.x = nn.Sequential(Block(), Block()), torch.randn(64, WIDTH)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.step(self.x)

    def step(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def fit(self) -> lowtide.Fitted:
        return lowtide.fit(self.model, self.step, self.x, budget="90%")

    def state(self) -> list[Tensor]:
        state = (value for entry in self.optimizer.state.values() for value in entry.values())
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *state, torch.get_rng_state())]


def left(model: nn.Module) -> list[str]:
    """Traces of Lowtide that should not exist where no plan is in force.

    Nor awaits one a backward pass: what awaited that of a step which was interrupted goes with the next one.
    """
    with torch.enable_grad():
        torch.ones(1, requires_grad=True).sum().backward()
    in_force = {
        "a profiler": torch.autograd._profiler_enabled(),
        "saved-tensor hooks": saved_tensor_hooks() is not None,
        "function modes": torch._C._len_torch_function_stack() > 0,
        "dispatch modes": torch._C._len_torch_dispatch_stack() > 0,
        "gradients off": not torch.is_grad_enabled(),
        "a handler": signal.getsignal(signal.SIGINT) is not signal.default_int_handler,
        "an interrupt that waits": _interrupts._is_delayed,
        "functions that stand in": any(makes for _, makes in _standins._replacements.values()),
        "a call": any(CALL in vars(module) for module in model.modules()),
        "hooks": any(vars(m)["_forward_hooks"] or vars(m)["_forward_pre_hooks"] for m in model.modules()),
        "a model in eval mode": not all(module.training for module in model.modules()),
    }
    return [what for what, is_there in in_force.items() if is_there]


def check_interrupted(run: Callable[[], object], undo: Callable[[], object], n: int, seed: int) -> None:
    """Interrupt `run` at `n` places: nothing is left in the process, and a model is fitted there, now and then.

    `undo` takes off the plan of a run that comes by the place less often and so ends: solvers follow measured times.
    """
    print(f"seed {seed}")  # noqa: T201
    other = Training()
    other.fit().remove()
    gc.collect()
    gc.freeze()  # neither counts in the budget of the other one
    for number, (place, time_) in enumerate(find_places(run, seed, n), 1):
        where = f"seed {seed}: {place[0].co_filename}:{place[1]}, time {time_}"
        with contextlib.suppress(KeyboardInterrupt):
            with Interrupting((place, time_)):
                run()
            for _ in range(20):  # one that waits has come by then
                time.sleep(_interrupts.RESEND_S)
        undo()
        gc.collect()
        assert left(other.model) == [], where
        if number % 4 == 2:
            other.fit().remove()
            assert left(other.model) == [], where


def interrupt_fit(n: int) -> None:
    training = Training()
    before = training.state()
    gc.freeze()
    fitted: list[lowtide.Fitted] = []

    def undo() -> None:
        while fitted:
            fitted.pop().remove()
        remove_expired()  # hooks of an engine that an interrupted fit has freed

    def fit() -> None:
        undo()
        assert left(training.model) == []
        assert not _optimizers._global_optimizer_pre_hooks
        assert not _optimizers._global_optimizer_post_hooks
        assert all(torch.equal(one, other) for one, other in zip(before, training.state(), strict=True))
        fitted.append(training.fit())

    try:
        check_interrupted(fit, undo, n, random.randrange(10**6))
    finally:
        undo()
    fit()
    undo()


SCRIPT = """
import torch
torch.manual_seed(0)
def block():
    return torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 32))
model = torch.nn.Sequential(*[block() for _ in range(3)])
optimizer = torch.optim.AdamW(model.parameters())
for step in range(5):
    model(torch.randn(128, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def interrupt_run(n: int, folder: Path) -> None:
    script = folder / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")

    def run() -> None:
        assert cli.main(["run", "--budget", "70%", str(script)]) in (0, 130)
        _LAST.clear()  # holds the model, and so its plan, for what the script has registered for the exit

    check_interrupted(run, lambda: None, n, random.randrange(10**6))


def test_fit_can_be_interrupted_anywhere() -> None:
    interrupt_fit(2)


def test_a_script_within_a_budget_can_be_interrupted_anywhere(tmp_path: Path) -> None:
    interrupt_run(2, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_fit_can_be_interrupted_at_fifty_places() -> None:
    interrupt_fit(50)


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_a_script_can_be_interrupted_at_fifty_places(tmp_path: Path) -> None:
    interrupt_run(50, tmp_path)


def test_an_interrupt_waits_in_code_of_this_package_and_not_in_the_users() -> None:
    with interrupts_delayed(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    done: list[str] = []

    def work() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("to its end")

    with pytest.raises(KeyboardInterrupt):
        uninterrupted(work)()
    assert done == ["to its end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_waited_comes_while_another_claim_is_held() -> None:
    def work() -> None:
        uninterrupted(lambda: signal.raise_signal(signal.SIGINT))()
        time.sleep(60)

    with interrupts_delayed(), pytest.raises(KeyboardInterrupt):
        work()
    time.sleep(4 * _interrupts.RESEND_S)  # it comes once


def test_a_handler_that_was_set_meanwhile_stays_and_one_before_is_called() -> None:
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    with interrupts_delayed():
        signal.raise_signal(signal.SIGINT)
        assert came == [signal.SIGINT]
        stale = signal.signal(signal.SIGINT, signal.default_int_handler)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, stale)  # as who puts back what was there
    signal.raise_signal(signal.SIGINT)
    assert len(came) == 2


def test_a_plan_in_force_holds_interrupts_back_until_it_or_its_model_is_gone() -> None:
    training = Training()
    plan = lowtide.plan(lowtide.rehearse(training.model, training.step, training.x), "90%")
    with lowtide.apply(training.model, plan):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as between the cells of a notebook
        training.model(training.x)
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert left(training.model) == []
    lowtide.apply(training.model, plan)
    del training
    gc.collect()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_plan_that_no_caller_gets_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt has waited until the fit was done: its caller gets the exception, and never the plan."""
    training, own = Training(), fit._fit

    def interrupted(*args: Any) -> lowtide.Fitted:
        fitted = own(*args)
        uninterrupted(lambda: signal.raise_signal(signal.SIGINT))()
        return fitted

    monkeypatch.setattr(fit, "_fit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.fit()
    assert lowtide.fitted(training.model) is None
    assert left(training.model) == []


def test_a_profiler_that_was_interrupted_at_its_start_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.autograd.profiler._enable_profiler

    def enable(*args: object) -> None:
        own(*args)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(torch.autograd.profiler, "_enable_profiler", enable)
    with pytest.raises(KeyboardInterrupt), lowtide.measure():
        raise AssertionError("the interrupt comes first")
    assert not torch.autograd._profiler_enabled()


def test_a_profiler_that_fails_at_its_start_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.autograd.profiler._enable_profiler

    def enable(*args: object) -> None:
        own(*args)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd.profiler, "_enable_profiler", enable)
        with pytest.raises(MemoryError), lowtide.measure():
            raise AssertionError("it has not begun")
    assert not torch.autograd._profiler_enabled()
    with lowtide.measure():
        pass


IMPORTING = """
import signal, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == "lowtide.planner.planning": signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
import lowtide
try: lowtide.plan
except KeyboardInterrupt: print("interrupted", "lowtide.planner.planning" in sys.modules)
"""


def test_an_import_is_not_cut_off(run_python: RunPython) -> None:
    """A second import of what was cut off would register recipes twice."""
    assert run_python("-c", IMPORTING).stdout == "interrupted True\n"
