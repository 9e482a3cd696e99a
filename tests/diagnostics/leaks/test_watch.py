"""The watch itself: it keeps nothing alive, changes nothing, and leaves torch as it was."""

from __future__ import annotations

import gc
import json
import logging
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from comparing import equal
from conftest import RunPython
from lowtide import cli
from lowtide._torch.backward import ENGINE
from lowtide.diagnostics.leaks.inspector import Inspector
from lowtide.errors import LowtideError
from parts import COMPILED


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))


BATCHES = 6
NO_STEPS = "no optimizer has stepped and no weight has changed, so steps cannot be distinguished"


def batches() -> list[Tensor]:
    return [torch.randn(64, 64) for _ in range(BATCHES)]


def train(model: nn.Module, data: list[Tensor], *, retain: bool = False) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in data:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward(retain_graph=retain)
        optimizer.step()


def test_as_a_context_manager(model: nn.Module) -> None:
    with lowtide.watch(model) as watched:
        train(model, batches(), retain=True)
    (finding,) = watched.findings
    assert (finding.code, finding.since_step) == ("LT003", 1)
    assert "local variable 'loss'" in finding.holder
    assert str(watched).startswith("LT003 retain_graph keeps the graph: ")
    assert json.loads(watched.to_json())["steps"] == BATCHES


