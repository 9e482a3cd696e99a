import importlib.metadata
import platform
import sys
import types
from collections.abc import Callable
from pathlib import Path

import click
import pytest

import lowtide
from conftest import RunPython
from lowtide import cli
from lowtide.errors import BudgetError, Infeasible

IMPORTED_TORCH = "; import sys; print('torch' in sys.modules)"


def test_help_lists_the_commands_and_loads_no_torch(run_python: RunPython) -> None:
    done = run_python("-c", "from lowtide.cli import main; print(main(['--help']))" + IMPORTED_TORCH)
    assert done.stdout.startswith("Usage: lowtide ")
    assert "\n    lowtide run --budget 8GiB train.py   train within 8 GiB" in done.stdout
    assert done.stdout.endswith("\n0\nFalse\n")
    for name in cli.COMMANDS:
        assert f"\n  {name} " in done.stdout


def test_completion_loads_no_torch(run_python: RunPython, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_LOWTIDE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "lowtide ")
    monkeypatch.setenv("COMP_CWORD", "1")
    code = (
        "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); import lowtide.cli as c; c.main()"
    )
    assert run_python("-c", code).stdout.splitlines() == [*(f"plain,{name}" for name in cli.COMMANDS), "False"]


def test_version(run_python: RunPython) -> None:
    done = run_python("-m", "lowtide", "--version")
    name, torch_and_tested, python, hooks = done.stdout.splitlines()
    assert done.returncode == 0
    assert name == f"lowtide {lowtide.__version__}"
    assert torch_and_tested.startswith(f"torch {importlib.metadata.version('torch')} (tested: 2.10, ")
    assert python == f"Python {platform.python_version()}"
    assert hooks == "hooks: Python (LOWTIDE_NATIVE=0)"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_command_loads_and_has_a_summary_of_one_line(name: str) -> None:
    entry = cli.COMMANDS[name]
    assert entry.load(name).name == name
    assert entry.summary.endswith(".")
    assert len(entry.summary) < 80


def test_without_torch_a_command_says_what_to_install(tmp_path: Path, run_python: RunPython) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('none here')", encoding="utf-8")
    done = run_python("-m", "lowtide", "demo", path=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("lowtide.TorchMissing: lowtide demo needs torch 2.10 or newer.\n")
    assert 'pip install "lowtide[torch]"' in done.stderr


Body = Callable[[], int | None]


@pytest.fixture
def run_body(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run `lowtide probe` with this function as the command's body; gives the exit code."""

    def run(body: Body, *args: str) -> int:
        module = types.ModuleType("probe")
        module.probe = click.command("probe")(body)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "probe", module)
        monkeypatch.setitem(
            cli.COMMANDS, "probe", cli.Lazy(target="probe:probe", summary="A probe.", needs_torch=False)
        )
        return cli.main(["probe", *args])

    return run


def raises(error: BaseException) -> Body:
    def body() -> None:
        raise error

    return body


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (1, 1), (2, 2)])
def test_the_return_value_of_a_command_is_the_exit_code(
    returned: int | None, code: int, run_body: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_body(lambda: returned) == code
    assert run_body(lambda: click.get_current_context().exit(code)) == code
    assert capsys.readouterr() == ("", "")


def test_an_error_of_ours_is_a_message_and_its_exit_code(
    run_body: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_body(raises(BudgetError("'8G' is not an amount of memory."))) == 2
    assert capsys.readouterr() == ("", "lowtide.BudgetError: '8G' is not an amount of memory.\n")
    assert run_body(raises(Infeasible(budget_bytes=1, smallest_peak_bytes=1024, parts={}))) == 1
    assert capsys.readouterr().err.startswith("lowtide.Infeasible: no plan fits 1 B.\n  Smallest peak: 1 KiB.\n")


def test_any_other_error_is_a_traceback_and_a_failure(
    run_body: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_body(raises(ZeroDivisionError("of the step"))) == 2
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):\n")


@pytest.mark.parametrize("error", [click.ClickException("no"), click.FileError("x"), click.UsageError("no")])
def test_no_error_of_click_passes_for_a_finding(error: click.ClickException, run_body: Callable[..., int]) -> None:
    assert run_body(raises(error)) == 2


def test_an_interrupt_ends_quietly(run_body: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_body(raises(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


@pytest.mark.parametrize("args", [[], ["nonsense"], ["--nonsense"]])
def test_a_wrong_command_line_is_a_failure_that_shows_the_usage(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(args) == 2
    assert "Usage: lowtide " in capsys.readouterr().err


def test_an_error_says_which_of_several_processes_it_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "no.py")
    for world, said in (("1", "lowtide.LowtideError: "), ("2", "lowtide.LowtideError, rank 1: ")):
        monkeypatch.setenv("WORLD_SIZE", world)
        monkeypatch.setenv("RANK", "1")
        assert cli.main(("watch", missing)) == 2
        assert capsys.readouterr().err.startswith(f"{said}{missing} is not a file")
