"""Plan files on the command line: shown, compared, and drawn as a frontier; without torch."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import RunPython
from lowtide import cli
from lowtide.planner import plan
from lowtide.planner.budget_frontier import frontier
from lowtide.planner.records import Decided, Plan
from lowtide.report.plan_text import compare, show_diff
from planner.profiles import chain

PROFILE = chain(6)
SMALL, LARGE = plan(PROFILE, "70%"), plan(PROFILE, "90%")


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    paths = str(tmp_path / "small.json"), str(tmp_path / "large.json")
    for made, path in zip((SMALL, LARGE), paths, strict=True):
        made.to_json(path)
    return paths


def test_a_plan_is_shown(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "show", files[0]]) == 0
    shown = capsys.readouterr().out
    assert "peak predicted (budget " in shown
    assert f"for {PROFILE.fingerprint.model}, batch {PROFILE.fingerprint.batch}, on cpu, torch 2.13.0" in shown


def test_blocks_of_which_the_same_is_decided_are_shown_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recompute = {
        f"h.{i}.{part}#0:{n}": "MulBackward0" for i in range(8) for part, n in (("ln", 0), ("ln", 1), ("act", 0))
    }
    larger = Decided(recompute={}, replay=tuple(f"h.{i}#0" for i in range(8)))
    replace(SMALL, recompute=recompute, replay=("h.3.attn#0",), fallback=larger).to_json(tmp_path / "plan.json")
    cli.main(["plan", "show", str(tmp_path / "plan.json")])
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "  h.{0-7}: recompute act, ln (2)",
        "  h.3: replay attn",
        "on larger batches:",
        "  h.{0-7}: replay the block",
    ]


def test_a_plan_is_shown_as_json(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "show", "--json", files[0]]) == 0
    assert Plan.from_json(capsys.readouterr().out).decisions == SMALL.decisions


def test_equal_plans_do_not_differ(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "diff", files[0], files[0]]) == 0
    assert capsys.readouterr().out == "the plans are the same\n"


def test_plans_that_differ_only_for_larger_batches_are_not_the_same(files: tuple[str, str], tmp_path: Path) -> None:
    other = str(tmp_path / "other.json")
    replace(SMALL, fallback=None).to_json(other)
    assert SMALL.fallback is not None
    assert compare(SMALL, Plan.from_json(other)).larger
    assert "on larger batches" in show_diff(SMALL, Plan.from_json(other))
    assert compare(SMALL, Plan.from_json(files[0])).same


def test_the_difference_of_two_plans(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "diff", *files]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("budget: ")
    (time,) = [line for line in lines if line.startswith("extra time: ")]
    assert len(re.findall(r"\d ms a step \(\+[\d.]+ %\)", time)) == 2
    assert any(line.startswith("- re") for line in lines)
    assert cli.main(["plan", "diff", "--json", *files]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["numbers"]["budget_bytes"] == [SMALL.budget_bytes, LARGE.budget_bytes]
    only_small = {f"recompute {address}" for address in SMALL.recompute.keys() - LARGE.recompute.keys()}
    assert {line for line in found["only_first"] if line.startswith("recompute")} == only_small
    assert found["fingerprint"] == []


def test_plans_for_different_models_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = replace(SMALL, fingerprint=replace(SMALL.fingerprint, torch="2.12.0"))
    SMALL.to_json(tmp_path / "a.json")
    other.to_json(tmp_path / "b.json")
    assert cli.main(["plan", "diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 1
    assert capsys.readouterr().out == "torch: made for 2.13.0, found 2.12.0\n"


def test_the_frontier_is_a_table_json_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, points, drawn, peers = (str(tmp_path / n) for n in ("profile.json", "points.json", "f.svg", "peers.json"))
    PROFILE.to_json(profile)
    peer = {"name": "every <block>", "peak_bytes": 3_000_000, "extra_ms": 2.5, "extra_flops": 10, "share": 0.5}
    Path(peers).write_text(json.dumps([peer]), encoding="utf-8")
    args = ["frontier", "--budgets", "5", "--json", points, "--picture", drawn, "--beside", peers, profile]
    assert cli.main(args) == 0
    found = frontier(PROFILE, n_budgets=5)
    assert json.loads(Path(points).read_text(encoding="utf-8")) == json.loads(found.to_json())
    rows = capsys.readouterr().out.splitlines()[1:]
    assert len([row for row in rows if "%" in row]) == len(found.points) + 1
    assert sum("every <block>" in row for row in rows) == 1
    assert ">every &lt;block&gt;<" in Path(drawn).read_text(encoding="utf-8")


def test_plans_and_frontiers_need_no_torch(files: tuple[str, str], tmp_path: Path, run_python: RunPython) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('none here')", encoding="utf-8")
    PROFILE.to_json(tmp_path / "profile.json")
    profile = str(tmp_path / "profile.json")
    commands = [["plan", "show", files[0]], ["plan", "make", "--budget", "80%", profile], ["frontier", profile]]
    code = f"from lowtide import cli; print([cli.main(args) for args in {[*commands, ['rehearse', 'train.py']]}])"
    done = run_python("-c", code, path=tmp_path)
    assert done.stdout.endswith("[0, 0, 0, 2]\n")
    assert done.stderr.startswith("lowtide.TorchMissing: lowtide, to rehearse train.py, needs torch")