def test_around_a_loop_the_findings_are_logged(model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    with caplog.at_level(logging.WARNING, "lowtide"):
        for x in lowtide.watch(model, batches()):
            loss = model(x).square().mean()
            losses.append(loss)
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
    assert "LT008" in caplog.text
    assert "list 'losses' [6 entries]" in caplog.text


def test_the_name_of_a_part_begins_at_the_model() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 256)

        def forward(self, x: Tensor) -> Tensor:
            self.last_hidden = self.layer(x).tanh()
            return self.last_hidden

    model = nn.ModuleDict({"encoder": Encoder(), "head": nn.Linear(256, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with lowtide.watch(model) as watched:
        for x in batches():
            optimizer.zero_grad()
            model["head"](model["encoder"](x)).square().mean().backward()
            optimizer.step()
    assert [(f.code, f.holder) for f in watched.findings] == [("LT014", "model.encoder.last_hidden")]


def test_nothing_is_kept_alive(model: nn.Module) -> None:
    kept: list[weakref.ref[torch.UntypedStorage]] = []
    model[1].register_forward_hook(lambda m, a, output: kept.append(weakref.ref(output.untyped_storage())))
    data = batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gc.collect()
    gc.disable()
    try:
        with lowtide.watch(model):
            for x in data:
                optimizer.zero_grad()
                output = model(x)
                loss = output.square().mean()
                loss.backward(retain_graph=True)
                assert kept[-1]() is not None
                optimizer.step()
                del output, loss
                assert [storage() for storage in kept] == [None] * len(kept)
    finally:
        gc.enable()


def test_training_is_the_same_bit_by_bit(model: nn.Module) -> None:
    data = batches()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, data)
    plain = [p.detach().clone() for p in model.parameters()]
    model.load_state_dict(start)
    random = torch.get_rng_state()
    with lowtide.watch(model):
        train(model, data)
    assert equal(plain, model.parameters())
    assert torch.equal(random, torch.get_rng_state())


def test_torch_is_left_as_it_was(model: nn.Module) -> None:
    def now() -> tuple[object, ...]:
        hooks = nn.modules.module
        engine = getattr(torch.autograd, ENGINE)
        tables = len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)
        return engine, torch.optim.Optimizer.zero_grad, nn.Module.zero_grad, *tables

    before = now()
    with lowtide.watch(model):
        assert now() != before
    assert now() == before


def test_torch_is_left_as_it_was_by_a_loop_that_raises(model: nn.Module) -> None:
    engine = getattr(torch.autograd, ENGINE)
    with pytest.raises(RuntimeError), lowtide.watch(model):
        model(torch.ones(3, 3))
    assert getattr(torch.autograd, ENGINE) is engine


def test_one_watch_at_a_time(model: nn.Module) -> None:
    with lowtide.watch(model) as watched:
        with pytest.raises(LowtideError, match="a watch is already running"):
            lowtide.watch(model).__enter__()
        train(model, batches())
    with pytest.raises(LowtideError, match="this watch was used before"):
        watched.__enter__()
    with pytest.raises(LowtideError, match="there are no batches to loop over"):
        next(iter(lowtide.watch(model)))


def test_a_failing_forward_ends_nothing(model: nn.Module) -> None:
    with lowtide.watch(model) as watched:
        with pytest.raises(RuntimeError):
            model(torch.ones(3, 3))
        train(model, batches(), retain=True)
    assert [finding.code for finding in watched.findings] == ["LT003"]


def test_without_a_model_every_model_is_watched(model: nn.Module) -> None:
    with lowtide.watch() as watched:
        train(model, batches())
    assert (watched.findings, watched.n_steps) == ((), BATCHES)
    assert str(watched) == f"nothing found in {BATCHES} steps"


def test_a_loop_without_an_optimizer_is_counted_in_calls(model: nn.Module) -> None:
    with lowtide.watch(model) as watched:
        for batch in batches():
            model(batch).sum().backward()
            model.zero_grad()
    said = f"nothing found in {BATCHES} calls of the model; {NO_STEPS}"
    assert str(watched) == said


def test_that_there_is_no_optimizer_is_said_beside_findings(model: nn.Module) -> None:
    kept = []
    with lowtide.watch(model) as watched:
        for batch in batches():
            kept.append(model(batch).sum())
    assert [finding.code for finding in watched.findings] == ["LT008"]
    assert str(watched).endswith(f"\n\n{NO_STEPS}")


SCRIPT = """
import sys
from helper import answer
if __name__ == "__main__":
    print(sys.argv[1:], answer, __file__.endswith("train.py"))
    sys.exit(int(sys.argv[1]))
"""


Watch = Callable[..., tuple[int, str, str]]


@pytest.fixture
def watch(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Run `lowtide watch` in this process, and return its exit code and what it printed to stdout and stderr."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # a process group of an earlier test leaves its own

    def command(*args: str) -> tuple[int, str, str]:
        capfd.readouterr()
        return cli.main(["watch", *args]), *capfd.readouterr()

    return command


@pytest.mark.parametrize(("code", "expected"), [("0", 0), ("3", 2)])
def test_a_script_runs_as_it_would_alone(code: str, expected: int, tmp_path: Path, watch: Watch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "helper.py").write_text("answer = 42\n", encoding="utf-8")
    ended, out, err = watch(str(tmp_path / "train.py"), code, "--lr", "0.1")
    assert out == f"['{code}', '--lr', '0.1'] 42 True\n"
    assert "lowtide watch: nothing found in 0 steps; no model was called with gradients on" in err
    assert ended == expected


def test_a_script_that_raises(tmp_path: Path, watch: Watch) -> None:
    (tmp_path / "train.py").write_text("def f():\n    raise ValueError('no data')\n\nf()\n", encoding="utf-8")
    code, _, err = watch(str(tmp_path / "train.py"))
    assert code == 2
    assert "line 2, in f\nValueError: no data" in re_joined(err)
    assert "lowtide/" not in err


INTERRUPTED = """
import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters())
for step in range(5):
    loss = model(torch.randn(256, 64)).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
raise KeyboardInterrupt
"""


def test_findings_before_an_interrupt_are_reported(tmp_path: Path, watch: Watch) -> None:
    script, report = tmp_path / "train.py", tmp_path / "found.json"
    script.write_text(INTERRUPTED, encoding="utf-8")
    code, _, err = watch("--json", str(report), str(script))
    assert code == 130
    assert err.startswith("Traceback (most recent call last):\n")
    assert "lowtide/" not in err
    assert "\nKeyboardInterrupt\n" in err
    assert "lowtide watch: LT003 retain_graph keeps the graph" in err
    assert [finding["code"] for finding in json.loads(report.read_text(encoding="utf-8"))["findings"]] == ["LT003"]


LEARNS_TO_LEARN = """
import torch
from torch.func import functional_call
from torch.nn import functional as F

model = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(4):
    losses, total = [], 0.0
    for _ in range(3):
        x, y, weights = torch.randn(64, 16), torch.randn(64, 1), dict(model.named_parameters())
        inner = F.mse_loss(functional_call(model, weights, (x,)), y)
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: weight - 0.1 * g for (name, weight), g in zip(weights.items(), gradients)}
        losses.append(F.mse_loss(functional_call(model, fast, (x,)), y))
        total = total + losses[-1]
    (GATHERED).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize("gathered", ["total", pytest.param("torch.stack(losses).mean()", marks=pytest.mark.slow)])
def test_losses_that_are_gathered_to_be_differentiated_are_not_to_be_detached(
    gathered: str, tmp_path: Path, run_python: RunPython
) -> None:
    script, report = tmp_path / "train.py", tmp_path / "found.json"
    text = LEARNS_TO_LEARN.replace("GATHERED", gathered)
    script.write_text(text, encoding="utf-8")
    done = run_python("-m", "lowtide", "watch", "--json", str(report), str(script))
    assert done.returncode == 1, done.stderr
    findings = json.loads(report.read_text(encoding="utf-8"))["findings"]
    assert {finding["code"] for finding in findings} == {"LT003"}, done.stderr
    fix = "del fast, gradients, inner"
    assert findings[0]["fix"].startswith(f"`{fix}` after the last backward pass")
    script.write_text(text + f"    {fix}\n", encoding="utf-8")
    done = run_python("-m", "lowtide", "watch", str(script))
    assert done.returncode == 0, done.stderr


def re_joined(text: str) -> str:
    """A traceback without the source lines and their markers."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("    "))


TRAIN_COMPILED = (
    COMPILED
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for step in range(5):
    loss = model(torch.randn(80, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    kept.append(loss)
print(counters["frames"], counters["stats"]["calls_captured"], dict(counters["graph_break"]))
print([loss.item().hex() for loss in kept])
"""
)


@pytest.mark.slow
def test_a_model_that_is_compiled_where_it_stands_is_compiled_as_ever(tmp_path: Path, run_python: RunPython) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN_COMPILED, encoding="utf-8")
    plain, watched = (run_python(*command, str(script)) for command in ((), ("-m", "lowtide", "watch")))
    assert watched.stdout == plain.stdout
    assert "LT017" in watched.stderr, watched.stderr
    assert "global hooks" not in watched.stderr


def test_the_forward_of_a_reentrant_checkpoint_is_no_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules are called without gradients, and an evaluation is inspected after 2, 4, 8 ... calls."""
    evaluated: list[int] = []
    monkeypatch.setattr(Inspector, "_inspect_evaluation", lambda _, key: evaluated.append(key))
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    x = torch.randn(64, 64, requires_grad=True)
    with lowtide.watch():
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=True)
        x.sum().backward()
        assert not evaluated
        with torch.no_grad():
            layers[0](x)
    assert len(evaluated) == 1
