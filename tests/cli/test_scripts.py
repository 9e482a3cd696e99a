"""Unedited scripts: rehearsed, run within a budget, run under a plan, and the messages when that is impossible."""

import gc
import json
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from conftest import RunPython
from lowtide import cli
from lowtide.planner.records import Plan, Profile
from lowtide.script.fit_steps import MOST_SHORT, NEXT_REHEARSED
from lowtide.units import format_bytes

TRAIN = """
import argparse, hashlib, torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--rows", type=int, nargs="+", default=[256])
parser.add_argument("--json", default="")
given = parser.parse_args()

torch.manual_seed(0)
def block():
    return nn.Sequential(nn.Linear(64, given.width), nn.GELU(), nn.Dropout(0.1), nn.Linear(given.width, 64))
model = nn.Sequential(*[block() for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters())
for step in range(given.steps):
    x = torch.randn(given.rows[step % len(given.rows)], 64)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
bits = hashlib.sha256()
for parameter in model.parameters():
    bits.update(parameter.detach().numpy().tobytes())
print(bits.hexdigest(), given.json)
"""


class Done(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Done]
RunPlain = Callable[..., str]


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """The command line, in this process."""

    def command(*args: str) -> Done:
        capfd.readouterr()
        return Done(cli.main(args), *capfd.readouterr())

    return command


