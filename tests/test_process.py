"""A plan of one model changes nothing for the rest of the process, in bits and in calls, in force and afterwards."""

import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import optimizer as optimizers

import lowtide
from comparing import equal
from conftest import RunPython
from lowtide._torch import patching as _standins
from lowtide._torch.modes import saved_tensor_hooks
from lowtide._torch.privateuse1 import GATED_KEY, OVERRIDE_KEY
from lowtide.cli import lowtide as command
from lowtide.planner.inplace_savings import without_in_place
from lowtide.planner.records import Plan
from lowtide.runtime import inplace_gradients as in_place


class Words(nn.Module):
    """Large gradients of a softmax and a tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(2000, 32), nn.Linear(32, 2000)

    def forward(self, x: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(torch.tanh(self.words(x))).flatten(0, 1), x.flatten())


def pictures() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.GroupNorm(8, 32),
        nn.GELU(), nn.Dropout(0.1), nn.Conv2d(32, 4, 3), nn.Softmax(1),
    )  # fmt: skip


def trained() -> list[Tensor]:
    """All that three steps of another model lead to, from the same beginning each time."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model, x = pictures(), torch.randn(2, 3, 24, 24)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        moments = [value for entry in optimizer.state.values() for value in entry.values()]
        return [*(p.detach() for p in model.parameters()), *model.buffers(), *moments]


@pytest.fixture
def words() -> tuple[nn.Module, Callable[[Tensor], None], Tensor]:
    torch.manual_seed(0)
    model, x = Words(), torch.randint(2000, (8, 32))

    def step(x: Tensor) -> None:
        model.zero_grad()
        model(x).backward()

    return model, step, x


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """In which threads kernels of ours are asked."""
    threads: list[int] = []
    ruling = in_place._find_permission_to_write

    def noting(name: str, args: tuple[object, ...]) -> object:
        threads.append(threading.get_ident())
        return ruling(name, args)

    monkeypatch.setattr(in_place, "_find_permission_to_write", noting)
    return threads


def of_torch() -> dict[str, object]:
    """Functions and tables of torch that something of this package may stand in for, or add to."""
    return {
        "backward": torch.autograd._engine_run_backward,
        "call": nn.Module.__call__,
        "zero_grad": (nn.Module.zero_grad, torch.optim.Optimizer.zero_grad),
        "hooks off": torch.autograd.graph.disable_saved_tensors_hooks,
        "before updates": [*optimizers._global_optimizer_pre_hooks],
        "of modules": (nn.modules.module._global_forward_hooks, nn.modules.module._global_backward_hooks),
        "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "kernels": frozenset(key for key in torch.library._impls if not key.endswith((OVERRIDE_KEY, GATED_KEY))),
        "hooks of saved tensors": saved_tensor_hooks(),
        "clip": (nn.utils.clip_grad_norm_, torch.save, torch.compile, torch.Generator),
    }


def test_another_model_is_trained_to_the_same_bits_by_torchs_own_kernels(words, asked) -> None:
    model, step, x = words
    plain, before = trained(), of_torch()
    with lowtide.fit(model, step, x, budget="99%") as fitted:
        assert fitted.plan.in_place
        assert equal(trained(), plain)
        step(x)
        assert asked
        asked.clear()
        assert equal(trained(), plain)
        assert asked == []  # its steps pass by all kernels of ours
        assert of_torch() == before  # nothing is recomputed or replayed, so no write is watched for
        step(x)
        asked.clear()
    assert equal(trained(), plain)
    assert asked == []
    assert of_torch() == before
    assert not any(makes for _, makes in _standins._replacements.values())


def test_another_model_between_forward_and_backward_of_a_planned_one(words, asked) -> None:
    model, step, x = words
    plain = trained()
    model.zero_grad()
    model(x).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    with lowtide.fit(model, step, x, budget="99%"):
        model.zero_grad()
        loss = model(x)
        assert equal(trained(), plain)
        loss.backward()
        assert equal([p.grad for p in model.parameters()], expected)
        for _ in range(2):  # two graphs at once, and one that is read twice
            model.zero_grad()
            first, second = model(x), model(x)
            first.backward(retain_graph=True)
            second.backward()
            asked.clear()
            first.backward()
            assert asked
            assert equal([p.grad for p in model.parameters()], [3 * gradient for gradient in expected])
        asked.clear()
        assert equal(trained(), plain)
        assert asked == []


def test_a_dropped_forward_is_awaited_no_longer(words, asked) -> None:
    model, step, x = words
    with lowtide.fit(model, step, x, budget="99%"):
        loss = model(x)
        del loss
        gc.collect()
        asked.clear()
        trained()
    assert asked == []


