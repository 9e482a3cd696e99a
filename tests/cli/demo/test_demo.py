"""`lowtide demo`: what it finds on small models, what it says of it, and how it ends."""

import io
import json
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from lowtide import cli
from lowtide.cli.demo import command, workloads
from lowtide.cli.demo import compare as contest
from lowtide.cli.demo import results_table as table
from lowtide.cli.demo.results import Comparison, Run, Same
from lowtide.planner.records import Fingerprint, Plan, Prediction, Static
from lowtide.units import format_bytes
from lowtide.utils.amounts import parse_budget

SMALL = {
    "gpt2": ("--layers=2", "--batch-size=8", "--length=64", "--budget=85%"),
    "bert": ("--layers=2", "--batch-size=32", "--length=64", "--budget=90%"),
    "llama": ("--layers=1", "--batch-size=8", "--length=64", "--budget=97%"),
    "resnet": ("--layers=1", "--batch-size=64", "--length=32", "--budget=85%", "--budget=20%"),
}

# --- what it finds --------------------------------------------------------------------------------------------------


def check(found: Comparison, steps: int) -> None:
    """Assertions that hold for the demo of every model."""
    plain, *runs = found.runs
    assert plain.kind == "plain"
    assert len(plain.losses) == len(plain.step_ms) == steps
    trained = [run for run in runs if run.refusal is None]
    assert any(run.kind == "budget" for run in trained)
    for run in trained:
        assert run.same == Same(losses=True, gradients=True, state=True)
        assert run.differences == run.drifted == ()
        assert run.losses == plain.losses
        assert len(run.step_ms) == len(run.plain_step_ms) == steps
        assert run.time_ratio == min(run.step_ms) / min(run.plain_step_ms)
        assert run.measured_peak_bytes is not None
        assert plain.measured_peak_bytes is not None
        assert run.measured_peak_bytes <= plain.measured_peak_bytes
        if run.kind == "budget":
            assert run.plan is not None
            assert run.budget_bytes is not None
            assert run.measured_peak_bytes <= run.budget_bytes
            assert run.predicted_peak_bytes == run.plan.predicted.peak_bytes
            assert run.predicted_peak_bytes == pytest.approx(run.measured_peak_bytes, rel=0.02)
    assert found.wrong == ()


@dataclass(frozen=True)
class Ended:
    """A run of the command: its exit code, what it printed, and its file."""

    code: int
    stdout: str
    stderr: str
    path: Path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    path = tmp_path_factory.mktemp("demo") / "found.json"
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = cli.main(["demo", "--model=resnet", "--steps=2", *SMALL["resnet"], "--json", str(path)])
    return Ended(code, out.getvalue(), err.getvalue(), path)


@pytest.mark.xdist_group("a real run")  # in one worker, for `small`
def test_a_real_run_prints_a_row_for_each_way_to_train(small: Ended) -> None:
    assert small.stderr == f"lowtide: written: {small.path}\n"  # no bar and no noise where nobody watches
    assert small.code == 1  # asked for 20 %, which nothing reaches here
    lines = small.stdout.splitlines()
    table_lines = lines[: lines.index("", lines.index("") + 1)]  # the bars have the same names
    rows = {line.split("  ")[0]: line.split() for line in table_lines}
    assert rows["85%"][-1] == "equal"
    assert rows["20%"][-1] == "none"
    assert rows["smallest"]
    assert rows["checkpointing"][-1] == "none"
    assert any(line.startswith(("85%: recomputed ", "85%: gradients in place: ")) for line in lines)
    assert any(line.startswith("20%: no plan fits; the smallest peak of any is ") for line in lines)
    assert "Proven here for 85%, smallest: over 2 steps every loss" in " ".join(lines).replace("  ", " ")
    assert max(map(len, lines[:-1])) <= 80
    assert "…" not in small.stdout


