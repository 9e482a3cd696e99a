"""A step that runs out of memory under its plan is repeated once, to the bits of a run that had room."""

import contextlib
import math
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from comparing import equal
from conftest import RunPython
from models import build

TOO_MUCH = 2**50
Loss = Callable[["Made", Tensor], Tensor]

in_forward: list[None] = []
in_backward: list[None] = []
"""An entry for each time that memory is to run out there."""


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    yield
    in_forward.clear()
    in_backward.clear()


class _Exhausting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if in_backward:
            in_backward.pop()
            torch.empty(TOO_MUCH)
        return gradient


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.norm = nn.Linear(64, 256), nn.GELU(), nn.BatchNorm1d(256)
        self.drop, self.down = nn.Dropout(0.1), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(self.norm(self.act(self.up(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.n_calls = nn.ModuleList(Block() for _ in range(3)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                x = _Exhausting.apply(x)
        if in_forward:
            in_forward.pop()
            torch.empty(TOO_MUCH)
        return x


def mean_square(made: "Made", x: Tensor) -> Tensor:
    loss: Tensor = (made.model(x) - x).square().mean()
    return loss


class Made:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.losses: list[float] = []

    def step(self, x: Tensor, loss_of: Loss = mean_square, n: int = 1) -> None:
        self.optimizer.zero_grad()
        for piece in x.chunk(n):
            loss = loss_of(self, piece)
            self.losses.append(loss.item())
            loss.backward()
        self.optimizer.step()


def train(made: Made, fails: Callable[[], object] = lambda: None, *, loss_of: Loss = mean_square, n: int = 1) -> None:
    for number in range(6):
        x = torch.randn(512 * n, 64)
        if number == 4:
            fails()
        made.step(x, loss_of, n)


def run(fails: Callable[[], object], **settings: Any) -> tuple[Made, lowtide.Run]:
    made = Made()
    with lowtide.within("75%", retry=True) as run:
        train(made, fails, **settings)
    return made, run


def is_as_in_a_run_with_room(made: Made, **settings: Any) -> bool:
    after = torch.get_rng_state()
    plain = Made()
    train(plain, **settings)
    assert made.losses == plain.losses
    assert made.model.n_calls == plain.model.n_calls
    assert equal(made.model.state_dict(), plain.model.state_dict())
    return torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize(
    ("where", "n"), [(in_forward, 1), (in_backward, 2), pytest.param(in_forward, 2, marks=pytest.mark.slow)]
)
def test_a_step_is_repeated_to_the_same_bits(where: list[None], n: int, capsys: pytest.CaptureFixture[str]) -> None:
    made, ran = run(lambda: where.append(None), n=n)
    assert not where
    assert is_as_in_a_run_with_room(made, n=n)
    assert ran.n_repeated == 1
    place = "the model's forward" if where is in_forward else "backward"
    said = f"{place} ran out of memory at a request of 4 PiB: the step is repeated under the plan with the smallest "
    said += "peak"
    assert said in capsys.readouterr().err
    assert "1 step was repeated after running out of memory" in str(ran)
    assert not any("_compiled_call_impl" in module.__dict__ for module in made.model.modules())


@pytest.mark.parametrize("where", [pytest.param(in_forward, marks=pytest.mark.slow), in_backward])
def test_a_second_time_is_the_end_with_an_explanation(where: list[None]) -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory") as error:
        run(lambda: where.extend([None, None]))
    notes = "\n".join(error.value.__notes__)
    assert "the step was repeated once, and ran out of memory again" in notes
    assert "what to do, best first:" in notes


def test_a_larger_batch_may_have_larger_gradients() -> None:
    def train(made: Made, fails: Callable[[], object]) -> None:
        for number in range(5):
            x = torch.randn(512 * (16 if number == 4 else 1), 64)
            if number == 4:
                fails()
            made.step(x)

    made = Made()
    with lowtide.within("75%", retry=True) as ran:
        train(made, lambda: in_backward.append(None))
    assert ran.plan is not None
    gradient_bytes = 16 * 512 * 64 * 4
    assert gradient_bytes > ran.plan.predicted.peak_bytes // 20
    assert ran.n_repeated == 1
    plain = Made()
    train(plain, lambda: None)
    assert made.losses == plain.losses
    assert equal(made.model.state_dict(), plain.model.state_dict())


def test_each_failing_step_is_repeated_and_the_numbers_for_a_log_say_so() -> None:
    made = Made()
    with lowtide.within("75%", retry=True) as ran:
        assert ran.metrics() == {}
        for number in range(7):
            if number > 3:
                (in_forward if number == 5 else in_backward).append(None)
            made.step(torch.randn(512, 64))
    assert ran.n_repeated == 3
    metrics = ran.metrics()
    assert all(re.fullmatch(r"[a-z][a-z_]*", name) for name in metrics)  # W&B is the strictest
    assert all(isinstance(value, int | float) and math.isfinite(value) for value in metrics.values())
    assert ran.plan is not None
    assert ran.verdict is not None
    assert metrics["lowtide_budget_bytes"] == ran.plan.budget_bytes
    assert metrics["lowtide_peak_bytes"] == ran.verdict.measured_peak_bytes
    assert metrics["lowtide_repeated_steps"] == 3


def test_the_step_that_is_measured_is_repeated_too() -> None:
    made = Made()
    with lowtide.within("75%", retry=True) as ran:
        for number in range(5):
            x = torch.randn(512, 64)
            if number == 2:
                in_backward.append(None)
            made.step(x)
        torch.autograd.grad(made.model(x).sum(), made.model.blocks[0].up.weight)  # passes by
    assert ran.n_repeated == 1
    assert ran.verdict is not None


@pytest.mark.slow
def test_a_model_of_transformers_is_repeated() -> None:
    def losses(*, retry: bool) -> list[float]:
        case, found = build("gpt2"), []
        case.model.transformer.h[2].register_forward_pre_hook(_exhaust)
        with lowtide.within("80%", retry=True) if retry else contextlib.nullcontext() as ran:
            for number in range(5):
                if retry and number == 4:
                    in_forward.append(None)
                found.append(case.step(case.batch).item())
        assert not retry or ran.n_repeated == 1
        return found

    assert losses(retry=True) == losses(retry=False)


def _exhaust(*_: Any) -> None:
    if in_forward:
        in_forward.pop()
        torch.empty(TOO_MUCH)


@pytest.mark.slow
def test_without_being_asked_nothing_is_repeated() -> None:
    made = Made()
    with pytest.raises(RuntimeError, match="can't allocate memory"), lowtide.within("75%") as ran:
        train(made, lambda: in_forward.append(None))
    assert ran.n_repeated == 0


def with_a_penalty(made: Made, x: Tensor) -> Tensor:
    return mean_square(made, x) + made.model.blocks[0].up.weight.square().sum()


log: list[float] = []


def counting(made: Made, x: Tensor) -> Tensor:
    loss = mean_square(made, x)
    if not log:
        made.model.blocks[2].register_forward_hook(lambda *_: log.append(0.0))
        log.append(0.0)
    return loss


@pytest.mark.parametrize(
    ("loss_of", "why"),
    [
        (with_a_penalty, "the loss uses parameters of the model directly"),
        (counting, "it changes something outside its modules"),
    ],
)
def test_a_step_that_would_be_another_one_is_not_repeated(loss_of: Loss, why: str) -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory") as error:
        run(lambda: in_backward.append(None), loss_of=loss_of)
    notes = "\n".join(error.value.__notes__)
    assert f"the step is not repeated: {why}" in notes
    assert "what to do, best first:" in notes


def test_a_backward_that_keeps_its_graph_is_not_repeated() -> None:
    made = Made()

    def keeping() -> None:
        for number in range(6):
            if number == 4:
                in_backward.append(None)
            made.optimizer.zero_grad()
            mean_square(made, torch.randn(512, 64)).backward(retain_graph=True)
            made.optimizer.step()

    with pytest.raises(RuntimeError) as error, lowtide.within("98%", retry=True):
        keeping()
    assert "keeps or creates a graph" in "\n".join(error.value.__notes__)


class Heads(nn.Module):
    """Outputs that share nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [head(x) for head in self.heads]


def test_each_output_may_have_a_backward_pass_of_its_own_or_none() -> None:
    model = Heads()
    optimizer = torch.optim.AdamW(model.parameters())
    with lowtide.within("90%", retry=True) as ran:
        for _ in range(4):
            first, second, _ = model(torch.randn(512, 64))
            first.square().mean().backward()
            second.square().mean().backward()
            assert all(parameter.grad is None for parameter in model.heads[2].parameters())
            optimizer.step()
            optimizer.zero_grad()
    assert ran.verdict is not None


def test_nothing_is_held_after_the_step() -> None:
    made = Made()
    with lowtide.within("75%", retry=True):
        for _ in range(4):
            x = torch.randn(512, 64)
            loss = mean_square(made, x)
            loss.backward()
            made.optimizer.step()
            made.optimizer.zero_grad()
        batch = weakref.ref(x)
        del x
        assert batch() is None
        assert loss.grad_fn is not None


LIMITED = """
import os, resource, torch
from torch import nn

torch.manual_seed(0)
WHERE, _, ROOM = os.environ.get("LIMIT", "").partition(" ")

def limit(where, step):
    if step == 3 and where == WHERE:
        mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + int(ROOM) * 2**20, -1))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.norm = nn.Linear(32, 512), nn.GELU(), nn.BatchNorm1d(512)
        self.drop, self.down = nn.Dropout(0.1), nn.Linear(512, 32)
    def forward(self, x):
        return x + self.down(self.drop(self.norm(self.act(self.up(x)))))
class Net(nn.Sequential):
    def forward(self, x):
        return (super().forward(x) - x).square().mean()
model = Net(*[Block() for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.ones(64, 64, requires_grad=True).tanh().sum().backward()  # the backward threads and their stacks are there now
for step in range(5):
    x = torch.randn(2048, 32)
    optimizer.zero_grad()
    limit("forward", step)
    loss = model(x)
    limit("backward", step)
    loss.backward()
    optimizer.step()
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    print(step, loss.item().hex())
print(*[sum(t.double().sum().item() for t in model.state_dict().values()).hex(), torch.rand(1).item()])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits its own address space")
@pytest.mark.parametrize(
    ("limit", "said"),
    [("forward 30", "the model's forward ran out"), ("backward 2", "backward ran out"), ("forward 4", "")],
)
def test_a_script_goes_on_after_memory_ran_out(
    limit: str, said: str, tmp_path: Path, run_python: RunPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is freed goes back to the system, so that the limit is one on what is in use.
    for name, value in (("MMAP_THRESHOLD_", "65536"), ("TRIM_THRESHOLD_", "65536"), ("ARENA_MAX", "1")):
        monkeypatch.setenv(f"MALLOC_{name}", value)
    (tmp_path / "train.py").write_text(LIMITED)
    with_room = run_python(str(tmp_path / "train.py"))
    monkeypatch.setenv("LIMIT", limit)
    done = run_python("-m", "lowtide", "run", "--retry", "--budget", "80%", str(tmp_path / "train.py"))
    if said:
        assert done.returncode == 0, done.stderr
        assert done.stdout == with_room.stdout
        assert said in done.stderr
        assert "1 step was repeated after running out of memory" in done.stderr
    else:  # not even the plan with the smallest peak has room
        assert done.returncode == 1
        assert "ran out of memory again" in done.stderr
        assert "what to do, best first:" in done.stderr
    unaided = run_python("-m", "lowtide", "run", "--budget", "80%", str(tmp_path / "train.py"))
    assert unaided.returncode == 1
    assert "can't allocate memory" in unaided.stderr