@pytest.fixture
def run_plain(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunPlain:
    """Run a script without Lowtide in this process, which has imported torch, and return its output."""

    def output(*args: str) -> str:
        capfd.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [*args])
            runpy.run_path(args[0], run_name="__main__")
        return capfd.readouterr().out

    return output


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Output of the script without Lowtide, in a process of its own."""
    path = tmp_path_factory.mktemp("plain") / "train.py"
    path.write_text(TRAIN, encoding="utf-8")
    return subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300, check=True).stdout


def test_a_script_within_a_budget_trains_to_the_same_bits(
    script: Callable[[str], str], plain: str, run: Run, tmp_path: Path
) -> None:
    train, saved = script(TRAIN), str(tmp_path / "plan.json")
    within = run("run", "--budget", "90%", "--save", saved, train, "--steps", "5")
    assert (within.code, within.out) == (0, plain)
    assert "peak predicted (budget " in within.err
    assert within.err.count("within the budget") == 1
    assert Plan.from_json(saved).recompute

    again = run("run", "--plan", saved, train)
    assert (again.code, again.out) == (0, plain)
    assert "the plan is in force" in again.err
    assert again.err.count("within the budget") == 1


needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")


@needs_full
def test_a_script_trains_on_where_its_plan_can_not_be_saved(script: Callable[[str], str], plain: str, run: Run) -> None:
    done = run("run", "--budget", "90%", "--save", "/dev/full", script(TRAIN))
    assert (done.code, done.out) == (0, plain)
    said = "lowtide: the plan is not saved; training continues: /dev/full can't be written: No space left on device."
    assert done.err.count(said) == 1


@pytest.mark.slow
@needs_full
def test_a_script_trains_on_where_stderr_is_full(script: Callable[[str], str], plain: str) -> None:
    command = [sys.executable, "-m", "lowtide", "run", "--budget", "90%", script(TRAIN)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, plain)


@needs_full
def test_a_profile_that_can_not_be_written_is_said_in_a_line(script: Callable[[str], str], run: Run) -> None:
    done = run("rehearse", "--json", "/dev/full", script(TRAIN))
    assert done.code == 2
    assert done.err.splitlines()[-1].startswith("lowtide.LowtideError: /dev/full can't be written: No space left")


def test_a_rehearsal_ends_the_script_and_says_what_a_step_needs(
    script: Callable[[str], str], run: Run, tmp_path: Path
) -> None:
    profile = tmp_path / "profile.json"
    done = run("rehearse", "--json", str(profile), script(TRAIN), "--json", "the script's own")
    assert done.code == 0
    steps = [line for line in done.out.splitlines() if " 0x" in line]
    assert [line.split()[0] for line in steps] == ["0"]  # it ends with the update of the second
    assert "plain step: " in done.out
    assert "smallest peak: " in done.out
    assert "`lowtide rehearse --plain` times it" in done.out
    assert Profile.from_json(profile).measured_plain_peak_bytes is None


def test_json_is_printed_alone(script: Callable[[str], str], run: Run) -> None:
    done = run("rehearse", "--plain", "--json", "-", script(TRAIN))
    assert Profile.from_json(done.out).measured_plain_peak_bytes
    assert "0 0x" in done.err


def test_a_plan_is_made_from_a_script_or_from_its_profile(
    script: Callable[[str], str], run: Run, tmp_path: Path
) -> None:
    profile, plan = str(tmp_path / "profile.json"), str(tmp_path / "plan.json")
    run("rehearse", "--json", profile, script(TRAIN))
    made = run("plan", "make", "--budget", "85%", "-o", plan, profile)
    assert made.code == 0
    assert "peak predicted" in made.out
    printed = run("plan", "make", "--budget", "85%", script(TRAIN))
    assert printed.code == 0
    fields = json.loads(printed.out)
    assert fields["decisions"]
    assert fields["fingerprint"] == json.loads(Path(plan).read_text(encoding="utf-8"))["fingerprint"]
    assert run("run", "--plan", plan, script(TRAIN)).code == 0


def test_a_plan_for_another_model_is_refused_with_what_differs(
    script: Callable[[str], str], run: Run, tmp_path: Path
) -> None:
    plan = str(tmp_path / "plan.json")
    run("plan", "make", "--budget", "90%", "-o", plan, script(TRAIN))
    wider = run("run", "--plan", plan, script(TRAIN), "--width", "160")
    assert wider.code == 2
    assert "lowtide.StalePlan: this plan is not for the Sequential that the script trains." in wider.err
    assert "\n  model: made for Sequential " in wider.err
    larger = run("run", "--plan", plan, script(TRAIN), "--rows", "257")
    assert larger.code == 2
    assert "batch: made for [256, 64] float32, found [257, 64] float32" in larger.err
    assert run("run", "--plan", plan, script(TRAIN), "--rows", "255").code == 0


def grown(by_bytes: int, after: int = 1) -> str:
    """The script, whose steps need more `after` that one than those that were rehearsed."""
    more = f"    more = torch.zeros({by_bytes // 4} if step > {after} else 1)\n    loss.backward()"
    return TRAIN.replace("    loss.backward()", more)


def test_a_plan_that_is_over_the_budget_is_made_again(script: Callable[[str], str], run: Run) -> None:
    done = run("run", "--budget", "85%", script(grown(by_bytes=450_000)))
    assert done.code == 0
    assert done.err.count("over the budget: planning again") >= 1
    assert done.err.count("within the budget") == 1


def test_a_budget_that_no_plan_keeps_is_an_error(script: Callable[[str], str], run: Run) -> None:
    done = run("run", "--budget", "85%", script(grown(by_bytes=10_000_000)))
    assert done.code == 1
    assert "lowtide.OverBudget: the measured peak stayed above the budget" in done.err


def test_a_budget_that_later_batches_do_not_keep_is_exit_code_1(
    script: Callable[[str], str], run: Run, run_plain: RunPlain
) -> None:
    train, rows = script(TRAIN), ("--steps", "8", "--rows", *(["256"] * 4 + ["2048"] * 4))
    done = run("run", "--budget", "85%", train, *rows)
    assert (done.code, done.out) == (1, run_plain(train, *rows))
    assert "Training continues under the plan with the smallest measured peak, " in done.err
    assert done.err.count("later steps were above the budget, so the exit code is 1: ") == 1


@pytest.fixture
def plan_file(script: Callable[[str], str], run: Run, tmp_path: Path) -> str:
    path = str(tmp_path / "plan.json")
    assert run("plan", "make", "--budget", "85%", "-o", path, script(TRAIN)).code == 0
    return path


def test_a_plan_that_was_made_before_is_measured_when_the_optimizer_has_its_state(
    plan_file: str, script: Callable[[str], str], run: Run
) -> None:
    for n_steps in (1, 2, 5):
        done = run("run", "--plan", plan_file, script(TRAIN), "--steps", str(n_steps))
        assert done.code == 0
        assert done.err.count(" peak: within the budget") == 1
    planned = Plan.from_json(plan_file).predicted.peak_bytes
    assert f"measured {format_bytes(planned)} peak" in done.err
    assert run("run", "--plan", plan_file, script(grown(by_bytes=10_000_000))).code == 0  # the third: seen by nobody


def test_a_plan_that_was_made_before_and_is_over_its_budget_ends_the_script(
    plan_file: str, script: Callable[[str], str], run: Run
) -> None:
    done = run("run", "--plan", plan_file, script(grown(by_bytes=10_000_000, after=0)))
    assert (done.code, done.out.count("0x")) == (1, 1)
    assert "lowtide.OverBudget: the measured peak stayed above the budget" in done.err
    assert "or `lowtide run --budget`, which plans again until the measured peak is within it" in done.err
    assert "The script was ended after update 2." in done.err


SKIPS = TRAIN.replace(
    "    optimizer.zero_grad()",
    "    if step == 1:\n        continue  # its graph is there during the next forward\n    optimizer.zero_grad()",
)


@pytest.mark.parametrize(
    ("text", "is_more"),
    [(SKIPS, True), (grown(by_bytes=250_000, after=0), False)],
    ids=["a skipped batch", "a little more"],
)
def test_a_peak_above_the_plain_steps_is_said_to_be_of_something_else(
    text: str, is_more: bool, plan_file: str, script: Callable[[str], str], run: Run
) -> None:
    done = run("run", "--plan", plan_file, script(text))
    assert done.code == 1
    assert ("more than the plain step's 2.89 MiB: this batch needs more than the rehearsed ones" in done.err) == is_more


def test_a_plan_that_was_made_before_and_has_smaller_batches_only_is_measured_on_them(
    plan_file: str, script: Callable[[str], str], run: Run
) -> None:
    smaller = ("--rows", "128", "--steps")
    for n_steps, n_seen in ((3, 3), (30, 20)):
        done = run("run", "--plan", plan_file, script(TRAIN), *smaller, str(n_steps))
        assert done.code == 0
        said = f"in {n_seen} steps under the plan no batch had the size that the plan is for: the largest measured peak"
        assert re.search(f"{said} is 1\\.[0-9]+ MiB\n", done.err)
    done = run("run", "--plan", plan_file, script(grown(by_bytes=10_000_000, after=0)), *smaller, "3")
    assert (done.code, done.out.count("0x")) == (1, 1)
    assert "lowtide.OverBudget: the measured peak stayed above the budget" in done.err


def test_a_plan_that_was_made_before_goes_with_the_scripts_own_profiler(
    plan_file: str, script: Callable[[str], str], run: Run
) -> None:
    profiled = TRAIN.replace("for step in", "profiler = torch.profiler.profile()\nprofiler.start()\nfor step in")
    done = run("run", "--plan", plan_file, script(profiled + "profiler.stop()"))
    assert (done.code, done.out.count("0x")) == (0, 5)
    assert "the peak under the plan is not measured: CPU memory cannot be recorded: another profiler is" in done.err


@pytest.mark.parametrize("command", [("rehearse",), ("run", "--budget", "90%")], ids=lambda command: command[0])
def test_a_rehearsal_inside_of_the_scripts_own_profiler_is_refused_with_the_reason(
    command: tuple[str, ...], script: Callable[[str], str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowtide.script.rehearse_steps.PATIENCE", 3)
    done = run(*command, script(TRAIN.replace("for step in", "with torch.profiler.profile():\n  for step in")))
    assert (done.code, done.out.count("0x")) == (2, 3)
    assert done.err.count("RehearsalError") == 1
    assert "CPU memory cannot be recorded: another profiler is running" in done.err
    assert "Traceback" not in done.err


def test_a_plan_that_was_made_before_goes_with_updates_by_hand(
    script: Callable[[str], str], run: Run, tmp_path: Path
) -> None:
    path, optimized = (
        str(tmp_path / "plan.json"),
        BY_HAND.replace("for _", "sgd = torch.optim.SGD(model.parameters())\nfor _"),
    )
    rehearsed = script(optimized.replace('    print("updated")', "    sgd.step()"))
    assert run("plan", "make", "--budget", "100%", "-o", path, rehearsed).code == 0
    done = run("run", "--plan", path, script(BY_HAND))
    assert (done.code, done.out.count("updated")) == (0, 100)
    assert "lowtide: measured" in done.err
    assert "within the budget" in done.err


def test_a_plan_whose_model_does_something_else_is_said_to(
    script: Callable[[str], str], run: Run, tmp_path: Path
) -> None:
    act = "class Act(nn.Module):\n    def forward(self, x):\n        return getattr(nn.functional, given.json)(x)\n"
    text = TRAIN.replace("nn.GELU(), nn.Dropout(0.1)", "Act()").replace("def block", f"{act}def block")
    plan, train = str(tmp_path / "plan.json"), script(text)
    assert run("plan", "make", "--cheap", "--budget", "83%", "-o", plan, train, "--json", "gelu").code == 0
    done = run("run", "--plan", plan, train, "--json", "elu")
    assert "UserWarning" not in done.err
    assert (
        "lowtide: this step saves different tensors than the rehearsed step (first at 0.2#0:0: EluBackward0" in done.err
    )


def test_no_plan_fits(script: Callable[[str], str], run: Run) -> None:
    done = run("run", "--budget", "1MB", script(TRAIN))
    assert done.code == 1
    assert "lowtide.Infeasible: no plan fits" in done.err
    assert done.err.endswith("\n  The script was ended after update 2.\n")
    assert done.out.count("0x") == 1  # the second update is where it is known


RETRYING = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
done = 0
while done < 10:
    try:
        loss = model(torch.randn(16, 32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done += 1
    except Exception as error:  # "a bad batch"
        print("again", error, flush=True)
print("the end")
"""


def test_a_loop_that_goes_on_after_every_exception_ends_with_the_error(script: Callable[[str], str], run: Run) -> None:
    done = run("run", "--budget", "1KiB", script(RETRYING))
    assert (done.code, done.out) == (1, "")
    assert "lowtide.Infeasible: no plan fits" in done.err


NEVER = """
import torch
model = torch.nn.Linear(64, 64)
"""
BY_HAND = (
    NEVER
    + """
for _ in range(100):
    model.zero_grad()
    model(torch.randn(8, 64)).sum().backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)
    print("updated")
"""
)
NO_UPDATE = NEVER + "model(torch.randn(8, 64)).sum().backward()"
DEEPER = TRAIN.replace(
    "model = nn.Sequential(*[block() for _ in range(4)", "model = Deeper(*[block() for _ in range(6)"
)
DEEPER = DEEPER.replace(
    "torch.manual_seed(0)\n",
    """
class Deeper(nn.Sequential):
    depth = 0
    def forward(self, x):
        self.depth = self.depth % 6 + 1
        for part in self[: self.depth]:
            x = part(x)
        return x
torch.manual_seed(0)
""",
)