@pytest.mark.xdist_group("a real run")
def test_a_real_runs_json_has_it_all(small: Ended) -> None:
    found = Comparison.from_json(small.path)
    check(found, steps=2)
    plain, within, refused, smallest, checkpointed = found.runs
    assert [run.name for run in found.runs] == ["plain", "85%", "20%", "smallest", "checkpointing"]
    assert plain.measured_peak_bytes is not None
    assert within.budget_bytes == parse_budget("85%", plain.measured_peak_bytes)
    assert refused.measured_peak_bytes is None
    assert refused.smallest_peak_bytes is not None
    assert smallest.budget_bytes == parse_budget(format_bytes(refused.smallest_peak_bytes, round_up=True))
    assert checkpointed.refusal == "transformers does not support checkpointing for ResNetForImageClassification"
    assert set(found.versions) == {"lowtide", "torch", "transformers", "python"}
    stages = [(16, 32), (32, 64), (64, 128)]  # the first block of a stage has a convolution of 1 x 1 beside it
    convolutions = 49 * 16 + sum(inner * outer + 9 * inner * outer + 9 * outer**2 for inner, outer in stages)
    norms = 2 * 16 + sum(3 * 2 * outer for _, outer in stages)
    assert found.static.parameters == 4 * (convolutions + norms + 128 * 10 + 10)
    assert found.static.gradients == 0
    raw = json.loads(small.path.read_text(encoding="utf-8"))
    assert raw["model"] == "resnet"
    assert raw["runs"][1]["same"] == {"losses": True, "gradients": True, "state": True}
    assert raw["runs"][1]["plan"]["recompute"]
    for private in (str(Path.home()), str(Path(__file__).parents[3])):
        assert private not in small.path.read_text(encoding="utf-8")


