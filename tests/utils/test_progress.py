"""Progress of long work: bars on a terminal, one line a stage, and nothing where stderr is a pipe."""

import inspect
import io
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from interrupting import Interrupting
from lowtide.cli import main
from lowtide.utils.interrupts import RESEND_S
from lowtide.utils.messages import say, shown_bars
from lowtide.utils.progress import Stage, _here, showing

X = torch.randn(256, 64)
STAGES = ["audited", "rehearsed", "planned for", "verified the plan for"]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)])


def fits(**settings: Any) -> None:
    model = net()

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    lowtide.fit(model, step, X, budget="90%", **settings)


def trains_within(**settings: Any) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    with lowtide.within("90%", **settings):
        for _ in range(5):
            model(X).square().mean().backward()
            optimizer.step()


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Make stderr a terminal; the result is what was written to it, once the block is over."""
    ours, theirs = os.openpty()
    found = bytearray()

    def reads() -> None:
        with suppress(OSError):  # the other end is closed
            while read := os.read(ours, 4096):
                found.extend(read)

    reader = threading.Thread(target=reads)
    reader.start()
    with open(theirs, "w") as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "120")
        yield lambda: found.decode()
    reader.join(5)
    os.close(ours)


def lines(screen: str) -> list[str]:
    """The lines that stay on the screen."""
    return [line for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen).replace("\r", "\n").split("\n") if line]


def test_a_line_that_is_said_beside_a_bar_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as screen, showing(True), Stage("planning", total=3) as stage:
        stage.advance()
        say("a note")
    (line,) = [line for line in screen().split("\n") if "a note" in line]
    on_its_line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line.rpartition("\x1b[2K")[2])
    assert on_its_line.strip() == "lowtide: a note"
    assert screen().rpartition("a note")[2].count("planning") >= 1  # and the bar goes on


def test_a_line_is_one_write_for_processes_share_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []

    class Unbuffered(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, text: Any) -> int:
            written.extend([bytes(text)] if text else [])
            return len(text)

    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(Unbuffered(), write_through=True))  # type: ignore[arg-type]
    say("a note")
    assert written == [b"lowtide: a note\n"]


def test_on_a_terminal_a_bar_runs_and_each_stage_leaves_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as screen:
        fits()
    for doing in ("auditing Sequential", "rehearsing Sequential", "planning", "verifying the plan for Sequential"):
        assert f"lowtide: {doing}" in screen()
        assert "━" in screen()
    left = [line for line in lines(screen()) if "━" not in line]
    for stage in STAGES:
        assert len([line for line in left if line.startswith(f"lowtide: {stage}")]) == 1, left
    assert screen().endswith("s\r\n")  # the last line has the time, and no bar is left


def test_a_loop_shows_bars_in_its_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as screen:
        trains_within()
    for doing in ("rehearsing Sequential, step 1", "rehearsing Sequential, step 2", "planning", "verifying the plan"):
        assert f"lowtide: {doing}" in screen()
    left = [line for line in lines(screen()) if "━" not in line]
    assert left[0] == "lowtide: rehearsed Sequential in 2 steps"
    assert "within the budget" in left[-1]


@pytest.mark.parametrize("work", [fits, trains_within])
def test_without_progress_nothing_is_on_the_terminal(
    work: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal(monkeypatch) as screen:
        work(progress=False)
    assert not screen()


SCRIPT = """
import torch
from torch import nn
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters())
for _ in range(4):
    model(torch.randn(256, 64)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("options", [[], ["--no-progress"]])
def test_a_script_is_run_with_bars_or_without(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with terminal(monkeypatch) as screen:
        assert main(["run", "--budget", "90%", *options, str(script)]) == 0
    assert ("lowtide: rehearsing Sequential, step 1" in screen()) is not bool(options)
    assert "lowtide: rehearsed Sequential in 2 steps" in screen()


def test_a_pipe_has_no_bars_and_the_log_has_the_lines(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    fits()
    assert not capfd.readouterr().err
    with caplog.at_level(logging.DEBUG, logger="lowtide"):
        fits()
    assert not capfd.readouterr().err
    info = [record.message for record in caplog.records if record.levelno == logging.INFO]
    assert [next(stage for stage in STAGES if line.startswith(stage)) for line in info] == STAGES
    debug = [record.message for record in caplog.records if record.levelno == logging.DEBUG]
    assert "verifying the plan for Sequential" in debug


def test_no_bar_is_shown_beside_a_programs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm")
    with terminal(monkeypatch) as screen:
        own = tqdm.tqdm(total=1, desc="mine")
        trains_within()
        own.close()
    assert "lowtide: rehearsing" not in screen()
    assert "lowtide: rehearsed Sequential in 2 steps" in screen()


def first_call(function: Callable[..., Any]) -> Interrupting:
    """An interrupt when `function` is called for the first time."""
    code = inspect.unwrap(function).__code__
    return Interrupting(((code, code.co_firstlineno), 1))


def await_interrupt() -> None:
    """Wait for an interrupt that is resent because a plan of an earlier test still holds interrupts back."""
    for _ in range(20):
        time.sleep(RESEND_S)


@pytest.mark.parametrize("name", ["acquire", "release", "clear", "refresh"])
def test_a_line_that_is_interrupted_leaves_tqdms_lock_free(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bars = pytest.importorskip("tqdm.std")
    lock = bars.tqdm.get_lock()
    are_free: list[bool] = []

    def try_locks() -> None:  # the thread that holds one may acquire it again
        for each in lock.locks:
            are_free.append(each.acquire(False))
            if are_free[-1]:
                each.release()

    with terminal(monkeypatch) as screen:
        own = bars.tqdm(total=1, desc="mine", ncols=40, nrows=9)
        function = getattr(lock, name, None) or getattr(own, name)
        with pytest.raises(KeyboardInterrupt), first_call(function.__func__):  # noqa: PT012
            say("a note")
            await_interrupt()
        other = threading.Thread(target=try_locks)
        other.start()
        other.join()
        own.close()
    assert are_free == [True] * len(lock.locks)
    assert screen().count("mine") >= 2  # the bar is drawn again


@pytest.mark.parametrize("name", ["__init__", "start", "update", "stop"])
def test_a_stage_that_is_interrupted_leaves_no_bar(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = pytest.importorskip("rich.progress")
    with terminal(monkeypatch) as screen:
        interrupting = first_call(getattr(progress.Progress, name))
        with pytest.raises(KeyboardInterrupt), interrupting, showing(True):  # noqa: PT012
            with Stage("working") as stage:
                stage.advance()
            await_interrupt()
        assert not _here.open
        assert not shown_bars
    assert screen().count("\x1b[?25l") == screen().count("\x1b[?25h") > 0  # the cursor was hidden, and is shown


def test_a_stage_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        with showing(True), Stage("working") as stage:
            stage.result = "worked"
            raise KeyError

    with terminal(monkeypatch) as screen:
        with pytest.raises(KeyError):
            fails()
        with Stage("hidden"):
            pass
    assert "lowtide: working" in screen()
    assert "worked" not in screen()
    assert "hidden" not in screen()


@pytest.mark.slow
def test_in_a_notebook_the_bars_are_tqdms() -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    import nbformat

    source = (
        "import torch, lowtide\n"
        "from torch import nn\n"
        "model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)])\n"
        "fitted = lowtide.fit(model, lambda x: model(x).sum().backward(), torch.randn(256, 64), budget='90%')\n"
        "print(fitted)"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    nbclient.NotebookClient(notebook, timeout=120).execute()
    [cell] = notebook.cells
    said = "".join(output.get("text", "") for output in cell.outputs)
    assert "peak (budget" in said
    assert "lowtide: verified the plan for Sequential" in said