WORDS = """
class Words(nn.Module):
    n_calls = 0
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(64, 64, batch_first=True)
    def forward(self, x):
        self.n_calls += 1
        longest = 3 + self.n_calls % 5
        lengths = torch.randint(2, longest + 1, (len(x) // 8,)).tolist()
        lengths[0] = longest
        packed = nn.utils.rnn.pack_padded_sequence(x.view(-1, 8, 64), lengths, batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=8)
        return x + out.reshape(x.shape)
torch.manual_seed(0)
"""
UNEVEN = TRAIN.replace("torch.manual_seed(0)\n", WORDS).replace("for _ in range(4)]", "for _ in range(4)], Words()")


@pytest.mark.slow
def test_modules_that_save_something_else_in_each_step_are_left_alone(
    script: Callable[[str], str], run: Run, run_python: RunPython, tmp_path: Path
) -> None:
    train, saved = (script(UNEVEN), "--steps", "14", "--width", "512"), str(tmp_path / "plan.json")
    plain = run_python(*train).stdout
    for within in (("--budget", "70%", "--save", saved), ("--plan", saved)):
        done = run("run", *within, *train)
        assert (done.code, done.out) == (0, plain), done.err
        assert "within the budget" in done.err
        assert "saves different tensors than the rehearsed step" not in done.err
        assert ("left alone, as it saves something else in each step: 4.rnn" in done.err) == ("--budget" in within)
    plan = Plan.from_json(saved)
    assert plan.excluded_modules == ("4.rnn",)
    assert plan.recompute
    assert not any(address.startswith("4.rnn") for address in plan.recompute)


NO_TWO_ALIKE = TRAIN.replace("x = torch.randn(", "x = torch.randn(*[1] * step, ").replace("default=5", "default=30")
TWO_OPTIMIZERS = """
class Both:
    def __init__(self):
        self.parts = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (model[:2], model[2:])]
    def zero_grad(self):
        for part in self.parts:
            part.zero_grad()
    def step(self):
        for part in self.parts:
            part.step()
optimizer = Both()
"""

EVAL = TRAIN.replace("for step in", "model.eval()\nfor step in")