@pytest.mark.xdist_group("a real run")
def test_a_real_runs_json_is_shown_and_made_a_page(
    small: Ended, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, answer = tmp_path / "page.html", "It fits: the step peaks at"
    assert cli.main(["report", str(small.path)]) == 0
    assert answer in capsys.readouterr().out
    assert cli.main(["report", str(small.path), "-o", str(page)]) == 0
    assert answer in page.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("model", [name for name in SMALL if name != "resnet"])
def test_the_other_models(model: str) -> None:
    result = run("--steps=2", "--json=-", "--model", model, *SMALL[model])
    assert result.return_value == 0
    found = Comparison.from_json(result.stdout)  # nothing else is printed
    check(found, steps=2)
    assert found.model == model
    assert found.runs[-1].kind == "checkpoint"
    assert found.runs[-1].identical


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert", "resnet"])
def test_each_budget_has_a_plan_at_the_usual_size(model: str) -> None:
    result = run("--steps=1", "--json=-", "--model", model)
    assert result.return_value == 0
    found = Comparison.from_json(result.stdout)
    check(found, steps=1)
    assert found.unreached == ()


@pytest.mark.slow
def test_the_count_of_steps_comes_out() -> None:
    reports: list[tuple[str, int, int]] = []
    work, plain = (workloads.workload("resnet", batch_size=16, length=32, layers=1) for _ in range(2))
    found = contest.compare(work, plain, ["100%", "1%"], steps=1, watch=lambda *progress: reports.append(progress))
    done = [n for _, n, _ in reports]
    assert done == sorted(done)
    assert all(n <= total for _, n, total in reports)
    assert reports[-1][1] == reports[-1][2]
    everything_fits = found.runs[1]
    assert everything_fits.plan is not None
    assert not everything_fits.plan.recompute
    assert not work.model.__dict__.keys() - plain.model.__dict__.keys()  # nothing is left on the model


# --- how it ends, and what it says ----------------------------------------------------------------------------------

PREDICTION = Prediction(peak_bytes=600, peak_position=0, held_bytes=0, extra_ms=1, extra_flops=0, parts={})
PLAN = Plan(
    fingerprint=Fingerprint(torch="", model="", batch="", device="cpu"),
    budget_bytes=700,
    recompute={"h.0#0:1": "GeluBackward0", "h.1#0:1": "GeluBackward0", "ln#0:0": "NativeLayerNormBackward0"},
    replay=("h.0.attn#0", "h.1.attn#0"),
    predicted=PREDICTION,
    plain=replace(PREDICTION, peak_bytes=1000),
    step_ms=10,
)
PLAIN = Run(kind="plain", name="plain", measured_peak_bytes=1000)
GOOD = Run(
    kind="budget",
    name="70 %",
    budget_bytes=700,
    predicted_peak_bytes=600,
    measured_peak_bytes=650,
    time_ratio=1.05,
    same=Same(losses=True, gradients=True, state=True),
    plan=PLAN,
)
OVER = replace(GOOD, measured_peak_bytes=701)
DIFFERENT = replace(
    GOOD,
    same=Same(losses=True, gradients=False, state=True),
    differences=("step 1: gradients", "step 2: gradients"),
)
UNREACHED = Run(kind="budget", name="35 %", budget_bytes=350, smallest_peak_bytes=400, refusal="no plan fits; ...")


def comparison(*runs: Run, **others: Any) -> Comparison:
    return Comparison(
        versions={},
        model="gpt2",
        description="A model",
        optimizer="AdamW",
        batch="",
        device="cpu",
        threads=1,
        steps=2,
        items="tokens",
        items_per_step=64,
        static=Static(parameters=300),
        runs=(PLAIN, *runs),
        **others,
    )


def run(*args: str) -> Result:
    return CliRunner().invoke(cli.lowtide, ["demo", *args], standalone_mode=False)


def shown(found: Comparison, *, in_unicode: bool = True) -> str:
    text = table.show(found, in_unicode=in_unicode)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    return text


@pytest.mark.parametrize(
    ("found", "args", "code"),
    [
        (comparison(GOOD), [], 0),
        (comparison(GOOD, UNREACHED), [], 0),
        (comparison(GOOD, UNREACHED), ["--budget=35%"], 1),
        (comparison(OVER), [], 1),
        (comparison(DIFFERENT), [], 1),
    ],
)
def test_exit_codes(found: Comparison, args: Sequence[str], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "workload", lambda *args, **kwargs: None)
    monkeypatch.setattr(contest, "compare", lambda *args, **kwargs: found)
    assert run(*args).return_value == code


def test_the_table_lists_recomputed_and_replayed_parts() -> None:
    assert "70 %: recomputed GELU (2), layer norm (1); replayed h.{0-1}.attn." in shown(comparison(GOOD))
    row = next(line for line in shown(comparison(GOOD)).splitlines() if line.startswith("70 % "))
    assert row.split() == ["70", "%", "700", "B", "600", "B", "650", "B", "+5", "%", "3", "2", "equal"]


def test_a_broken_promise_is_reported() -> None:
    assert "70 %: the measured peak is ABOVE the budget." in shown(comparison(OVER))
    text = shown(comparison(DIFFERENT))
    assert "70 %: NOT the plain loop's bits: step 1: gradients; step 2: gradients." in text
    assert " DIFFER" in text
    assert "Proven" not in text
    assert "2 tensors were not what the plan expects" in shown(comparison(replace(GOOD, drifted=("a#0:0", "b#0:0"))))


def test_one_step_is_one_step() -> None:
    text = " ".join(shown(replace(comparison(GOOD), steps=1)).split())
    assert "64 tokens a step, 1 step a run." in text
    assert "over 1 step every loss" in text


def test_the_table_can_be_written_in_ascii() -> None:
    text = shown(comparison(GOOD, UNREACHED, notes=("a note",)), in_unicode=False)
    assert text.isascii()
    assert "###" in text
    assert "Note: a note." in text


def test_the_records_survive_json() -> None:
    found = comparison(GOOD, DIFFERENT, UNREACHED, notes=("a note",))
    assert Comparison.from_json(found.to_json()) == found
    assert msgspec.json.decode(found.to_json())["runs"][1]["measured_peak_bytes"] == 650


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--budget", "8G"], "'8G' is not an amount of memory: G can mean powers of 1000 or of 1024"),
        (["--budget", "half"], "it is not a number with a unit"),
        (["--budget", "0%"], "it is less than one byte"),
        (["--steps", "0"], "--steps"),
        (["--model", "gpt3"], "'gpt3' is not one of 'gpt2', 'bert', 'llama', 'resnet'"),
        (["--json", "/no/such/folder/found.json"], "/no/such/folder is not a folder to write to"),
        (["--model", "resnet", "--batch-size", "5000"], "a batch of 5000 rows was asked for, and the data has 1797"),
        (["--model", "bert", "--length", "513"], "513 tokens a row: all-MiniLM-L6-v2 has 512 positions"),
    ],
)
def test_a_wrong_argument_is_refused_in_words_before_the_work(
    args: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contest, "compare", lambda *args, **kwargs: pytest.fail("the work was begun"))
    assert cli.main(["demo", *args]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_the_command_knows_every_workload() -> None:
    assert command.MODELS == workloads.MODELS