def test_backward_in_another_thread_writes_in_place_too(words, asked) -> None:
    model, step, x = words
    with lowtide.fit(model, step, x, budget="99%"):
        loss = model(x)
        asked.clear()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert set(asked) == {thread.ident}


def test_other_threads_train_to_the_same_bits_while_a_model_is_fitted_and_trained(words, asked) -> None:
    """Without dropout: the random numbers of a CPU are the whole process's, and rehearsals put them back."""
    model, step, x = words
    torch.manual_seed(3)
    data = torch.randn(64, 256)
    first = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.LogSoftmax(-1))
    start = {name: value.clone() for name, value in first.state_dict().items()}

    def train() -> list[Tensor]:
        model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.LogSoftmax(-1))
        model.load_state_dict(start)
        for _ in range(20):
            model.zero_grad()
            model(data).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
        return [*model.parameters()]

    plain, found, stop = train(), list[list[Tensor]](), threading.Event()

    def others() -> None:
        while not stop.is_set():
            found.append(train())

    with lowtide.fit(model, step, x, budget="99%"):
        thread = threading.Thread(target=others)
        thread.start()
        try:
            for _ in range(20):
                step(x)
        finally:
            stop.set()
            thread.join()
    assert found
    assert all(equal(one, plain) for one in found)


NEVER = """
import torch
from torch import nn
import lowtide

torch.manual_seed(0)
model, x = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.GELU()))), torch.randn(512, 64)

def step(x):
    model(x).square().mean().backward()

before = set(torch.library._impls)
fitted = lowtide.fit(model, step, x, budget="80%", in_place=False)
step(x)
assert fitted.plan.in_place == {} and not fitted.plan.allows_in_place
assert "no gradients in place" in str(fitted), str(fitted)
assert not {key for key in set(torch.library._impls) - before if key.startswith("aten/")}
"""


@pytest.mark.slow
def test_without_gradients_in_place_no_kernel_is_ever_put_anywhere(run_python: RunPython) -> None:
    done = run_python("-c", NEVER)
    assert done.returncode == 0, done.stderr


def test_plans_say_that_no_gradient_is_to_be_written_in_place(words, tmp_path: Path) -> None:
    model, step, x = words
    profile = lowtide.rehearse(model, step, x)
    assert profile.in_place
    assert profile.allows_in_place
    for without in (without_in_place(profile), lowtide.rehearse(model, step, x, in_place=False)):
        assert not without.allows_in_place
        plan = lowtide.plan(without, "100%")
        assert plan.in_place == {}
        assert plan.fallback is None or plan.fallback.in_place == {}
        assert "no gradients in place" in str(plan)
        assert Plan.from_json(plan.to_json()) == plan
        with lowtide.apply(model, plan) as applied:
            assert applied._engine._writing is None
    assert "as asked" not in str(lowtide.plan(profile, "100%"))
    with lowtide.fit(model, step, x, budget="100%", profile=profile, in_place=False) as fitted:
        assert fitted.plan.in_place == {}
        assert fitted.verdict.identical
        assert fitted.verdict.within_budget
    profile.to_json(tmp_path / "profile.json")
    made = CliRunner().invoke(
        command, ["plan", "make", "--budget", "100%", "--no-in-place", str(tmp_path / "profile.json")]
    )
    assert made.exit_code == 0, made.output
    assert replace(Plan.from_json(made.output), step_ms=0.0).in_place == {}
    assert not Plan.from_json(made.output).allows_in_place


SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.GELU())))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(512, 64)).square().mean().backward()
    optimizer.step()
print("kernels:", sum("GenericMode" in key for key in torch.library._impls))
"""


@pytest.mark.slow
@pytest.mark.parametrize("switch", [[], ["--no-in-place"]], ids=["as usual", "switched off"])
def test_a_script_runs_without_kernels_of_ours(switch: list[str], run_python: RunPython, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    saved = tmp_path / "plan.json"
    options = ["--budget", "85%", "--save", str(saved), *switch]
    done = run_python("-m", "lowtide", "run", *options, str(tmp_path / "train.py"))
    assert done.returncode == 0, done.stderr
    assert ("kernels: 0" in done.stdout) == bool(switch)
    assert Plan.from_json(saved).allows_in_place == (not switch)
    refused = run_python("-m", "lowtide", "run", "--no-in-place", "--plan", str(saved), str(tmp_path / "train.py"))
    assert (refused.returncode, "--no-in-place needs --budget" in refused.stderr) == (2, True)