@pytest.mark.default_cases(7)
@pytest.mark.parametrize("command", [("rehearse",), ("run", "--budget", "50%")], ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("text", "args", "says"),
    [
        (EVAL, (), "ended, and no model was trained: no module with trainable parameters was called in training mode"),
        (EVAL, (), "Call model.train() before"),
        (NO_UPDATE, (), "ended, and no optimizer stepped: Linear was called"),
        (TRAIN, ("--steps", "1"), "ended after 1 step, before Sequential was rehearsed"),
        (NO_TWO_ALIKE, (), "no two of 7 steps had batches of the same form"),
        (DEEPER, ("--steps", "30"), "of 8 steps, no two that were compared did the same work: it saved "),
    ],
    ids=["eval", "eval, what to do", "no update", "too short", "all forms differ", "all depths differ"],
)
def test_a_script_that_can_not_be_rehearsed_ends_with_the_reason(
    command: tuple[str, ...],
    text: str,
    args: tuple[str, ...],
    says: str,
    script: Callable[[str], str],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for user in ("script.rehearse_steps", "profiler.online"):  # who imports it from the other first
        monkeypatch.setattr(f"lowtide.{user}.PATIENCE", 7)
    done = run(*command, script(text), *args)
    assert done.code == 2
    assert "lowtide.RehearsalError: " in done.err
    assert says in done.err


@pytest.mark.slow
@pytest.mark.parametrize(("text", "args"), [(TRAIN, ("--help",)), (NEVER, ()), (NEVER + "raise SystemExit(0)", ())])
def test_a_script_that_trains_nothing_prints_its_lines_and_ends_with_code_2(
    text: str, args: tuple[str, ...], script: Callable[[str], str], run: Run, run_python: RunPython, tmp_path: Path
) -> None:
    train, plan = script(TRAIN), str(tmp_path / "plan.json")
    assert run("plan", "make", "--budget", "90%", "-o", plan, train).code == 0
    script(text)
    for command in (("run", "--budget", "90%"), ("run", "--plan", plan), ("rehearse",)):
        done = run(*command, train, *args)
        assert (done.code, done.out) == (2, run_python(train, *args).stdout)
        assert f"{train} ended, and no model was trained: no module with " in done.err
        assert "Call model.train() before the training loop" in done.err


IN_BACKWARD = (
    TRAIN.replace(
        "optimizer = torch.optim.AdamW(model.parameters())\n",
        """
optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}
def update(p):
    optimizers[p].step()
    optimizers[p].zero_grad()
for p in optimizers:
    p.register_post_accumulate_grad_hook(update)
""",
    )
    .replace("    optimizer.zero_grad()\n", "")
    .replace("    optimizer.step()\n", "")
)


@pytest.mark.slow
@pytest.mark.parametrize("n_steps", ["3", "5"])
def test_a_script_whose_optimizers_step_inside_of_backward_trains_to_the_same_bits(
    n_steps: str, script: Callable[[str], str], run: Run, run_python: RunPython, tmp_path: Path
) -> None:
    train, saved, steps = script(IN_BACKWARD), str(tmp_path / "plan.json"), ("--steps", n_steps)
    plain = run_python(train, *steps).stdout
    for within in (("--budget", "80%", "--save", saved), ("--plan", saved)):
        done = run("run", *within, train, *steps)
        assert (done.code, done.out) == (0, plain)
        assert done.err.count("within the budget") == 1
        gc.freeze()  # hooks of torch's in C++ keep a script's variables, and each script has a process of its own


def test_a_step_without_an_optimizer_of_torch_ends_at_the_next_call(
    script: Callable[[str], str], run: Run, run_plain: RunPlain
) -> None:
    seeded = BY_HAND.replace("model = ", "torch.manual_seed(0)\nmodel = ", 1)
    train = script(seeded.replace("100", "5") + "    print([p.sum().item().hex() for p in model.parameters()])\n")
    done = run("run", "--budget", "100%", train)
    assert (done.code, done.out) == (0, run_plain(train))
    assert "rehearsed Linear in 2 steps" in done.err
    assert done.err.count("within the budget") == 1
    assert run("rehearse", script(BY_HAND)).code == 0
    done = run("run", "--budget", "50%", script(BY_HAND.replace("100", "1")))
    assert done.code == 2
    assert "ended after 1 step, before Linear was rehearsed" in done.err


def test_parameters_that_change_without_their_optimizer_are_refused_early(
    script: Callable[[str], str], run: Run
) -> None:
    held = BY_HAND.replace("for _ in range", "sgd = torch.optim.SGD(model.parameters())\nfor _ in range")
    done = run("run", "--budget", "50%", script(held))
    assert done.code == 2
    assert "the parameters of Linear changed 6 times, and their torch.optim.Optimizer did not step" in done.err
    assert done.out.count("updated") == 6


@pytest.mark.slow
def test_many_calls_before_the_first_update_are_no_updates(script: Callable[[str], str], run: Run) -> None:
    accumulates = TRAIN.replace("    optimizer.step()", "    if step % 10 < 9: continue\n    optimizer.step()")
    assert accumulates != TRAIN
    done = run("run", "--budget", "90%", script(accumulates), "--steps", "40")
    assert done.code == 0
    assert "within the budget" in done.err


@pytest.mark.slow
def test_of_batches_of_many_sizes_the_largest_is_planned_for(
    script: Callable[[str], str], run_python: RunPython
) -> None:
    train, rows = script(TRAIN), ("--steps", "9", "--rows", "200", "256", "224", "200", "256")
    done = run_python("-m", "lowtide", "run", "--budget", "90%", train, *rows)
    assert (done.returncode, done.stdout) == (0, run_python(train, *rows).stdout)
    assert done.stderr.count("batches are of several sizes: up to 20 steps are rehearsed") == 1
    assert done.stderr.count("within the budget") == 1
    assert "was given" not in done.stderr


@pytest.mark.slow
def test_where_no_two_batches_are_of_one_size_the_largest_is_planned_for(
    script: Callable[[str], str], run_python: RunPython, tmp_path: Path
) -> None:
    saved = str(tmp_path / "plan.json")
    sizes = [7 * n % 64 for n in range(48)]  # each is there once
    train, rows = script(TRAIN), ("--steps", "48", "--rows", *(str(200 + size) for size in sizes))
    done = run_python("-m", "lowtide", "run", "--budget", "60%", "--save", saved, train, *rows)
    assert (done.returncode, done.stdout) == (0, run_python(train, *rows).stdout)
    made = Plan.from_json(saved)
    assert made.fingerprint.batch == f"[{200 + max(sizes[1:20])}, 64] float32"
    assert "in 20 steps under the plan no batch had the size that the plan is for: the largest measured" in done.stderr


def test_a_plan_that_had_smaller_batches_only_is_saved_and_that_is_said(
    script: Callable[[str], str], run: Run, tmp_path: Path
) -> None:
    saved = str(tmp_path / "plan.json")
    rows = ("256", "256", *["128"] * 24)
    done = run("run", "--budget", "90%", "--save", saved, script(TRAIN), "--steps", "24", "--rows", *rows)
    assert done.code == 0
    assert "in 20 steps under the plan no batch had the size that the plan is for: the largest measured" in done.err
    assert "within the budget" not in done.err
    assert Plan.from_json(saved).recompute


BLOCK_OF_ITS_OWN = """
import torch
class Block(torch.nn.Sequential):
    def forward(self, x):
        for part in self: x = part(x)
        return x
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Block", "nn.Sequential"])
@pytest.mark.parametrize(
    "how", ["model[i].compile(", "model[i] = torch.compile(model[i], "], ids=["in place", "wrapped"]
)
def test_a_script_that_compiles_its_blocks_trains_to_the_same_bits(
    kind: str, how: str, script: Callable[[str], str], run: Run, run_python: RunPython
) -> None:
    compiled = f"for i in range(4): {how}backend='aot_eager')\noptimizer = "
    own = TRAIN.replace("optimizer = ", compiled, 1).replace("return nn.Sequential(", f"return {kind}(")
    train = script(BLOCK_OF_ITS_OWN + own)
    done = run("run", "--budget", "75%", train)
    assert (done.code, done.out) == (0, run_python(train).stdout)
    uncompiled = kind == "nn.Sequential" and how == "model[i].compile("  # of those torch compiles users' parts only
    assert ("recomputed " if uncompiled else "replayed {") in done.err
    assert "within the budget" in done.err


@pytest.mark.slow
def test_a_script_that_compiles_its_model_trains_to_the_same_bits(
    script: Callable[[str], str], run: Run, run_python: RunPython
) -> None:
    train = script(TRAIN.replace("optimizer = ", "model = torch.compile(model)\noptimizer = ", 1))
    done = run("run", "--budget", "85%", train, "--steps", "7", "--rows", "1024")
    assert (done.code, done.out) == (0, run_python(train, "--steps", "7", "--rows", "1024").stdout)
    assert "recomputed " in done.err
    assert "within the budget" in done.err


def test_a_script_that_ends_early_is_rehearsed_on_what_came_twice(script: Callable[[str], str], run: Run) -> None:
    done = run("rehearse", script(TRAIN), "--steps", "4", "--rows", "256", "200", "200", "100")
    assert done.code == 0
    assert "[200, 64] float32" in done.out
    assert "plain step: " in done.out


@pytest.mark.parametrize("n_steps", [3, pytest.param(21, marks=pytest.mark.slow)])
def test_growing_batches_need_as_many_steps_as_are_said(n_steps: int, script: Callable[[str], str], run: Run) -> None:
    """Two optimizers update the model, and a step of both counts once."""
    train = script(TRAIN.replace("optimizer = torch.optim.AdamW(model.parameters())", TWO_OPTIMIZERS))
    rows = map(str, range(8, 8 + 2 * n_steps, 2))
    done = run("run", "--budget", "95%", train, "--steps", str(n_steps), "--rows", *rows)
    assert done.code == (2 if n_steps < 21 else 0)
    if n_steps < 21:
        said = "ended after 3 steps, before Sequential was rehearsed: that takes two steps, and up to 20 where batches"
        assert said in done.err
        assert "Train that model for 21 steps." in done.err


def test_a_plan_without_a_step_under_it_is_said(script: Callable[[str], str], run: Run) -> None:
    done = run("run", "--budget", "90%", script(TRAIN), "--steps", "2")
    assert done.code == 2
    assert "in force from the next step on" in done.err
    assert "ended after 2 steps, before Sequential took a step under its plan" in done.err
    assert "was rehearsed" not in done.err


def test_models_trained_one_after_another_get_plans_until_several_took_few_steps(
    script: Callable[[str], str], run: Run, run_plain: RunPlain
) -> None:
    head, loop = TRAIN.split("model = nn")
    loop = "".join(f"    {line}\n" for line in ("model = nn" + loop).splitlines())
    train = script(f"{head}for fold in range({MOST_SHORT + 2}):\n{loop}")
    done = run("run", "--budget", "90%", train)
    assert (done.code, done.out) == (0, run_plain(train))
    assert done.err.count("within the budget") == MOST_SHORT + 1
    assert done.err.count(NEXT_REHEARSED) == MOST_SHORT
    assert done.err.count("another model is trained now, without a plan") == 1


GAN = """
import hashlib, sys, torch
from torch import nn

n_critic, late = map(int, sys.argv[1:3])
torch.manual_seed(0)
maker = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Linear(256, 64))
critic = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64), nn.GELU(), nn.Linear(64, 1))
of_maker, of_critic = (torch.optim.Adam(m.parameters()) for m in (maker, critic))
for step in range(6 * n_critic + 6):
    of_critic.zero_grad()
    with torch.no_grad():
        made = maker(torch.randn(256, 64))
    (critic(made) - critic(torch.rand(256, 64))).mean().backward()
    of_critic.step()
    if step % n_critic == (n_critic - 1) * late:
        of_maker.zero_grad()
        (-critic(maker(torch.randn(256, 64))).mean()).backward()
        of_maker.step()
bits = hashlib.sha256()
for parameter in (*maker.parameters(), *critic.parameters()):
    bits.update(parameter.detach().numpy().tobytes())
print(bits.hexdigest())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("n_critic", "late"), [(1, 0), (2, 1), (5, 0), (5, 1)])
def test_a_script_whose_models_take_turns_has_one_plan_for_both(
    n_critic: int, late: int, script: Callable[[str], str], run: Run, run_plain: RunPlain, tmp_path: Path
) -> None:
    saved, given = str(tmp_path / "plan.json"), (script(GAN), str(n_critic), str(late))
    plain = run_plain(*given)
    for within in (("--budget", "90%", "--save", saved), ("--plan", saved)):
        done = run("run", *within, *given)
        assert (done.code, done.out) == (0, plain)
        assert "another model is trained now, without a plan" not in done.err
        assert "is removed: from here on" not in done.err
        said = [line for line in done.err.splitlines() if "a step under the plan takes" not in line]
        assert "within the budget" in said[-2 if "--save" in within else -1]
    plan = Plan.from_json(saved)
    widths = [(64, 256), (256, 64), (64, 512), (512, 64), (64, 1)]
    assert plan.predicted.parts["parameters"] == 4 * (sum((n + 1) * m for n, m in widths) + 2 * 256)


@pytest.mark.slow
@pytest.mark.parametrize("n_tried", [1, 2, 3])
def test_a_script_that_tries_a_copy_of_its_model_first(
    n_tried: int, script: Callable[[str], str], run: Run, run_plain: RunPlain, tmp_path: Path
) -> None:
    saved = str(tmp_path / "plan.json")
    head, loop = TRAIN.split("optimizer = ")
    loop, tail = ("optimizer = " + loop).split("bits =")
    loop = "".join(f"    {line}\n" for line in loop.splitlines()).replace("given.steps", "n_steps")
    tries = f"{head}import copy\ndef train(model, n_steps):\n{loop}train(copy.deepcopy(model), {n_tried})\n"
    train = script(f"{tries}train(model, 7)\nbits ={tail}")
    within = [("--budget", "90%", "--save", saved), ("--plan", saved)]
    for n, options in enumerate(within[: 1 if n_tried == 2 else 2]):  # that plan does not count what is beside the copy
        done = run("run", *options, train)
        assert (done.code, done.out) == (0, run_plain(train))
        is_followed = n_tried == 3  # a plan for the copy, and from a budget also one for the model
        assert done.err.count("within the budget") == (2 if is_followed and n == 0 else 1)
        assert (NEXT_REHEARSED in done.err) == (is_followed and n == 0)
        assert ("another model is trained now, without a plan" in done.err) == (is_followed and n == 1)
        removed = "the plan for that Sequential is removed: from here on the script trains another model" in done.err
        assert removed == (n_tried == 2 and n == 0)


def test_another_optimizer_with_more_state_is_said_once(script: Callable[[str], str], run: Run, tmp_path: Path) -> None:
    once = "    if step in (4, 6):\n        optimizer = torch.optim.Adam(model.parameters())\n    x = torch"
    saved, text = str(tmp_path / "plan.json"), TRAIN.replace("AdamW(model.parameters())", "SGD(model.parameters())")
    train, n_bytes = script(text.replace("    x = torch", once)), 2 * 4 * 4 * (2 * 64 * 128 + 64 + 128) + 4 * 16
    for within in (("--budget", "90%", "--save", saved), ("--plan", saved)):
        done = run("run", *within, train, "--steps", "8")
        assert done.code == 0, done.err
        is_new = "--budget" in within  # the saved plan is the second one, which counts the state
        assert ("more is in memory when a step begins" in done.err) == is_new
        assert "calls of the model" not in done.err
        assert done.err.count("Adam updates Sequential, whose optimizers have") == is_new
        assert (f"have {format_bytes(n_bytes)} more state than is in the plan" in done.err) == is_new


GROWN = (
    "Sequential was given [300, 64] float32, and the plan is for [256, 64] float32: the peak may be above the budget"
)


@pytest.mark.slow
def test_batches_that_are_larger_than_the_planned_one_are_said_once(
    script: Callable[[str], str], run: Run, run_plain: RunPlain, tmp_path: Path
) -> None:
    train, saved = script(TRAIN), str(tmp_path / "plan.json")
    rows = ("--steps", "8", "--rows", "256", "256", "256", "200", "300", "400")
    plain = run_plain(train, *rows)
    done = run("run", "--budget", "90%", "--save", saved, train, *rows)
    assert (done.code, done.out) == (0, plain)
    assert done.err.count("was given") == done.err.count(GROWN) == 1
    assert "The next one is rehearsed" in done.err
    done = run("run", "--plan", saved, train, *rows)  # the plan that was made last, for the largest batches
    assert (done.code, done.out) == (0, plain)
    assert "was given" not in done.err
    done = run("run", "--plan", saved, train, *rows, "900")
    assert done.code == 0
    assert done.err.count("was given [900, 64] float32, and the plan is for [400, 64] float32") == 1


def test_parameters_that_are_unfrozen_under_a_plan_are_said(script: Callable[[str], str], run: Run) -> None:
    unfrozen = "    model[0].requires_grad_(step > 3)\n    x = torch"
    done = run("run", "--budget", "95%", script(TRAIN.replace("    x = torch", unfrozen)), "--steps", "6")
    assert done.code == 0
    assert done.err.count("Sequential has 16 parameters that are trained, and the plan is for 12") == 1


def test_a_loop_in_a_thread_of_its_own_is_watched(script: Callable[[str], str], run: Run, plain: str) -> None:
    head, loop = TRAIN.split("for step in")
    loop, tail = loop.split("bits =")
    loop = "".join(f"    {line}\n" for line in f"for step in{loop}".splitlines())
    thread = "import threading\nthread = threading.Thread(target=train)\nthread.start()\nthread.join()"
    done = run("run", "--budget", "90%", script(f"{head}def train():\n{loop}\n{thread}\nbits ={tail}"))
    assert (done.code, done.out) == (0, plain)
    assert done.err.count("within the budget") == 1


FAILS = TRAIN.replace("    print(step", "    if step == 0:\n        raise KeyError('mine')\n    print(step")


FAILS_INSIDE = """
import torch
class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x**3
    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("in backward")
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
    def forward(self, x):
        return Cube.apply(torch.relu(self.first(x)))
model = Net()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(4):
    try:
        model(torch.randn(256, 64)).mean().backward()
    except ValueError as error:
        raise RuntimeError("the step failed") from error
    optimizer.step()
"""


def test_an_error_inside_of_a_step_is_shown_without_frames_of_ours(
    script: Callable[[str], str], run: Run, run_python: RunPython
) -> None:
    train = script(FAILS_INSIDE)
    alone = run_python(train).stderr
    assert alone.count("Traceback") == 2
    for command in (("run", "--budget", "90%"), ("watch",), ("rehearse",), ("estimate",)):
        done = run(*command, train)
        assert alone in done.err, command
        assert "LT0" not in done.err  # nor is what the error leaves a finding


REENTRANT = """
import torch
from torch.utils.checkpoint import checkpoint
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    checkpoint(model, torch.randn(8, 64, requires_grad=True), use_reentrant=True).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("command", [("rehearse",), ("run", "--budget", "60%"), ("estimate", "--device", "T4")])
def test_a_model_inside_of_a_reentrant_checkpoint_is_said(
    command: tuple[str, ...], script: Callable[[str], str], run: Run
) -> None:
    done = run(*command, script(REENTRANT))
    assert done.code == 2
    assert "inside a reentrant checkpoint" in done.err
    assert "use_reentrant=False" in done.err


@pytest.mark.slow
def test_a_scripts_own_error_is_shown_as_python_shows_it(
    script: Callable[[str], str], run: Run, run_python: RunPython
) -> None:
    train = script(FAILS)
    alone = run_python(train)
    assert alone.returncode == 1
    assert run("run", "--budget", "90%", train) == (1, alone.stdout, alone.stderr)
    said = f"{alone.stderr}lowtide: {train} ended with exit code 1, before a step of it was rehearsed.\n"
    assert run("rehearse", train) == (2, alone.stdout, said)
    for command in (("rehearse", "--json", "-"), ("frontier",), ("plan", "make", "--budget", "90%")):
        done = run(*command, train)
        assert (done.code, done.err[-len(said) :]) == (2, said)  # 1 would be a finding


def test_a_script_that_is_no_python_is_shown_as_python_shows_it(
    script: Callable[[str], str], run: Run, run_python: RunPython
) -> None:
    train = script("import torch\ndef broken(:\n    pass\n")
    alone = run_python(train)
    assert "SyntaxError" in alone.stderr
    assert run("run", "--budget", "90%", train) == (1, "", alone.stderr)
    done = run("rehearse", train)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(alone.stderr)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("command", [("rehearse",), ("run", "--budget", "50%")], ids=lambda command: command[0])
def test_a_script_that_is_interrupted_says_where(
    command: tuple[str, ...], script: Callable[[str], str], run: Run, run_python: RunPython
) -> None:
    updated = '    print("updated")\n'
    train = script(BY_HAND.replace(updated, f"{updated}    raise KeyboardInterrupt\n"))
    alone = run_python(train)
    assert "line 11, in <module>\n    raise KeyboardInterrupt" in alone.stderr
    assert run(*command, train) == (130, alone.stdout, alone.stderr)


@pytest.mark.parametrize("own", ["", "parser.add_argument('--device')"], ids=["ours", "the script's"])
def test_an_option_of_ours_behind_the_script_is_the_script_s_and_said(
    own: str, script: Callable[[str], str], run: Run
) -> None:
    done = run("estimate", "--device", "T4", script(f"raise SystemExit(3)  # {own}\n"), "--device", "L4")
    assert done.code == 2
    assert ("--device comes after" in done.err) is not bool(own)


DROPS = """
import signal, time
class Saved:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
Saved()
began = time.monotonic()
try:
    time.sleep(20)
finally:
    print("slept on" if time.monotonic() - began > 19 else "awake")
"""


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Interrupts as ever, also where the tests run in the background, for which shells have them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("busy", [False, True])
def test_an_interrupt_that_python_drops_comes_again(
    busy: bool, script: Callable[[str], str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def slow(thread: threading.Thread) -> None:  # as where other processes are to run meanwhile
        start(thread)
        time.sleep(0.3)

    if busy:
        monkeypatch.setattr(threading.Thread, "start", slow)
    done = run("rehearse", script(DROPS))
    assert (done.code, done.out) == (130, "awake\n")
    assert "line 9, in <module>\n" in done.err
    assert "ignored" not in done.err


@pytest.mark.parametrize(
    ("ending", "code", "says"), [("3", 3, ""), ("0", 2, "no model was trained"), ("'words'", 1, "words\n")]
)
def test_a_script_that_exits_gives_its_code_to_a_run_and_fails_a_rehearsal(
    ending: str, code: int, says: str, script: Callable[[str], str], run: Run
) -> None:
    train = script(f"raise SystemExit({ending})")
    for command, expected in ((("rehearse",), 2), (("run", "--budget", "90%"), code)):
        done = run(*command, train)
        assert done.code == expected
        assert says in done.err


def test_a_script_that_catches_everything_ends_all_the_same(script: Callable[[str], str], run: Run) -> None:
    step = "    optimizer.step()"
    caught = TRAIN.replace(step, f"    try:\n    {step}\n    except BaseException:\n        pass")
    done = run("rehearse", script(caught), "--steps", "50")
    assert done.code == 0
    assert done.out.count("0x") == 2
    assert "plain step: " in done.out


def test_a_script_runs_as_the_main_program(script: Callable[[str], str], run: Run, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("x = 7", encoding="utf-8")
    argv, path = sys.argv[:], sys.path[:]
    train = script("import beside, sys; print(__name__, sys.argv, beside.x)")
    done = run("rehearse", train, "-x", "--budget", "3")
    assert done.out == f"__main__ {[train, '-x', '--budget', '3']} 7\n"
    assert (sys.argv, sys.path) == (argv, path)


def test_a_script_has_the_file_and_name_that_python_gives_it(
    script: Callable[[str], str], run: Run, run_python: RunPython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script("import sys; print(__file__, sys.argv, (lambda: 0).__code__.co_filename, sys.path[0])")
    monkeypatch.chdir(tmp_path)
    assert run("rehearse", "train.py", "-x").out == run_python("train.py", "-x").stdout


def test_a_script_behind_a_link_finds_what_is_beside_its_file(
    script: Callable[[str], str], run: Run, run_python: RunPython, tmp_path: Path
) -> None:
    real = script("import beside, sys; print(__file__, sys.argv, sys.path[0], beside.x)")
    (tmp_path / "beside.py").write_text("x = 7", encoding="utf-8")
    (tmp_path / "links").mkdir()
    (tmp_path / "same").symlink_to(tmp_path, target_is_directory=True)
    link = tmp_path / "links" / "linked.py"
    link.symlink_to(real)
    for path in (str(link), str(tmp_path / "same" / "train.py")):
        assert run("rehearse", path).out == run_python(path).stdout != ""


SAVES_AT_EXIT = "import atexit, io" + TRAIN.replace("model = nn.Sequential(", "model = Net(").replace(
    "torch.manual_seed(0)\n",
    """
class Net(nn.Sequential):
    pass
def save():
    torch.save(model, io.BytesIO())
    print("saved")
atexit.register(save)
torch.manual_seed(0)
""",
    1,
)


@pytest.mark.slow
def test_a_script_is_the_main_program_until_its_last_handler_has_run(
    script: Callable[[str], str], run_python: RunPython
) -> None:
    done = run_python("-m", "lowtide", "run", "--budget", "90%", script(SAVES_AT_EXIT))
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert done.stdout.endswith("saved\n")


@pytest.mark.slow
def test_a_script_that_is_ended_early_saves_no_model_at_exit(
    script: Callable[[str], str], run_python: RunPython
) -> None:
    done = run_python("-m", "lowtide", "rehearse", script(SAVES_AT_EXIT))
    assert done.returncode == 0
    assert "\nsaved\n" not in done.stdout


def test_a_script_that_changes_its_folder(
    script: Callable[[str], str], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(TRAIN.replace("given =", "import os; os.mkdir('run'); os.chdir('run')\ngiven ="))
    monkeypatch.chdir(tmp_path)
    done = run("run", "--budget", "90%", "--save", "plan.json", "train.py")
    assert done.code == 0
    assert Path.cwd() == tmp_path
    assert Plan.from_json(tmp_path / "plan.json").budget_bytes


@pytest.mark.parametrize("budget", ["90%", "1MB"])
def test_messages_beside_a_progress_bar_begin_a_line(budget: str, script: Callable[[str], str], run: Run) -> None:
    bar = "import tqdm\nbar = tqdm.tqdm(range(given.steps), mininterval=0)\nfor step in bar:"
    done = run("run", "--budget", budget, script(TRAIN.replace("for step in range(given.steps):", bar)))
    assert "0%|" in done.err
    said = [match.start() for match in re.finditer("lowtide[:.]", done.err)]
    assert said
    assert all(done.err[at - 1] in "\r\n" for at in said)


def test_the_plan_goes_to_stdout_on_request(script: Callable[[str], str], run: Run) -> None:
    done = run("run", "--budget", "90%", "--save", "-", script(TRAIN))
    assert Plan.from_json(done.out[done.out.index("{\n") : done.out.rindex("}") + 1]).budget_bytes


def test_a_run_that_ends_before_the_planned_size_comes_again(
    script: Callable[[str], str], run: Run, tmp_path: Path
) -> None:
    saved = tmp_path / "plan.json"
    rows = ("256", "256", "128", "128", "128")
    done = run("run", "--budget", "90%", "--save", str(saved), script(TRAIN), "--rows", *rows)
    assert done.code == 0
    assert "in 3 steps under the plan no batch had the size that the plan is for: the largest measured" in done.err
    assert Plan.from_json(saved).budget_bytes


HIDDEN_STATE = """
import sys, torch
from torch import nn

class State:
    scale = 1.0

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x.sigmoid())
        return x * x.sigmoid()
    @staticmethod
    def backward(ctx, outer):
        x, gate = ctx.saved_tensors
        return outer * (gate + x * gate * (1 - gate))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(32, 128), nn.Linear(128, 32)
    def forward(self, x):
        return x + self.narrow(Twice.apply(Twice.apply(self.wide(x) * state.scale)))

class Net(nn.Sequential):
    def forward(self, x):
        for number, block in enumerate(self):
            state.scale = 1 + number * (step >= int(sys.argv[1]))
            x = block(x)
        return x.square().mean()

state, model = State(), Net(*(Block() for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    model(torch.randn(512, 32)).backward()
    optimizer.step()
    optimizer.zero_grad()
    print("updated", step, flush=True)
"""


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_script_whose_blocks_read_changed_state_ends_before_a_wrong_update(
    first: int, script: Callable[[str], str], run: Run
) -> None:
    """In each of its first three steps: the audit, the trace, and the first one under the plan."""
    done = run("run", "--budget", "60%", script(HIDDEN_STATE), str(first))
    assert done.code == 2
    assert done.out == "".join(f"updated {step}\n" for step in range(first))
    assert "(Block) gives other bits in backward than in forward" in done.err


OWN_DRAWS = """
import random, sys, numpy as np, torch
from torch import nn

class Env:
    pass

class Mean:
    def __init__(self):
        self.mean, self.n = torch.zeros(()), 0

    def __call__(self, x):
        self.n += 1
        self.mean = self.mean + (x.detach().mean() - self.mean) / self.n
        return self.mean.item()

class Slots:
    __slots__ = ("rng",)

rng, env, slots, mean, count = np.random.default_rng(3), Env(), Slots(), Mean(), 0
env.rng = np.random.RandomState(3)
slots.rng = random.Random(3)
drawn = iter(np.random.default_rng(3).normal(size=999).tolist())
bound = random.Random(3).random
sobol = torch.quasirandom.SobolEngine(1, scramble=True, seed=3)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)
        self.numpy, self.python, self.env = np.random.default_rng(3), random.Random(3), env
        self.torch = torch.Generator().manual_seed(3)
        if sys.argv[1] == "iterator":
            self.draws = iter(np.random.default_rng(3).normal(size=999).tolist())

    def draw(self, x):
        global count
        kind = sys.argv[1]
        if kind == "count":
            count += 1
            return 1 / count
        others = {"mean": lambda: mean(x), "slots": lambda: slots.rng.gauss(0, 1), "drawn": lambda: next(drawn),
                  "bound": lambda: bound(), "sobol": lambda: sobol.draw().item()}
        if kind in others:
            return others[kind]()
        if kind == "iterator":
            return next(self.draws)
        if kind == "torch":
            return float(torch.randn((), generator=self.torch))
        if kind == "python":
            return self.python.gauss(0, 1)
        return float({"numpy": self.numpy, "global": rng, "env": self.env.rng if self.env else None}[kind].normal())

    def forward(self, x):
        return x + self.narrow(torch.tanh(self.wide(x) * (1 + 0.1 * self.draw(x)))).square() * self.draw(x)

torch.manual_seed(0)
model = nn.Sequential(*[Block() for _ in range(4)], nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(5):
    loss = model(torch.randn(256, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), model[0].numpy.bit_generator.state["state"], rng.bit_generator.state["state"])
"""


OTHERS = ["count", "mean", "slots", "drawn", "bound", "sobol"]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("kind", ["torch", "global", "env", "iterator", *OTHERS])
def test_a_script_whose_blocks_draw_from_generators_of_their_own(
    kind: str, script: Callable[[str], str], run: Run, run_plain: RunPlain
) -> None:
    plain = run_plain(script(OWN_DRAWS), kind)
    done = run("run", "--budget", "85%", script(OWN_DRAWS), kind)
    assert (done.code, done.out) == (0, plain)
    assert "within the budget" in done.err


TEACHER = """
import torch
from torch import nn

class Distillation:
    def __init__(self):
        self.teacher = nn.Linear(64, 64 * 512).eval().requires_grad_(False)
        self.model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, x):
        (self.model(x) - x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

def main():
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(64, 64 * 256))
    distillation = Distillation()
    for step in range(6):
        distillation.step(torch.randn(256, 64))

torch.manual_seed(0)
main()
"""


def test_models_beside_the_trained_one_count(script: Callable[[str], str], run: Run, tmp_path: Path) -> None:
    saved = tmp_path / "profile.json"
    assert run("rehearse", "--json", str(saved), script(TEACHER)).code == 0
    static = Profile.from_json(saved).static
    assert static.parameters == 4 * ((64 + 1) * 256 + (256 + 1) * 64)
    assert static.others == 4 * (65 * 64 * 512 + 65 * 64 * 256) + 8  # the average counts its updates


PROMPT = """
import torch
from torch import nn

torch.manual_seed(0)
def block():
    return nn.Sequential(nn.Linear(64, 256), nn.Softplus(), nn.Tanh(), nn.Linear(256, 64))
model = nn.Sequential(*[block() for _ in range(4)])
model.requires_grad_(False).MODE()
prompt = nn.Parameter(torch.randn(16, 64))
optimizer = torch.optim.AdamW([prompt], lr=1e-2)
for step in range(6):
    x = torch.randn(512, 64)
    with torch.no_grad():
        model(x)
    loss = (model(torch.cat([prompt.repeat(8, 1), x])) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
print(prompt.sum().item().hex())
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_prompt_of_no_module_is_trained_through_a_frozen_model(
    mode: str, script: Callable[[str], str], run: Run, run_python: RunPython, tmp_path: Path
) -> None:
    text, saved = script(PROMPT.replace("MODE", mode)), str(tmp_path / "plan.json")
    alone = run_python(text).stdout
    done = run("run", "--budget", "70%", "--save", saved, text)
    assert (done.code, done.out) == (0, alone), done.err
    assert done.err.count("within the budget") == 1
    plan = Plan.from_json(saved)
    assert plan.recompute or plan.replay
    again = run("run", "--plan", saved, text)
    assert (again.code, again.out) == (0, alone), again.err
    assert again.err.count("within the budget") == 1
    gpu = run("estimate", "--device", "T4", text)
    assert gpu.code == 0, gpu.err
    assert "it fits" in gpu.out


LAZY = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.LazyLinear(256), nn.GELU(), nn.LazyLinear(32))
model(torch.randn(2, 32))  # as is usual, to make the parameters
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    x = torch.randn(512, 32)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
"""


@pytest.mark.slow
def test_a_script_with_lazy_modules(script: Callable[[str], str], run: Run, run_plain: RunPlain) -> None:
    plain = run_plain(script(LAZY))
    done = run("run", "--budget", "90%", script(LAZY))
    assert (done.code, done.out) == (0, plain)
    assert "within the budget" in done.err


TRANSFORMED = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))
weights = dict(model.named_parameters())

def loss_of(weights, row):
    return torch.func.functional_call(model, weights, (row,)).square().mean()

x = torch.randn(512, 32)
norms = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(weights, x)  # of each row's gradients, before
print({name: float(each.detach().norm()) for name, each in norms.items()})
del norms
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
"""


@pytest.mark.slow
def test_a_script_that_transforms_functions_before_it_trains(
    script: Callable[[str], str], run: Run, run_python: RunPython
) -> None:
    plain = run_python(script(TRANSFORMED)).stdout
    done = run("run", "--budget", "90%", script(TRANSFORMED))
    assert (done.code, done.out) == (0, plain)
    assert "within the budget" in done.err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_a_script_that_traces_its_model_before_and_while_it_trains(
    script: Callable[[str], str], run: Run, run_python: RunPython, tmp_path: Path
) -> None:
    text = TRAIN.replace("nn.Dropout(0.1)", "nn.Tanh()")  # whose trace would be compared with another draw
    once = "torch.jit.trace(model, torch.randn(8, 64))"
    text = f"import torch, warnings\nwarnings.simplefilter('error', torch.jit.TracerWarning)\n{text}"
    train, saved = script(re.sub("for step in .*\n", f"{once}\n\\g<0>    {once}\n", text)), str(tmp_path / "plan.json")
    plain = run_python(train).stdout
    for within in (("--budget", "80%", "--save", saved), ("--plan", saved)):
        done = run("run", *within, train)
        assert (done.code, done.out) == (0, plain)
        assert done.err.count("within the budget") == 1


def test_a_module_is_run_by_its_name(
    script: Callable[[str], str], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(TRAIN)
    monkeypatch.chdir(tmp_path)
    done = run("rehearse", "-m", "train", "--steps", "3")
    assert done.code == 0
    assert "plain step: " in done.out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("run", "train.py", "--budget", "8GiB"), "before the script"),
        (("run", "--budget", "8", "train.py"), "it has no unit"),
        (("run", "--budget", "8GiB", "none.py"), "none.py is not a file"),
        (("run", "--budget", "8GiB", "-m", "no_such.module"), "there is no module no_such.module to run"),
        (("run", "--budget", "8GiB", "--plan", __file__, "train.py"), "either --budget or --plan"),
        (("run", "--plan", __file__, "--save", "x.json", "train.py"), "--save needs --budget"),
        (("run", "--plan", __file__, __file__), "not a Plan of format 3"),
        (("rehearse", "--json", "no/such/folder/x.json", "train.py"), "is not a folder to write to"),
        (("plan", "make", "train.py"), "Missing option '--budget'"),
        (("plan", "make", "--budget", "8GiB", "none.json"), "no Profile could be read"),
        (("plan", "make", "--budget", "8GiB", "none.json", "x"), "it takes no arguments, found x"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_runs(args: tuple[str, ...], says: str, run: Run) -> None:
    done = run(*args)
    assert done.code == 2
    assert says in done.err


def test_the_command_advised_for_a_wrong_plan_file_makes_one(
    script: Callable[[str], str], run: Run, tmp_path: Path
) -> None:
    words = {"FILE": str(tmp_path / "plan.json"), "AMOUNT": "90%", "SCRIPT": script(TRAIN)}
    advice = re.search("`lowtide (.*)`", run("run", "--plan", __file__, words["SCRIPT"]).err)
    assert advice is not None
    assert run(*(words.get(word, word) for word in advice[1].split())).code == 0
    assert run("plan", "show", words["FILE"]).code == 0


def test_a_cheap_plan_redoes_no_matrix_product(script: Callable[[str], str], run: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert run("plan", "make", "--budget", "92%", "--cheap", "-o", str(plan), script(TRAIN)).code == 0
    assert Plan.from_json(plan).recompute
    assert Plan.from_json(plan).predicted.extra_flops == 0


TOO_LARGE = """
import resource, torch
from torch import nn

torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 64)
    def forward(self, x):
        return x + self.down(self.act(self.up(x)))
model = nn.Sequential(*[Block() for _ in range(8)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.ones(64, 64, requires_grad=True).tanh().sum().backward()  # the backward threads and their stacks are there now
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + 220 * 2**20, -1))
for step in range(3):
    x = torch.randn(4096, 64)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits its own address space")
def test_a_script_that_runs_out_of_memory_runs_within_a_budget(
    script: Callable[[str], str], run_python: RunPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is freed goes back to the system, so that the limit is one on what is in use.
    for name, value in (("MMAP_THRESHOLD_", "65536"), ("TRIM_THRESHOLD_", "65536"), ("ARENA_MAX", "1")):
        monkeypatch.setenv(f"MALLOC_{name}", value)
    train = script(TOO_LARGE)
    alone = run_python(train)
    assert (alone.returncode, alone.stdout) == (1, "")
    within = run_python("-m", "lowtide", "run", "--budget", "150MiB", train)
    assert within.returncode == 0, within.stderr
    assert within.stdout == "step 0\nstep 1\nstep 2\n"
    assert "within the budget" in within.stderr


EPISODES = "    optimizer.zero_grad()\n    for _ in range(CALLS): model(torch.randn(ROWS, 64)).sum().backward()\n"
EPISODES = TRAIN.replace("    optimizer.zero_grad()\n", EPISODES)


@pytest.mark.slow
def test_calls_that_are_alike_are_named_once(script: Callable[[str], str], run: Run) -> None:
    done = run("rehearse", script(EPISODES.replace("CALLS", "5").replace("ROWS", "8 + step")), "--steps", "20")
    assert done.code == 2
    (text,) = re.findall(r"it called the model with .*", done.err)
    assert text == (
        "it called the model with [256, 64] float32 and 5 times [19, 64] float32, and another step that began with "
        "the same batch with [256, 64] float32 and 5 times [18, 64] float32."
    )


@pytest.mark.slow
def test_a_script_that_ends_before_steps_that_do_the_same_work_is_told_so(
    script: Callable[[str], str], run: Run
) -> None:
    done = run("rehearse", script(EPISODES.replace("CALLS", "step").replace("ROWS", "8")))
    assert done.code == 2
    assert "ended after 5 steps, before Sequential was rehearsed" in done.err
    assert "its steps did not do the same work: in one, it saved" in done.err


TAUGHT = TRAIN.replace(
    "    x = torch", "    with torch.no_grad(): teacher(torch.randn(512, 64))\n    x = torch"
).replace("optimizer = ", "teacher = nn.Sequential(nn.Linear(64, 256), nn.ReLU())\noptimizer = ")
EVALUATED = TRAIN.replace("    x = torch", "    with torch.no_grad(): model(torch.randn(8, 64))\n    x = torch")


@pytest.mark.parametrize(("text", "n"), [(TAUGHT, 1), (EVALUATED, 0), (TRAIN, 0)])
def test_models_called_before_the_trained_one_are_reported(
    text: str, n: int, script: Callable[[str], str], run: Run
) -> None:
    done = run("run", "--budget", "90%", script(text))
    assert done.code == 0
    assert done.err.count("note: another Sequential is called before the model in each step") == n


PROFILED = TRAIN.replace(
    "for step in",
    """from torch.profiler import profile, schedule
profiler = profile(schedule=schedule(wait=1, warmup=1, active=2, repeat=1))
profiler.start()
for step in""",
).replace("    print(step", "    profiler.step()\n    print(step")


@pytest.mark.slow
def test_steps_that_a_profiler_of_the_script_records_are_left_to_it(
    script: Callable[[str], str], run: Run, run_python: RunPython
) -> None:
    train = script(PROFILED + "profiler.stop()\nprint(len(profiler.key_averages()) > 0)\n")
    plain = run_python(train, "--steps", "9").stdout
    done = run("run", "--budget", "80%", train, "--steps", "9")
    assert (done.code, done.out) == (0, plain), done.err
    assert plain.endswith("True\n")
    assert "within the budget" in done.err
    assert done.err.count("the script runs its own recorder, such as a profiler: steps after it are rehearsed") == 1
    ended = run("run", "--budget", "80%", train, "--steps", "4")
    assert ended.code == 2
    assert "several sizes; the script itself recorded 3 of them, as with a profiler" in ended.err
